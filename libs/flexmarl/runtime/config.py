"""Configuration: TOML < environment < `--set`, into one frozen pydantic model.

Environment variables are named `PREFIX__SECTION__KEY`. Values from the environment and from `--set`
are TOML values; what is not one is taken as bare text, so `--set server.host=127.0.0.1` works.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, TypeGuard, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails

from flexmarl.core.errors import ErrorReason
from flexmarl.runtime.config_section import Section

ModelT = TypeVar("ModelT", bound=BaseModel)

_MAX_PROBLEMS: Final = 8
"""So many problems of a configuration are said; the rest is counted."""

_NO_TEXT: Final = re.compile("[\0\ud800-\udfff]")
"""NUL, which no path holds, and what no file or contract takes as text."""


class ConfigError(ValueError):
    """The configuration is wrong; the message is one line that names the key."""

    reason = ErrorReason.INVALID_ARGUMENT


class UnknownKeyError(ConfigError):
    """A key that no section has; the message suggests the closest one."""

    reason = ErrorReason.UNKNOWN_CONFIG_KEY


class ServerTlsConfig(Section):
    """Certificates of a server, for gRPC and its metrics endpoint. SIGHUP has them read again."""

    cert: Path | None = None
    """Certificate chain (PEM); unset: connections are not encrypted."""
    key: Path | None = None
    """Private key of it (PEM), readable by this service's user alone."""
    client_ca: Path | None = None
    """Certificates (PEM) that a client's own must be signed by; unset: clients need none."""


class ClientConfig(Section):
    """What this process shows to the services that it calls."""

    ca: Path | None = None
    """Certificates (PEM) that servers' certificates must be signed by; unset: no TLS."""
    cert: Path | None = None
    """Own certificate chain (PEM), for servers that ask for one."""
    key: Path | None = None
    """Private key of it (PEM), readable by this process's user alone."""
    token_file: Path | None = None
    """File that holds the token, mode 0600; unset: none is sent."""
    insecure: bool = False
    """Send the token to other machines without TLS, too."""


class ServerConfig(Section):
    """Where a service listens, whom it lets in, and how it stops."""

    host: str = "127.0.0.1"
    """Address to bind. Any other than loopback takes `tls` and `tokens`, or `insecure`."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to bind; 0 takes a free one, see `address_file`."""
    advertise_host: str = ""
    """Host that others reach this service by; empty: `host`."""
    reflection: bool = True
    """Offer gRPC server reflection."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint; 0 takes a free one; unset: no endpoint."""
    tls: ServerTlsConfig = ServerTlsConfig()
    """Certificates."""
    tokens: Path | None = None
    """File of the tokens that callers must show, mode 0600; unset: everybody may call.
    SIGHUP has it read again."""
    insecure: bool = False
    """Listen beyond loopback without `tls` and `tokens`: another wall keeps strangers out."""
    max_requests_per_s: float = Field(default=500.0, ge=0)
    """Most calls a second from one host, on average, those with an admin's token aside; 0: no
    bound. It holds where there are tokens."""
    handshake_timeout_s: float = Field(default=10.0, gt=0)
    """A connection that is not set up within this time is closed."""
    grace_s: float = Field(default=5.0, ge=0)
    """How long calls in flight may finish after SIGTERM, once drained."""
    drain_s: float = Field(default=20.0, ge=0)
    """How long all drain hooks together may take after SIGTERM."""
    address_file: Path | None = None
    """File that receives the bound address as JSON, atomically, once the service is ready."""


class LogConfig(Section):
    """What is logged, and where to."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is written."""
    file: Path | None = None
    """File to append to; unset: standard error."""


class ServiceConfig(Section):
    """What every service's configuration has."""

    server: ServerConfig = ServerConfig()
    """Address, locks, health, reflection, metrics, stop."""
    client: ClientConfig = ClientConfig()
    """Credentials for the services that this one calls."""
    log: LogConfig = LogConfig()
    """Logging."""


def load_config(
    model: type[ModelT],
    *,
    path: Path | None = None,
    stored_json: bytes = b"",
    env_prefix: str = "",
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> ModelT:
    """Read and validate a configuration.

    Args:
        model: Pydantic model of the whole file.
        path: TOML file, or None for defaults.
        stored_json: A configuration resolved earlier, to be changed, instead of a file.
        env_prefix: Such as `FLEXMARL_MEG_STORE`; empty: the environment is not read.
        overrides: `a.b=value` items, the last word.
        environ: Environment to read; `os.environ` by default.

    Raises:
        ConfigError: One line naming the key; `UnknownKeyError` for a key that does not exist.
    """
    values: dict[str, Any] = json.loads(stored_json or b"{}") if path is None else _read_toml(path)
    source = "config" if path is None else str(path)
    if env_prefix:
        for keys, text in _from_environ(env_prefix, os.environ if environ is None else environ):
            _put(values, keys, text)
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {item!r}: write it as section.key=value")
        _put(values, key.strip().split("."), text.strip())
    _refuse_no_text(values, "")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _one_line(error, model, source) from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also text that is not UTF-8, endless numbers
        raise ConfigError(f"{path}: not TOML: {error}") from None


def _refuse_no_text(value: object, key: str) -> None:
    """Refuses what no file, contract or stored config takes as text."""
    if isinstance(value, dict):
        for name, item in value.items():
            _refuse_no_text(name, key or repr(name))
            _refuse_no_text(item, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for item in value:
            _refuse_no_text(item, key)
    elif isinstance(value, str) and _NO_TEXT.search(value):
        raise ConfigError(f"{key}: {value!r} has NUL, or something else that is no UTF-8 text")


def _from_environ(prefix: str, environ: Mapping[str, str]) -> Iterator[tuple[list[str], str]]:
    head = prefix.upper() + "__"
    for name in sorted(environ):
        if name.startswith(head):
            yield name[len(head) :].lower().split("__"), environ[name]


def _put(values: dict[str, Any], keys: Sequence[str], text: str) -> None:
    name = ".".join(keys)
    section = values
    for key in keys[:-1]:
        inner = section.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{name}: {key!r} is a value, not a section")
        section = inner
    section[keys[-1]] = _parse(text)


def _parse(text: str) -> Any:  # noqa: ANN401 - a TOML value is of any type until validated
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _one_line(error: ValidationError, model: type[BaseModel], source: str) -> ConfigError:
    # An unknown key often causes the other problems (the right key is then missing): it goes first.
    problems = sorted(error.errors(include_url=False), key=lambda each: not _is_unknown_key(each))
    said = list(dict.fromkeys(_say(problem, model) for problem in problems))
    hidden = len(said) - _MAX_PROBLEMS
    more = f" (and {hidden} more)" if hidden > 0 else ""
    kind = UnknownKeyError if _is_unknown_key(problems[0]) else ConfigError
    return kind(f"{source}: {'; '.join(said[:_MAX_PROBLEMS])}{more}")


def _is_unknown_key(problem: ErrorDetails) -> bool:
    return problem["type"] == "extra_forbidden"


def _say(problem: ErrorDetails, model: type[BaseModel]) -> str:
    key, section = _resolve(model, problem["loc"])
    if _is_unknown_key(problem):
        return f"unknown key {key!r}{_suggestion(key, section, model)}"
    # What a validator of ours raised is a sentence of its own, which names keys where it must.
    raised = problem.get("ctx", {}).get("error")
    message = str(raised) if isinstance(raised, ValueError) else problem["msg"]
    return f"{key}: {message}" if key else message


def _resolve(
    model: type[BaseModel], loc: Sequence[int | str]
) -> tuple[str, type[BaseModel] | None]:
    """The key that a user wrote, and the section that it stands in.

    pydantic puts the names of a union's members between the keys; a user never wrote those.
    """
    keys: list[str] = []
    section: type[BaseModel] | None = model
    annotation: object = model
    for part in loc:
        members = _members(annotation)
        if any(part == _name_of(member) for member in members) and len(members) > 1:
            annotation = next(m for m in members if part == _name_of(m))
            continue
        keys.append(str(part))
        section = next((m for m in members if _is_section(m)), None)
        if section is not None:
            field = section.model_fields.get(str(part))
            annotation = None if field is None else field.annotation
        else:
            annotation = next((_items_of(m) for m in members if get_args(m)), None)
    return ".".join(keys), section


def _suggestion(key: str, section: type[BaseModel] | None, model: type[BaseModel]) -> str:
    """The key that was probably meant, in full.

    In this order: its very name further down, a similar name beside it, its very name anywhere, any
    similar key.
    """
    parent, _, leaf = key.rpartition(".")
    prefix = f"{parent}." if parent else ""
    beside = [] if section is None else list(section.model_fields)
    below = [] if section is None else sorted(_dotted_keys(section))
    known = sorted(_dotted_keys(model))
    found = (
        [prefix + name for name in below if name.rpartition(".")[2] == leaf]
        or [prefix + name for name in get_close_matches(leaf, beside, n=1)]
        or [name for name in known if name.rpartition(".")[2] == leaf]
        or get_close_matches(key, known, n=1)
    )
    return f", did you mean {found[0]!r}?" if found else ""


def _dotted_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for member in _members(field.annotation):
            if _is_section(member):
                yield from _dotted_keys(member, f"{prefix}{name}.")
            elif get_origin(member) is dict:
                for inner in _members(get_args(member)[1]):
                    if _is_section(inner):
                        yield from _dotted_keys(inner, f"{prefix}{name}.<name>.")


def _members(annotation: object) -> list[Any]:
    """The members of a union; a type that is none stands for itself."""
    if get_origin(annotation) in (Union, UnionType):
        return [inner for member in get_args(annotation) for inner in _members(member)]
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    return [annotation]


def _items_of(collection: object) -> object:
    """What stands below a mapping or a list, whatever its name or place."""
    arguments = get_args(collection)
    return arguments[-1] if get_origin(collection) is dict else arguments[0]


def _name_of(member: object) -> str:
    return getattr(member, "__name__", "")


def _is_section(member: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(member, type) and issubclass(member, BaseModel)

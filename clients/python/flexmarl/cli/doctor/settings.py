"""What a service's configuration file says about its host, and whether the service takes it.

The first is read here, also where the service is not installed; the second its own process says.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from pydantic import ValidationError

from flexmarl.core.access import exposure_refusal
from flexmarl.runtime.config import ClientConfig, ConfigError, ServerConfig
from flexmarl.runtime.tls import client_credentials, has_tls, server_context
from flexmarl.runtime.tokens import read_tokens

_PEER_KEYS: Final = ("dispatcher", "rollout", "trainers")
_SERVICES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "meg-store": "meg_store",
        "rollout": "rollout",
        "engine-host": "rollout",
        "trainer": "trainer",
        "orchestrator": "orchestrator",
    }
)
_CHECK_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What doctor needs of one service's configuration.

    Attributes:
        path: Its file.
        address: Where it listens; empty: at a port that is free by then.
        peers: Services that it calls.
        data_dir: Where it writes; None: it does not say.
        shm_dir: Folder of its memory tier; None: it has none, or does not say where.
        memory_tier_bytes: Bound of that tier; 0: the service's default.
        num_gpus: GPUs that its slots ask for.
        client: Credentials for its peers.
        problem: What is wrong with the file, in one line; empty: nothing is.
    """

    path: Path
    address: str = ""
    peers: tuple[str, ...] = ()
    data_dir: Path | None = None
    shm_dir: Path | None = None
    memory_tier_bytes: int = 0
    num_gpus: int = 0
    client: ClientConfig = field(default_factory=ClientConfig)
    problem: str = ""

    @property
    def service(self) -> str:
        """What findings call it."""
        return self.path.stem


def read_settings(path: Path) -> Settings:
    """Read a file; what is wrong is in `problem`, and what can be read is there all the same."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return Settings(path=path, problem=f"{path}: cannot be read: {error.strerror}")
    except ValueError as error:
        return Settings(path=path, problem=f"{path}: not TOML: {error}")
    try:
        server = ServerConfig.model_validate(data.get("server", {}))
        client = ClientConfig.model_validate(data.get("client", {}))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        return Settings(path=path, problem=f"{path}: server or client: {key}: {first['msg']}")
    store = _section(data, "store")
    return Settings(
        path=path,
        address=_own_address(server),
        peers=tuple(_peers(data)),
        data_dir=_path(store.get("data_dir") or data.get("data_dir")),
        shm_dir=_path(store.get("shm_dir")),
        memory_tier_bytes=_whole(store.get("memory_tier_bytes")),
        num_gpus=_num_slots(data) if data.get("device") == "cuda" else 0,
        client=client,
        problem=_lock_problem(path, server, client),
    )


def ask_services(settings: Sequence[Settings]) -> list[Settings]:
    """The same, with what their services have against the files, of those that are installed."""
    checks = [_start_check(each) for each in settings]
    return [_with_answer(each, check) for each, check in zip(settings, checks, strict=True)]


def _start_check(settings: Settings) -> subprocess.Popen[str] | None:
    name = _SERVICES.get(settings.service)
    if settings.problem or name is None or find_spec(f"flexmarl.{name}") is None:
        return None
    return subprocess.Popen(
        [sys.executable, "-m", f"flexmarl.{name}", "--check", "--config", str(settings.path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _with_answer(settings: Settings, check: subprocess.Popen[str] | None) -> Settings:
    if check is None:
        return settings
    try:
        _, said = check.communicate(timeout=_CHECK_S)
    except subprocess.TimeoutExpired:
        check.kill()
        check.communicate()
        return settings  # a host this slow has other findings
    if not check.returncode:
        return settings
    line = (said.strip().splitlines() or [f"exit code {check.returncode}"])[-1]
    return replace(settings, problem=line.partition(": ")[2] or line)


def _own_address(server: ServerConfig) -> str:
    if not server.port:
        return ""
    anywhere = server.host in ("0.0.0.0", "::")  # noqa: S104 - recognised, not bound
    return f"{'127.0.0.1' if anywhere else server.host}:{server.port}"


def _peers(data: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for key in _PEER_KEYS:
        value = data.get(key)
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, Sequence):
            found += [str(item) for item in value]
    return found


# What has the wrong type is left to the service, which says so; here it is as if it were not there.


def _section(data: dict[str, Any], name: str) -> dict[str, Any]:
    value = data.get(name)
    return value if isinstance(value, dict) else {}


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _num_slots(data: dict[str, Any]) -> int:
    value = data.get("slots")
    return len(value) if isinstance(value, list) else 1


def _path(value: object) -> Path | None:
    return Path(value) if isinstance(value, str) and value else None


def _lock_problem(path: Path, server: ServerConfig, client: ClientConfig) -> str:
    try:
        encrypted = has_tls(server.tls)
        if encrypted:
            server_context(server.tls)
        if server.tokens is not None:
            read_tokens(server.tokens)
        client_credentials(client)
    except ConfigError as error:
        return f"{path}: {error}"
    refused = exposure_refusal(
        host=server.host,
        has_tls=encrypted,
        has_tokens=server.tokens is not None,
        insecure=server.insecure,
    )
    return f"{path}: {refused}" if refused else ""

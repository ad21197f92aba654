"""The file of tokens: who may call, by the hash of what they show.

::

    [tokens.alice]                 # the name stands in logs
    role = "submit"                # read, submit or admin
    sha256 = "9f86d081..."         # of the token, which is 256 random bits

    [run_keys]
    secret = "..."                 # the keys of single runs are derived from it

A run's key is `flexmarl-run.ROLE.RUN.MAC`, MAC = HMAC-SHA256(secret, "ROLE.RUN"): the services
check it without keeping anything, and a new secret ends all of them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flexmarl.core.access import Grant, Role, parse_role
from flexmarl.core.ids import check_name
from flexmarl.runtime.config import ConfigError
from flexmarl.runtime.secret_files import read_secret

_RUN_KEY_START: Final = "flexmarl-run."
_START: Final = "flexmarl-"
_SECRET_BYTES: Final = 32


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _TokenEntry(_Strict):
    role: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class _RunKeys(_Strict):
    secret: str = Field(min_length=32)


class _TokenFile(_Strict):
    tokens: dict[str, _TokenEntry] = Field(default_factory=dict)
    run_keys: _RunKeys | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens that a service knows; their own texts are not among what it keeps.

    Attributes:
        grants: What each allows, by its SHA-256 in hex.
        run_secret: Secret of the runs' keys; empty: none is known.
    """

    grants: tuple[tuple[str, Grant], ...]
    run_secret: str = field(default="", repr=False)

    def grant_of(self, token: str) -> Grant | None:
        """What a caller's token allows; None when nobody has it.

        Every known one is compared, in constant time: how long it takes tells nothing.
        """
        if token.startswith(_RUN_KEY_START):
            return self._grant_of_run_key(token)
        digest = hash_token(token)
        found = None
        for known, grant in self.grants:
            if hmac.compare_digest(known, digest):
                found = grant
        return found

    def _grant_of_run_key(self, token: str) -> Grant | None:
        role_text, _, rest = token.removeprefix(_RUN_KEY_START).partition(".")
        run_id, _, _ = rest.rpartition(".")
        try:
            role = parse_role(role_text)
        except ValueError:
            return None
        if not self.run_secret or not run_id or role is Role.ADMIN:
            return None
        made = make_run_key(self.run_secret, run_id, role)
        if not hmac.compare_digest(made.encode(), token.encode()):
            return None
        return Grant(name=f"key of {run_id}", role=role, run_id=run_id)


def hash_token(token: str) -> str:
    """SHA-256 of a token, in hex. Tokens are random: there is nothing to guess, so no salt."""
    return hashlib.sha256(token.encode()).hexdigest()


def make_token() -> str:
    """A new token: 256 random bits."""
    return _START + secrets.token_urlsafe(_SECRET_BYTES)


def make_run_key(secret: str, run_id: str, role: Role) -> str:
    """The key of one run.

    Raises:
        ValueError: No key of a run makes an administrator.
    """
    if role is Role.ADMIN:
        raise ValueError("a run's key is for the role read or submit, not admin")
    said = f"{role.name.lower()}.{run_id}"
    mac = hmac.new(secret.encode(), said.encode(), hashlib.sha256).hexdigest()
    return f"{_RUN_KEY_START}{said}.{mac}"


def read_tokens(path: Path, *, what: str = "server.tokens") -> Tokens:
    """Read a file of tokens.

    Raises:
        ConfigError: It is missing, readable by others, or not what such a file is.
    """
    content = read_secret(path, what=what)
    try:
        parsed = _TokenFile.model_validate(tomllib.loads(content.decode()))
    except ValidationError as error:
        # Not the message of the library: it repeats the value, which may be a secret.
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise ConfigError(f"{what}: {path}: {key}: {problem['msg']}") from None
    except ValueError:
        raise ConfigError(f"{what}: {path} is not TOML") from None
    grants = tuple(
        (entry.sha256, _grant(name, entry.role, where=f"{what}: {path}"))
        for name, entry in parsed.tokens.items()
    )
    if not grants:
        raise ConfigError(f"{what}: {path} names no token, so nobody could call")
    secret = "" if parsed.run_keys is None else parsed.run_keys.secret
    return Tokens(grants, secret)


def _grant(name: str, role: str, *, where: str) -> Grant:
    try:
        return Grant(name=check_name(name, what="token"), role=parse_role(role))
    except ValueError as error:
        raise ConfigError(f"{where}: tokens.{name}: {error}") from None

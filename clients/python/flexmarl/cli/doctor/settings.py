"""What a service's configuration file says about its host; its service is not needed to read it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from flexmarl.core.access import exposure_refusal
from flexmarl.runtime.config import ClientConfig, ConfigError, ServerConfig
from flexmarl.runtime.tls import client_credentials, has_tls, server_context
from flexmarl.runtime.tokens import read_tokens

_PEER_KEYS: Final = ("dispatcher", "rollout", "trainers")


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
    store = data.get("store", {})
    return Settings(
        path=path,
        address=_own_address(server),
        peers=tuple(_peers(data)),
        data_dir=_path(store.get("data_dir") or data.get("data_dir")),
        shm_dir=_path(store.get("shm_dir")),
        memory_tier_bytes=int(store.get("memory_tier_bytes", 0)),
        num_gpus=len(data.get("slots", ["slot0"])) if data.get("device") == "cuda" else 0,
        client=client,
        problem=_lock_problem(path, server, client),
    )


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

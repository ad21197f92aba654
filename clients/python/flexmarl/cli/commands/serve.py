"""`flexmarl serve`: becomes a service process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from flexmarl.cli.errors import CliError

_SERVICES: Final = ("meg_store", "rollout", "trainer", "orchestrator")
_ROLES: Final = ("dispatcher", "engine-host")

CONFIG_DIR: Final = Path("/etc/flexmarl")
"""Where services are configured on a host, unless FLEXMARL_CONFIG_DIR names another folder."""


def serve(service: str, *, role: str, config: Path | None, overrides: Sequence[str]) -> None:
    """Replace this process by the service; signals reach it directly.

    Args:
        service: Such as `meg-store`.
        role: Of rollout.
        config: TOML file; None: the host's own for this service, if it has one.
        overrides: `KEY=VALUE` items.

    Raises:
        CliError: No such service, role or file.
    """
    folder = Path(os.environ.get("FLEXMARL_CONFIG_DIR") or CONFIG_DIR)
    command = service_command(
        service, role=role, config=config or host_config(folder, service, role), sets=overrides
    )
    os.execv(sys.executable, command)  # noqa: S606 - no shell: its own interpreter and arguments


def host_config(folder: Path, service: str, role: str) -> Path | None:
    """A service's file in a host's configuration folder; None when there is none.

    An engine host has one of its own, for it may run beside the dispatcher.
    """
    name = "engine-host" if role == "engine-host" else service.replace("_", "-")
    file = folder / f"{name}.toml"
    return file if file.is_file() else None


def service_command(
    service: str, *, role: str, config: Path | None, sets: Sequence[str]
) -> list[str]:
    """The command of a service process."""
    name = service.replace("-", "_")
    if name not in _SERVICES or find_spec(f"flexmarl.{name}") is None:
        close = get_close_matches(name, _SERVICES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"services: {', '.join(_SERVICES)}"
        raise CliError(f"no service {service!r}; {hint}")
    if role and (name != "rollout" or role not in _ROLES):
        raise CliError(f"--role {role!r}: rollout has the roles {' and '.join(_ROLES)}")
    if config is not None and not config.is_file():
        raise CliError(f"--config: no file {config}")
    command = [sys.executable, "-m", f"flexmarl.{name}"]
    if config is not None:
        command += ["--config", str(config)]
    for item in [*sets, *([f"role={role}"] if role else [])]:
        command += ["--set", item]
    return command

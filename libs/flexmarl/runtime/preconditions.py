"""What a service needs of its host before it starts: one clear line where it is missing."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from flexmarl.runtime.config import ConfigError


def require_folder(path: Path, *, key: str, mode: int = 0o777) -> Path:
    """Make a folder that a setting names, if need be; it must take files.

    Args:
        path: The folder.
        key: Key of the setting, for the message.
        mode: Of the folder if it is made; the process's mask takes its part.

    Raises:
        ConfigError: It cannot be made or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=mode)
    except OSError as error:
        raise ConfigError(
            f"{key}: {path} cannot be made: {error.strerror}; name another folder"
        ) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}: {path} cannot be written by user {os.geteuid()}")
    return path


def require_module(module: str, *, service: str) -> None:
    """Refuse to start where the extra of a service is not installed.

    Raises:
        ConfigError: The module is not there.
    """
    if find_spec(module) is None:
        raise ConfigError(missing_module(module, service=service))


def missing_module(module: str, *, service: str) -> str:
    """What to do about a module that only the extra of a service brings."""
    extra = service.replace("_", "-")
    return (
        f"{module} is not installed here: pip install 'flexmarl[{extra}]', "
        f"or use the image of this service"
    )

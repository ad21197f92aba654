"""Reading files that must not be read by others: keys and tokens. One clear line when they can."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from flexmarl.runtime.config import ConfigError

_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def read_file(path: Path, *, what: str) -> bytes:
    """Content of a file that a setting names.

    Args:
        path: The file.
        what: Key of the setting, for messages.

    Raises:
        ConfigError: It cannot be read, or is empty.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{what}: {path}: {error.strerror}") from None
    if not content.strip():
        raise ConfigError(f"{what}: {path} is empty")
    return content


def read_secret(path: Path, *, what: str) -> bytes:
    """The same of a file that only its owner may read.

    Raises:
        ConfigError: It cannot be read, is empty, or its mode lets others in.
    """
    # Mode and content are of the same file, whatever is put in its place meanwhile.
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read()
    except OSError as error:
        raise ConfigError(f"{what}: {path}: {error.strerror}") from None
    if mode & _OTHERS:
        raise ConfigError(
            f"{what}: {path} has mode {mode:04o}, so others can use it: chmod 600 {path}"
        )
    if not content.strip():
        raise ConfigError(f"{what}: {path} is empty")
    return content


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, atomically.

    Raises:
        OSError: It cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    temporary.replace(path)

"""Prints what extras of this project need, one requirement a line: `requirements.py EXTRA...`."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """The base's requirements and those of the extras, each once.

    Raises:
        KeyError: No such extra.
    """
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    optional: dict[str, list[str]] = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(each for extra in extras for each in optional[extra])]
    return list(dict.fromkeys(wanted))


if __name__ == "__main__":
    sys.stdout.writelines(
        f"{line}\n" for line in requirements(Path("pyproject.toml"), sys.argv[1:])
    )

"""A run's own functions, imported from its workflow's package.

A worker serves many runs over its life, and two packages may well have a module of one name. So
only one package is on the import path at a time, and modules of another one are forgotten first.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from flexmarl.core.errors import DomainError, ErrorReason

_paths: list[str] = []


def load(package: Path, name: str) -> Any:  # noqa: ANN401 - the caller knows what it asked for
    """Imports "module:function" of a package.

    Raises:
        DomainError: WORKFLOW_IMPORT_FAILED saying what is wrong.
    """
    _enter(str(package))
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function, None)
    except (Exception, SystemExit) as error:
        raise _failed(name, f"{type(error).__name__}: {error}") from error
    if not callable(found):
        raise _failed(name, f"{module} has no function {function}")
    return found


def _enter(path: str) -> None:
    if _paths == [path]:
        return
    for old in _paths:
        sys.path.remove(old)
        for module in [name for name, held in sys.modules.items() if _is_below(held, old)]:
            del sys.modules[module]
    _paths[:] = [path]
    sys.path.insert(0, path)
    importlib.invalidate_caches()


def _is_below(module: object, folder: str) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and Path(file).is_relative_to(folder)


def _failed(name: str, why: str) -> DomainError:
    return DomainError(
        ErrorReason.WORKFLOW_IMPORT_FAILED,
        f"{name} of the workflow's package: {why}",
        {"name": name},
    )

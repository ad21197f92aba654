"""Imports a workflow package in a process of its own and says what is wrong with it.

Reads `{"package": FOLDER, "functions": {KEY: {"name": "module:function", "coroutine": BOOL}}}` from
standard input and writes `{}` or `{"key", "message", "file", "line"}`. What user code prints goes
to standard error.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import traceback
from difflib import get_close_matches
from pathlib import Path
from typing import Any


class _ProblemError(Exception):
    def __init__(self, message: str, *, file: str = "", line: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.file = file
        self.line = line


def check(package: str, functions: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The first problem, or nothing."""
    sys.path.insert(0, package)
    sys.dont_write_bytecode = True
    for key, wanted in functions.items():
        try:
            _check_function(package, wanted["name"], coroutine=wanted["coroutine"])
        except _ProblemError as problem:
            return {
                "key": key,
                "message": problem.message,
                "file": problem.file,
                "line": problem.line,
            }
    return {}


def _check_function(package: str, name: str, *, coroutine: bool) -> None:
    module_name, colon, function_name = name.partition(":")
    if not (colon and module_name and function_name):
        raise _ProblemError(f'{name!r}: write it as "module:function"')
    module = _import(package, module_name)
    function = getattr(module, function_name, None)
    file = getattr(module, "__file__", None) or module_name
    if function is None:
        found = [key for key, value in vars(module).items() if callable(value)]
        raise _ProblemError(f"no function {function_name!r} in {file}{_hint(function_name, found)}")
    if not callable(function):
        raise _ProblemError(f"{function_name!r} in {file} is no function")
    if coroutine and not inspect.iscoroutinefunction(function):
        raise _ProblemError(f"{function_name!r} in {file} is not an `async def` function")


def _import(package: str, module_name: str) -> Any:  # noqa: ANN401 - a module of the user's
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name == module_name.partition(".")[0]:
            found = [path.stem for path in Path(package).glob("*.py")]
            raise _ProblemError(
                f"no module {module_name!r} in {package}{_hint(module_name, found)}"
            ) from None
        raise _located(package, module_name, error) from None
    except SyntaxError as error:
        file, line = error.filename or "", error.lineno or 0
        message = f"module {module_name!r}: {error.msg}"
        raise _ProblemError(message, file=file, line=line) from None
    except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit too
        raise _located(package, module_name, error) from None


def _located(package: str, module_name: str, error: BaseException) -> _ProblemError:
    frames = traceback.extract_tb(error.__traceback__)
    mine = [frame for frame in frames if frame.filename.startswith(package)] or frames
    message = f"module {module_name!r} raises {type(error).__name__}: {error}"
    return _ProblemError(message, file=mine[-1].filename, line=mine[-1].lineno or 0)


def _hint(name: str, found: list[str]) -> str:
    close = get_close_matches(name, found, n=1)
    if close:
        return f", did you mean {close[0]!r}?"
    return f"; it has: {', '.join(sorted(found)[:10]) or 'none'}"


def main() -> None:
    """Read, check, answer."""
    request = json.load(sys.stdin)
    answer = os.dup(1)
    os.dup2(2, 1)
    result = check(request["package"], request["functions"])
    os.write(answer, json.dumps(result).encode())
    # User modules may have started threads that do not end.
    os._exit(0)


if __name__ == "__main__":
    main()

"""What went wrong in user code, told in one line with the place, without internal text.

Whatever was raised, something is told: an exception may have no text, endless text, or raise itself
when it is asked for it.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexmarl.api.common.v1.common_pb2 import Failure
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.row_limits import MAX_FACTS_BYTES, clipped
from flexmarl.rollout.workflow import CallError


def failure(reason: str, message: str, /, **metadata: str) -> Failure:
    """A failure message; what a row would not take of it is left out."""
    facts, left = {}, MAX_FACTS_BYTES
    for name, value in metadata.items():
        name, value = clipped(name), clipped(value)
        left -= len(name.encode()) + len(value.encode())
        if left >= 0:
            facts[name] = value
    return Failure(reason=clipped(str(reason)), message=clipped(message), metadata=facts)


def of_exception(error: BaseException, *, reason: ErrorReason, what: str, folder: Path) -> Failure:
    """The failure that an exception out of user code stands for.

    Args:
        error: What was raised; of a group, its first member counts.
        reason: Reason, unless the exception brings one of its own.
        what: What raised, such as "workflow team:team".
        folder: The user's package, whose files are named.
    """
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    if isinstance(error, (CallError, DomainError)):
        return _of_call(error.reason, error.message, error.metadata)
    place = user_place(error, folder)
    text = " ".join(_text(error).split())
    detail = f"{type(error).__name__}: {text}" if text else type(error).__name__
    where = f" ({place})" if place else ""
    return failure(reason, f"{what} raised {detail}{where}", what=what, place=place)


def user_place(error: BaseException, folder: Path) -> str:
    """file:line of the innermost frame in the user's package; empty when there is none."""
    root = folder.resolve()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_absolute() and path.is_relative_to(root):
            return f"{path.relative_to(root)}:{frame.lineno} in {frame.name}"
    if isinstance(error, SyntaxError) and error.filename:
        path = Path(error.filename)
        name = path.relative_to(root) if path.is_relative_to(root) else path.name
        return f"{name}:{error.lineno}"
    return ""


def _of_call(reason: Any, message: Any, metadata: Mapping[Any, Any]) -> Failure:  # noqa: ANN401
    """User code may raise a CallError of its own, made of anything."""
    named = {_text(name): _text(value) for name, value in metadata.items()}
    return failure(_text(reason), _text(message), **named)


def _text(value: Any) -> str:  # noqa: ANN401
    try:
        return str(value)
    except BaseException:  # noqa: BLE001 - it is the user's, and may raise anything
        return f"(a {type(value).__name__} that cannot be shown)"

"""Paths of calls: names of a workflow's calls that a repeated run gives again (design, replay).

Each task of a sample gets its ordinal under its parent when it is *created*; a call gets its
ordinal in its task when it is *made*. Both follow from the program text alone, not from which task
happens to run first, so they are equal in every repetition. Numbering calls as they happen is not.
"""

from __future__ import annotations

import re
from typing import Final

ROOT_PATH: Final = "0"
"""Path of the task that runs the workflow itself."""

_KEY = re.compile(r"(?!__)[A-Za-z_][A-Za-z0-9_-]{0,55}")
_INTENT: Final = "__once__"


class PathNode:
    """One task of a sample: numbers its child tasks and its calls.

    Attributes:
        path: Ordinals from the root task down, such as `0.2.0`.
    """

    __slots__ = ("_calls", "_children", "_keys", "path")

    def __init__(self, path: str = ROOT_PATH) -> None:
        self.path = path
        self._children = 0
        self._calls = 0
        self._keys: set[str] | None = None

    def child(self) -> PathNode:
        """The node of a task that this task creates now."""
        ordinal = self._children
        self._children = ordinal + 1
        return PathNode(f"{self.path}.{ordinal}")

    def call(self, key: str | None = None) -> str:
        """The path of a call that this task makes now.

        Args:
            key: Replaces the ordinal; for workflows whose number of earlier calls may vary.

        Raises:
            ValueError: The key is malformed, or was used before in this task.
        """
        if key is None:
            ordinal = self._calls
            self._calls = ordinal + 1
            return f"{self.path}:{ordinal}"
        if _KEY.fullmatch(key) is None:
            raise ValueError(
                f"key {key!r}: use letters, digits, '-' and '_', at most 56, starting with a letter"
            )
        if self._keys is None:
            self._keys = set()
        if key in self._keys:
            raise ValueError(f"key {key!r} was used before in this task; a key names one call")
        self._keys.add(key)
        return f"{self.path}:{key}"


def intent_path(path: str) -> str:
    """Path of the record that a call is about to be made, for calls that are made at most once."""
    task, _, call = path.partition(":")
    return f"{task}:{_INTENT}{call}"


def sort_key(path: str) -> tuple[tuple[int, ...], int, str]:
    """Order of call paths: by task, numbered calls in order, then keyed ones by name."""
    task, _, call = path.partition(":")
    ordinals = tuple(int(part) for part in task.split("."))
    return (ordinals, int(call), "") if call.isdigit() else (ordinals, 1 << 62, call)

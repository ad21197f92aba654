"""What is stored of a sample: the answers that a repeated run is given instead of new ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import NoReturn

from flexmarl.api.meg_store.v1.graph_pb2 import Vertex


class Replay:
    """Stored vertices of one sample attempt, each given out once, to the call that made it.

    Args:
        stored: Finished vertices, tools and intents included.
        on_diverged: Called when the run asks for other work than is stored.
    """

    def __init__(self, stored: Iterable[Vertex], *, on_diverged: Callable[[], None]) -> None:
        self._stored = {vertex.meta.path: vertex for vertex in stored}
        self._on_diverged = on_diverged
        self._other_input = False

    @property
    def diverged(self) -> bool:
        """Whether other work was asked for than is stored, or less."""
        return self._other_input or bool(self._stored)

    def holds(self, path: str) -> bool:
        """Whether a vertex is stored under a path that nobody has asked for yet."""
        return path in self._stored

    def take(self, path: str, input_hash: bytes) -> Vertex | None:
        """The stored vertex of a path; None when there is none.

        Raises:
            CancelledError: Another input is stored under the path.
        """
        stored = self._stored.pop(path, None)
        if stored is not None and stored.meta.input_hash != input_hash:
            self._diverge(path)
        return stored

    def _diverge(self, path: str) -> NoReturn:
        self._other_input = True
        self._on_diverged()
        raise asyncio.CancelledError(f"another input is stored for the call at {path}")

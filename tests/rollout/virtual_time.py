"""An event loop whose clock stands still while something runs, and jumps while nothing does."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Jumping(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """Waits for nobody: the time that it should have waited passes at once."""

    passed_s = 0.0

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready and timeout:
            self.passed_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.passed_s


def run_virtually(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs something that waits for time alone, in no time; raises what callbacks raised, too."""
    raised: list[BaseException] = []

    def note(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        raised.append(context.get("exception") or AssertionError(context["message"]))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.get_loop().set_exception_handler(note)
        try:
            return runner.run(coroutine)
        finally:
            if raised:
                raise raised[0]

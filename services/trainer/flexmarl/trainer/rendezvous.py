"""The place where workers meet: one store in a process of its own, under a prefix per meeting.

What a meeting leaves there is deleted when it has ended: before the next one begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from typing import Final

from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.children import ChildProcess, Children

_ENTRY: Final = "flexmarl.trainer.rank.main:run_rendezvous"
_ANSWER_S: Final = 60.0


@dataclass(slots=True)
class _Served:
    child: ChildProcess
    frames: AsyncIterator[bytes]
    port: int = 0


class Rendezvous:
    """The store's process: started when first needed, and anew when it has died.

    Args:
        children: Starts it.
        host: Address that it listens on.
        timeout_s: Longest wait in the store.
    """

    def __init__(self, children: Children, *, host: str, timeout_s: float) -> None:
        self.host = host
        self._children = children
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._served: _Served | None = None
        self._used: set[str] = set()

    async def port(self, in_use: Collection[str]) -> int:
        """Returns the store's port.

        Args:
            in_use: Prefixes that are needed from now on; what was left under others is deleted.

        Raises:
            DomainError: CHILD_DIED.
        """
        async with self._lock:
            if self._served is None or self._served.child.exit_code is not None:
                self._served = await self._start()
            ended, self._used = self._used.difference(in_use), set(in_use)
            if ended or not self._served.port:
                self._served.port = await self._serve(self._served, ended)
            return self._served.port

    async def _serve(self, served: _Served, ended: Collection[str]) -> int:
        serve = rank_pb2.RankServeStore(host=self.host, ended=sorted(ended))
        command = rank_pb2.RankCommand(command_id=1, serve_store=serve)
        try:
            async with asyncio.timeout(_ANSWER_S):
                await served.child.link.send(command.SerializeToString())
                reply = rank_pb2.RankReply.FromString(await anext(served.frames))
        except (TimeoutError, StopAsyncIteration):
            served.child.kill()
            self._served = None
            raise _not_served() from None
        return reply.store_served.port

    async def _start(self) -> _Served:
        child = await self._children.spawn_preloaded(
            _ENTRY, {"timeout_s": self._timeout_s}, name="rendezvous"
        )
        frames = aiter(child.link)
        try:
            async with asyncio.timeout(_ANSWER_S):
                await anext(frames)  # that it runs
        except (TimeoutError, StopAsyncIteration):
            child.kill()
            raise _not_served() from None
        return _Served(child, frames)


def _not_served() -> DomainError:
    return DomainError(ErrorReason.CHILD_DIED, "the rendezvous of process groups does not answer")

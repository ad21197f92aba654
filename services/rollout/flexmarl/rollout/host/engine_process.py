"""One engine process as its host sees it: commands in, events out.

Commands of an instance never wait for another instance's: each process has its own sender, which
waits for commands (freed by `send`) and for room in the link (freed by the engine's reader, or by
the end of the link). What gathers meanwhile goes as one frame.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from flexmarl.api.common.v1.common_pb2 import Failure
from flexmarl.api.rollout.v1.engine_pb2 import (
    AbortBatch,
    EngineCommand,
    EngineEvent,
    EngineLoad,
    GenerateRequest,
    Ping,
)
from flexmarl.core.engine_host_events import InstanceWanted
from flexmarl.core.errors import DomainError
from flexmarl.runtime.children import ChildProcess

_MAX_REQUESTS_PER_FRAME = 1024


class EngineProcess:
    """See the module.

    Args:
        child: The started process.
        wanted: Instance that it is.
        generation: Number of the start, see `core.engine_host`.

    Attributes:
        ready: Whether its model is built.
        refusal: Why its model cannot be built.
        heard_at: When it said something last, in monotonic seconds.
        asked_at: When it was asked for a sign of life last.
    """

    def __init__(self, child: ChildProcess, *, wanted: InstanceWanted, generation: int) -> None:
        self.instance_id = wanted.instance_id
        self.policies = wanted.policies
        self.generation = generation
        self.ready = False
        self.refusal: Failure | None = None
        self.heard_at = time.monotonic()
        self.asked_at: float | None = None
        self._child = child
        self._requests: list[GenerateRequest] = []
        self._others: list[EngineCommand] = []
        self._filled = asyncio.Event()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    def generate(self, requests: Iterable[GenerateRequest]) -> None:
        """Queue requests; bounded by the host's attempt book."""
        self._requests.extend(requests)
        self._filled.set()

    def abort(self, attempt_ids: Iterable[str]) -> None:
        """Queue aborts; they do not overtake requests."""
        self._flush_requests()
        self._others.append(EngineCommand(abort=AbortBatch(attempt_ids=attempt_ids)))
        self._filled.set()

    def load(self, load: EngineLoad) -> None:
        """Queue a load; it does not overtake requests, nor they it."""
        self._flush_requests()
        self._others.append(EngineCommand(load=load))
        self._filled.set()

    def ask(self) -> None:
        """Ask for a sign of life."""
        self.asked_at = time.monotonic()
        self._others.append(EngineCommand(ping=Ping()))
        self._filled.set()

    async def run(self, on_event: Callable[[EngineEvent], None]) -> int:
        """Carry commands and events until the process ends.

        Returns:
            Its exit code.
        """
        sender = asyncio.create_task(self._send(), name=f"send to {self._child.name}")
        try:
            async for frame in self._child.link:
                self.heard_at = time.monotonic()
                on_event(EngineEvent.FromString(frame))
            return await self._child.wait(timeout_s=10.0)
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            self._child.kill()
            self._child.link.close()

    def kill(self) -> None:
        """End the process at once: it holds nothing that is not elsewhere."""
        self._child.kill()

    async def _send(self) -> None:
        link = self._child.link
        try:
            while True:
                await self._filled.wait()
                self._flush_requests()
                commands, self._others = self._others, []
                self._filled.clear()
                for command in commands:
                    await link.send(command.SerializeToString())
        except DomainError:
            self._child.kill()  # it does not read, or is gone; `run` sees the end of the link

    def _flush_requests(self) -> None:
        requests, self._requests = self._requests, []
        for start in range(0, len(requests), _MAX_REQUESTS_PER_FRAME):
            command = EngineCommand()
            command.generate.requests.extend(requests[start : start + _MAX_REQUESTS_PER_FRAME])
            self._others.append(command)

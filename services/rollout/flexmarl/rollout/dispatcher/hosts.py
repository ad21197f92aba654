"""Connected engine hosts: one long-lived stream each.

Hosts outlive dispatchers. Until the first run is opened here, what hosts say is kept for it, and no
result is acknowledged: it may be what a dispatcher before this one has asked for. Once a run was
closed, nobody waits for anything: until the next one is opened, hosts end what they run, and forget
what they hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final, Protocol

from flexmarl.api.rollout.v1.engine_pb2 import (
    ConnectEngineHostRequest,
    ConnectEngineHostResponse,
    GenerateResult,
    HostHello,
    InstancePlan,
    InstanceStatus,
)
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.placement import HostRoom
from flexmarl.rollout.dispatcher.checks import check_hello
from flexmarl.rollout.dispatcher.host_names import HostNames
from flexmarl.rollout.dispatcher.outgoing import Outgoing
from flexmarl.rollout.pieces import parts_of
from flexmarl.runtime.logging import get_logger

SETTLE_S: Final = 2.0
"""How long after the start every host that runs has dialled: what it pauses between two tries is
less, in the worst case."""

_PIECE: Final = 128
"""Results that are looked at before anybody else's turn."""

_log = get_logger(__name__)


class HostListener(Protocol):
    """The run that the hosts work for."""

    def host_connected(self, session: HostSession, hello: HostHello) -> None:
        """A host came, or came back."""
        ...

    def host_away(self, host_id: str) -> None:
        """A host's stream broke; it may come back."""
        ...

    def host_gone(self, host_id: str) -> None:
        """A host did not come back in time."""
        ...

    def host_statuses(self, session: HostSession, statuses: list[InstanceStatus]) -> None:
        """Instances changed."""
        ...

    def host_results(self, session: HostSession, results: list[GenerateResult]) -> None:
        """Attempts ended."""
        ...


class HostSession:
    """One connection of one host.

    Attributes:
        host_id: Name of the host.
        max_instances: Most instances it runs; 0 means as many as asked for.
        hello: How it introduced itself.
        outgoing: What waits to be sent to it.
        results: What it sent while no run was open.
    """

    def __init__(self, hello: HostHello) -> None:
        self.host_id = hello.host_id
        self.max_instances = int(hello.max_instances)
        self.hello = hello
        self.outgoing = Outgoing(ConnectEngineHostResponse)
        self.results: list[GenerateResult] = []

    def keep(self, message: ConnectEngineHostRequest) -> None:
        """Takes a message for the run that will be opened; the host bounds what it sends."""
        changed = {status.instance_id for status in message.instances}
        statuses = [s for s in self.hello.instances if s.instance_id not in changed]
        del self.hello.instances[:]
        self.hello.instances.extend([*statuses, *message.instances])
        self.results.extend(message.results)

    def forget(self) -> None:
        """What was kept has been told, or is true no longer."""
        for name in ("instances", "attempt_ids", "held"):
            self.hello.ClearField(name)
        self.results.clear()


class Hosts:
    """All connected hosts of the cluster.

    Args:
        grace_s: How long a lost host may take to come back.
    """

    def __init__(self, *, grace_s: float) -> None:
        self._grace_s = grace_s
        self._sessions: dict[str, HostSession] = {}
        self._away: dict[str, asyncio.TimerHandle] = {}
        self._listener: HostListener | None = None
        self._last_plan: InstancePlan | None = None
        self._names = HostNames()
        self._started_at = asyncio.get_running_loop().time()

    @property
    def sessions(self) -> list[HostSession]:
        """Connected hosts by name."""
        return [self._sessions[name] for name in sorted(self._sessions)]

    @property
    def rooms(self) -> list[HostRoom]:
        """Room at the connected hosts, by name."""
        return [HostRoom(session.host_id, session.max_instances) for session in self.sessions]

    def session(self, host_id: str) -> HostSession | None:
        """The connection of a host; None while it is away."""
        return self._sessions.get(host_id)

    def listen(self, listener: HostListener) -> None:
        """Sets the run that the hosts work for, and tells it of those that are there."""
        self._listener = listener
        for session in self.sessions:
            listener.host_connected(session, session.hello)
            listener.host_results(session, list(session.results))
            session.forget()

    def dismiss(self, last_plan: InstancePlan) -> None:
        """Ends the run at all hosts: at those that are away, too, if they come before the next."""
        self._listener = None
        self._last_plan = last_plan
        for session in self.sessions:
            self._dismiss(session, last_plan)

    @property
    def unsettled_s(self) -> float:
        """How long hosts that a dispatcher before this one had may yet take to dial; then 0."""
        left_s = self._started_at + SETTLE_S - asyncio.get_running_loop().time()
        return max(left_s, 0.0)

    async def settled(self) -> None:
        """Waits until hosts that a dispatcher before this one had are back; soon, and once."""
        if (left_s := self.unsettled_s) > 0:
            await asyncio.sleep(left_s)

    def close(self) -> None:
        """Ends all streams."""
        for session in self.sessions:
            session.outgoing.close()

    async def serve(
        self, requests: AsyncIterator[ConnectEngineHostRequest]
    ) -> AsyncIterator[ConnectEngineHostResponse]:
        """Carries one host's stream to its end.

        Waits for something to send (freed by a request, a load, an acknowledgement) and ends when
        the host's side does, or when the host dials again.

        Raises:
            DomainError: INVALID_ARGUMENT, the first message is no hello; ALREADY_EXISTS, a host of
                this name was started after this one.
        """
        first = await anext(aiter(requests), None)
        if first is None or not first.HasField("hello"):
            raise DomainError(ErrorReason.INVALID_ARGUMENT, "the first message must be a hello")
        check_hello(first.hello)
        self._names.check(first.hello)
        session = HostSession(first.hello)
        try:  # from here on: a host that the run cannot meet is no connected one
            self._connect(session)
            reader = asyncio.create_task(self._read(session, first, requests), name="host reader")
            try:
                while (message := await session.outgoing.take()) is not None:
                    for part in parts_of(message, large="requests", first="stored"):
                        yield part
            finally:
                reader.cancel()
        finally:
            self._disconnect(session)

    async def _read(
        self,
        session: HostSession,
        first: ConnectEngineHostRequest,
        requests: AsyncIterator[ConnectEngineHostRequest],
    ) -> None:
        try:
            await self._take(session, first)
            async for request in requests:
                if self._sessions.get(session.host_id) is not session:
                    return
                await self._take(session, request)
        except Exception:  # noqa: BLE001 - the stream ends, the host dials again
            _log.exception("host_stream_failed", host=session.host_id)
        finally:
            session.outgoing.close()

    async def _take(self, session: HostSession, request: ConnectEngineHostRequest) -> None:
        listener = self._listener
        if listener is None and self._last_plan is None:
            session.keep(request)
            return
        if listener is not None and request.instances:
            listener.host_statuses(session, list(request.instances))
        # In pieces: the first are on their way to the store while the next ones are looked at.
        results = list(request.results)
        for start in range(0, len(results), _PIECE):
            if start:
                await asyncio.sleep(0)
            self._take_results(session, results[start : start + _PIECE])

    def _take_results(self, session: HostSession, results: list[GenerateResult]) -> None:
        if self._listener is not None:
            self._listener.host_results(session, results)
        else:  # of a run that was closed: nobody waits for them
            session.outgoing.add().stored.extend(result.attempt_id for result in results)

    def _connect(self, session: HostSession) -> None:
        host_id = session.host_id
        old = self._sessions.get(host_id)
        if old is not None:
            old.outgoing.close()
            if old.hello.incarnation != session.hello.incarnation:
                self._names.replaced(host_id, old.hello.incarnation)
        self._sessions[host_id] = session
        timer = self._away.pop(host_id, None)
        if timer is not None:
            timer.cancel()
        _log.info("host_connected", host=host_id, max_instances=session.max_instances)
        session.outgoing.add()  # an answer at once: one that was refused before learns it from it
        if self._listener is not None:
            self._listener.host_connected(session, session.hello)
        elif self._last_plan is not None:
            self._dismiss(session, self._last_plan)

    def _dismiss(self, session: HostSession, last_plan: InstancePlan) -> None:
        session.forget()
        session.outgoing.add().plan.CopyFrom(last_plan)

    def _disconnect(self, session: HostSession) -> None:
        host_id = session.host_id
        if self._sessions.get(host_id) is not session:
            return  # it has dialled again
        del self._sessions[host_id]
        _log.warning("host_away", host=host_id, grace_s=self._grace_s)
        loop = asyncio.get_running_loop()
        self._away[host_id] = loop.call_later(self._grace_s, self._gone, host_id)
        if self._listener is not None:
            self._listener.host_away(host_id)

    def _gone(self, host_id: str) -> None:
        del self._away[host_id]
        self._names.freed(host_id)
        _log.warning("host_gone", host=host_id)
        if self._listener is not None:
            self._listener.host_gone(host_id)

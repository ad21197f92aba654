"""Connected engine hosts: one long-lived stream each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from flexmarl.api.rollout.v1alpha1.engine_pb2 import (
    ConnectEngineHostRequest,
    ConnectEngineHostResponse,
    GenerateResult,
    HostHello,
    InstanceStatus,
)
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ids import check_name
from flexmarl.rollout.dispatcher.outgoing import Outgoing
from flexmarl.runtime.logging import get_logger

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
    """

    def __init__(self, hello: HostHello) -> None:
        self.host_id = hello.host_id
        self.max_instances = int(hello.max_instances)
        self.hello = hello
        self.outgoing = Outgoing(ConnectEngineHostResponse)


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

    @property
    def sessions(self) -> list[HostSession]:
        """Connected hosts by name."""
        return [self._sessions[name] for name in sorted(self._sessions)]

    def session(self, host_id: str) -> HostSession | None:
        """The connection of a host; None while it is away."""
        return self._sessions.get(host_id)

    def listen(self, listener: HostListener | None) -> None:
        """Sets the run that the hosts work for, and tells it of those that are there."""
        self._listener = listener
        if listener is not None:
            for session in self.sessions:
                listener.host_connected(session, session.hello)

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
            DomainError: INVALID_ARGUMENT, the first message is no hello.
        """
        first = await anext(aiter(requests), None)
        if first is None or not first.HasField("hello"):
            raise DomainError(ErrorReason.INVALID_ARGUMENT, "the first message must be a hello")
        check_name(first.hello.host_id, what="host_id")
        session = HostSession(first.hello)
        self._connect(session)
        reader = asyncio.create_task(self._read(session, first, requests), name="host reader")
        try:
            while (message := await session.outgoing.take()) is not None:
                yield message
        finally:
            reader.cancel()
            self._disconnect(session)

    async def _read(
        self,
        session: HostSession,
        first: ConnectEngineHostRequest,
        requests: AsyncIterator[ConnectEngineHostRequest],
    ) -> None:
        try:
            self._take(session, first)
            async for request in requests:
                if self._sessions.get(session.host_id) is not session:
                    return
                self._take(session, request)
        except Exception:  # noqa: BLE001 - the stream ends, the host dials again
            _log.exception("host_stream_failed", host=session.host_id)
        finally:
            session.outgoing.close()

    def _take(self, session: HostSession, request: ConnectEngineHostRequest) -> None:
        listener = self._listener
        if listener is None:
            # No run is open: nobody waits for these results.
            if request.results:
                session.outgoing.add().stored.extend(r.attempt_id for r in request.results)
            return
        if request.instances:
            listener.host_statuses(session, list(request.instances))
        if request.results:
            listener.host_results(session, list(request.results))

    def _connect(self, session: HostSession) -> None:
        host_id = session.host_id
        old = self._sessions.get(host_id)
        if old is not None:
            old.outgoing.close()
        self._sessions[host_id] = session
        timer = self._away.pop(host_id, None)
        if timer is not None:
            timer.cancel()
        _log.info("host_connected", host=host_id, max_instances=session.max_instances)
        if self._listener is not None:
            self._listener.host_connected(session, session.hello)

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
        _log.warning("host_gone", host=host_id)
        if self._listener is not None:
            self._listener.host_gone(host_id)

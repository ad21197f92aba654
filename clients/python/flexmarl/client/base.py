"""What the typed clients of the services share: one connection, and patience with it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, ClassVar, Final, Self, TypeVar

import grpc

from flexmarl.client.channel import Channel, StreamCall, connect
from flexmarl.client.errors import (
    CancelledCallError,
    DeadlineError,
    FlexMarlError,
    InternalError,
    UnauthenticatedError,
    UnavailableError,
    make_error,
)
from flexmarl.core.call_context import onward_timeout_s
from flexmarl.core.errors import ErrorReason
from flexmarl.core.keepalive import DEFAULT_DEADLINE_S
from flexmarl.core.retry import Backoff

T = TypeVar("T")

PATIENCE_S: Final = 60.0
"""How long a service that does not answer is waited for, by default: longer than a restart."""

SILENCE_S: Final = 20.0
"""A stream without any sign of life for this long is opened again."""

_BACKOFF: Final = Backoff()
_BROKEN_STREAM: Final = (
    UnavailableError,
    DeadlineError,
    CancelledCallError,
    InternalError,
    TimeoutError,
)


class ServiceClient:
    """Client of one service; use it as an asynchronous context manager.

    A request is made once per logical call, its id included, and repeated as it is while the
    service does not answer. Patience begins with the first failure and never exceeds the deadline
    of the caller's own caller.

    Args:
        channel: From `connect`.
        patience_s: How long a service that does not answer is waited for.
        owns_channel: Close the channel with the client.
    """

    STUB: ClassVar[type[Any]]
    """Generated stub of the service."""
    DEADLINE_S: ClassVar[float] = DEFAULT_DEADLINE_S
    """Deadline of one try of a method that the project's table does not name."""
    REPEATED: ClassVar[tuple[type[FlexMarlError], ...]] = (UnavailableError, DeadlineError)
    """Failures that mean no answer."""

    def __init__(
        self, channel: Channel, *, patience_s: float = PATIENCE_S, owns_channel: bool = False
    ) -> None:
        self.address = channel.address
        self.name = channel.address
        """What messages call the service."""
        self.labels: Mapping[str, str] = {}
        """Metadata of the failures that say it does not answer."""
        self._channel = channel
        self._stub: Any = self.STUB(channel)
        self._patience_s = patience_s
        self._owns_channel = owns_channel
        self._rng = random.Random()  # noqa: S311 - jitter

    @classmethod
    def connect(cls, address: str, *, patience_s: float = PATIENCE_S) -> Self:
        """Client of the service at `host:port`; it connects on the first call."""
        channel = connect(address, default_deadline_s=cls.DEADLINE_S)
        return cls(channel, patience_s=patience_s, owns_channel=True)

    async def close(self) -> None:
        """Close the connection, if it was opened here."""
        if self._owns_channel:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _call(
        self,
        method: str,
        request: Any,  # noqa: ANN401 - a message of the contract
        *,
        timeout_s: float | None = None,
        patience_s: float | None = None,
    ) -> Any:  # noqa: ANN401 - a message of the contract
        """Call a method; `timeout_s` is of one try."""
        callable_ = getattr(self._stub, method)
        return await self._patiently(
            lambda: callable_(request, timeout=timeout_s), patience_s=patience_s
        )

    async def _patiently(
        self, once: Callable[[], Awaitable[T]], *, patience_s: float | None = None
    ) -> T:
        """Repeat while the service does not answer.

        Raises:
            UnavailableError: Patience is over.
            DomainError: Any other failure, at once.
        """
        failed = 0
        began = end = 0.0
        while True:
            try:
                return await once()
            except self.REPEATED as error:
                failure = error
            now = time.monotonic()
            if not failed:
                patience = self._patience_s if patience_s is None else patience_s
                began, end = now, now + (onward_timeout_s(patience, now=now) or 0.0)
            failed += 1
            if now >= end:
                raise self._no_answer(now - began, failure)
            await self._back_off(failed)

    async def _follow(self, open_stream: Callable[[], StreamCall]) -> AsyncGenerator[Any, None]:
        """Responses of a stream that is opened again when it breaks, ends or falls silent.

        One whose token was taken back ends as well; it is opened again with the token of now.

        Waits for responses; freed by the service, or by closing the iterator.

        Raises:
            UnavailableError: Patience is over without a response.
            DomainError: The service refuses the stream.
        """
        heard_at = time.monotonic()
        failed = 0
        while True:
            call = open_stream()
            was_let_in = False
            try:
                while True:
                    async with asyncio.timeout(SILENCE_S):
                        response = await call.read()
                    if response is grpc.aio.EOF:
                        break  # the service stops
                    failed, was_let_in = 0, True
                    yield response
                    heard_at = time.monotonic()
            except UnauthenticatedError:
                if not was_let_in:
                    raise
            except _BROKEN_STREAM as error:
                silent_s = time.monotonic() - heard_at
                if silent_s > self._patience_s:
                    raise self._no_answer(silent_s, error) from None
            finally:
                call.cancel()
            failed += 1
            await self._back_off(failed)

    def _no_answer(self, silent_s: float, failure: BaseException) -> FlexMarlError:
        why = failure.message if isinstance(failure, FlexMarlError) else "the stream is silent"
        return make_error(
            ErrorReason.UNAVAILABLE,
            f"{self.name}: no answer for {silent_s:.3g} s ({why})",
            self.labels,
        )

    async def _back_off(self, failed: int) -> None:
        await asyncio.sleep(_BACKOFF.delay_s(failed, rng=self._rng))

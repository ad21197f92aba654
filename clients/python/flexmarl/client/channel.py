"""The channel that every stub is built on: deadlines, typed errors, ids.

`Channel` is a `grpc.aio.Channel`, so generated stubs take it as it is::

    channel = connect("127.0.0.1:7001")
    run = await MegStoreServiceStub(channel).GetRun(request, timeout=2.0)

Each call gets `min(timeout or the method's default, what the caller's own deadline leaves)`. A
channel that shows the process's own credentials shows those of the moment: when the certificates
change, calls to come go over a connection made with the new ones, and what runs stays where it is.
Nothing is repeated here: that takes patience, which clients have (`flexmarl.client.base`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from typing import Any, Final, Self

import grpc

from flexmarl.client.errors import from_rpc_error, make_error
from flexmarl.core.access import is_loopback
from flexmarl.core.call_context import (
    IDS_METADATA_KEY,
    current_ids,
    encode_ids,
    onward_timeout_s,
)
from flexmarl.core.deadlines import DEADLINES_S
from flexmarl.core.errors import ErrorReason
from flexmarl.core.keepalive import DEFAULT_DEADLINE_S, client_options
from flexmarl.core.peer_credentials import PeerCredentials, current_credentials

Metadata = tuple[tuple[str, str], ...]
_Codec = Callable[[Any], Any] | None

_MAX_FORMER: Final = 8
"""Connections of replaced certificates that are kept for the calls that run on them; one without
calls is let go by gRPC itself, after half an hour."""


def connect(
    address: str,
    *,
    deadlines_s: Mapping[str, float | None] = DEADLINES_S,
    default_deadline_s: float = DEFAULT_DEADLINE_S,
    credentials: PeerCredentials | None = None,
) -> Channel:
    """Open a channel; it connects on the first call. Close it with `await channel.close()`.

    Args:
        address: `host:port` or `unix:/path`.
        deadlines_s: Default deadline by full method name (`/package.Service/Method`); None: no
            deadline, for long-lived streams only. By default the project's table.
        default_deadline_s: Deadline of methods that `deadlines_s` does not name.
        credentials: Certificates and token; by default the process's own, as they are at each call.

    Raises:
        InvalidError: A token would cross a network in clear.
    """
    return Channel(
        address,
        deadlines_s=deadlines_s,
        default_deadline_s=default_deadline_s,
        credentials=credentials,
    )


def open_channel(address: str, credentials: PeerCredentials) -> grpc.aio.Channel:
    """A bare channel with the project's settings, for what is no call of a service.

    Raises:
        InvalidError: A token would cross a network in clear.
    """
    if credentials.ca:
        encrypted = grpc.ssl_channel_credentials(
            root_certificates=credentials.ca,
            private_key=credentials.key or None,
            certificate_chain=credentials.certificate or None,
        )
        return grpc.aio.secure_channel(address, encrypted, options=client_options())
    if credentials.token and not (credentials.insecure or _is_local(address)):
        raise make_error(
            ErrorReason.INVALID_ARGUMENT,
            f"the token would go to {address} in clear: set client.ca, or client.insecure = true "
            "when a wall of your own stands around this network",
        )
    return grpc.aio.insecure_channel(address, options=client_options())


def _shown(credentials: PeerCredentials) -> Metadata:
    return (("authorization", f"Bearer {credentials.token}"),) if credentials.token else ()


def _is_local(address: str) -> bool:
    return address.startswith("unix:") or is_loopback(address.rpartition(":")[0])


class Channel(grpc.aio.Channel):
    """A gRPC channel with this project's call rules; made by `connect`."""

    def __init__(
        self,
        address: str,
        *,
        deadlines_s: Mapping[str, float | None],
        default_deadline_s: float,
        credentials: PeerCredentials | None,
    ) -> None:
        self.address = address
        self._deadlines_s = deadlines_s
        self._default_deadline_s = default_deadline_s
        self._follows = credentials is None
        self._credentials = current_credentials() if credentials is None else credentials
        self._channel = open_channel(address, self._credentials)
        self._former: deque[grpc.aio.Channel] = deque(maxlen=_MAX_FORMER)
        self.shown = _shown(self._credentials)
        """Metadata of its calls: the token."""

    def bare(self) -> grpc.aio.Channel:
        """The connection for a call that starts now."""
        if self._follows:
            credentials = current_credentials()
            if credentials is not self._credentials:
                self._take(credentials)
        return self._channel

    def _take(self, credentials: PeerCredentials) -> None:
        if credentials.connection != self._credentials.connection:
            self._former.append(self._channel)
            self._channel = open_channel(self.address, credentials)
        self._credentials, self.shown = credentials, _shown(credentials)

    async def wait_ready(self, *, timeout_s: float) -> None:
        """Wait until the connection stands.

        Raises:
            UnavailableError: After `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self.bare().channel_ready()
        except TimeoutError:
            raise make_error(
                ErrorReason.UNAVAILABLE, f"no connection to {self.address} within {timeout_s:g} s"
            ) from None

    def timeout_s(self, method: str, asked_s: float | None) -> float | None:
        """Timeout of a call that starts now.

        Raises:
            DeadlineError: The caller's own deadline leaves none.
        """
        default_s = self._deadlines_s.get(method, self._default_deadline_s)
        left_s = onward_timeout_s(default_s if asked_s is None else asked_s, now=time.monotonic())
        if left_s is not None and left_s <= 0.0:
            raise make_error(
                ErrorReason.DEADLINE_EXCEEDED,
                f"{method}: the caller's deadline leaves no time",
            )
        return left_s

    def metadata(self, extra: Metadata | None) -> Metadata | None:
        """Metadata of a call: the ids bound to its task, the token, and what the caller adds."""
        ids = current_ids()
        if not ids:
            return (*self.shown, *(extra or ())) if self.shown else extra
        return ((IDS_METADATA_KEY, encode_ids(ids)), *self.shown, *(extra or ()))

    def unary_unary(
        self,
        method: str,
        request_serializer: _Codec = None,
        response_deserializer: _Codec = None,
        _registered_method: bool | None = False,
    ) -> Any:  # noqa: ANN401 - the generated stub gives it its type
        """Callable of a unary method: `await call(request, timeout=...)`."""
        codecs = (request_serializer, response_deserializer)
        return UnaryCallable(self, method, lambda bare: bare.unary_unary(method, *codecs))

    def stream_unary(
        self,
        method: str,
        request_serializer: _Codec = None,
        response_deserializer: _Codec = None,
        _registered_method: bool | None = False,
    ) -> Any:  # noqa: ANN401 - the generated stub gives it its type
        """Callable of a client stream: `await call(async_iterator, timeout=...)`."""
        codecs = (request_serializer, response_deserializer)
        return StreamCallable(self, method, lambda bare: bare.stream_unary(method, *codecs))

    def unary_stream(
        self,
        method: str,
        request_serializer: _Codec = None,
        response_deserializer: _Codec = None,
        _registered_method: bool | None = False,
    ) -> Any:  # noqa: ANN401 - the generated stub gives it its type
        """Callable of a server stream: `async for response in call(request)`."""
        codecs = (request_serializer, response_deserializer)
        return StreamCallable(self, method, lambda bare: bare.unary_stream(method, *codecs))

    def stream_stream(
        self,
        method: str,
        request_serializer: _Codec = None,
        response_deserializer: _Codec = None,
        _registered_method: bool | None = False,
    ) -> Any:  # noqa: ANN401 - the generated stub gives it its type
        """Callable of a bidirectional stream."""
        codecs = (request_serializer, response_deserializer)
        return StreamCallable(self, method, lambda bare: bare.stream_stream(method, *codecs))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Cancel what runs (after `grace` seconds) and close the connections."""
        for channel in (*self._former, self._channel):
            await channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Connectivity now."""
        return self.bare().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the connectivity differs."""
        await self.bare().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until the connection stands; prefer `wait_ready`, which has a deadline."""
        await self.bare().channel_ready()


class _Callable:
    """A method, over the connection of the moment."""

    __slots__ = ("_bare", "_channel", "_inner", "_make", "_method")

    def __init__(
        self,
        channel: Channel,
        method: str,
        make: Callable[[grpc.aio.Channel], Any],
    ) -> None:
        self._channel = channel
        self._method = method
        self._make = make
        self._bare = channel.bare()
        self._inner = make(self._bare)

    def _start(self, request: Any, timeout: float | None, metadata: Metadata | None) -> Any:  # noqa: ANN401
        channel = self._channel
        bare = channel.bare()
        if bare is not self._bare:
            self._bare, self._inner = bare, self._make(bare)
        try:
            return self._inner(
                request,
                timeout=channel.timeout_s(self._method, timeout),
                metadata=channel.metadata(metadata),
            )
        except grpc.aio.UsageError:  # the only use that is wrong here
            raise make_error(
                ErrorReason.CANCELLED, f"{self._method}: the connection was closed on this side"
            ) from None


class UnaryCallable(_Callable):
    """A unary method: `await callable(request)`."""

    __slots__ = ()

    async def __call__(
        self,
        request: Any,  # noqa: ANN401
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> Any:  # noqa: ANN401
        """Call; raise `FlexMarlError`."""
        try:
            return await self._start(request, timeout, metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, method=self._method) from None


class StreamCallable(_Callable):
    """A method with a stream on either side, or on both."""

    __slots__ = ()

    def __call__(
        self,
        request: Any = None,  # noqa: ANN401 - a message or an async iterator of them
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> StreamCall:
        """Start the call."""
        return StreamCall(self._start(request, timeout, metadata), self._method)


class StreamCall:
    """A running stream; the methods are those of grpc.aio, the errors are typed."""

    __slots__ = ("_call", "_method")

    def __init__(self, call: Any, method: str) -> None:  # noqa: ANN401
        self._call = call
        self._method = method

    def __await__(self) -> Generator[Any, None, Any]:
        """The single response of a client stream."""
        return self._response().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        """The responses; ends with the stream, raises `FlexMarlError`."""
        try:
            async for response in self._call:
                yield response
        except grpc.RpcError as error:
            raise from_rpc_error(error, method=self._method) from None

    async def read(self) -> Any:  # noqa: ANN401
        """The next response, or `grpc.aio.EOF`."""
        return await self._typed(self._call.read())

    async def write(self, request: Any) -> None:  # noqa: ANN401
        """Send a request; waits while the transport is full."""
        await self._typed(self._call.write(request))

    async def done_writing(self) -> None:
        """Say that no more requests follow."""
        await self._typed(self._call.done_writing())

    def cancel(self) -> bool:
        """Give the call up; False when it has ended."""
        return bool(self._call.cancel())

    def done(self) -> bool:
        """Whether the call has ended."""
        return bool(self._call.done())

    async def _response(self) -> Any:  # noqa: ANN401
        return await self._typed(self._call)

    async def _typed(self, awaitable: Any) -> Any:  # noqa: ANN401
        try:
            return await awaitable
        except grpc.RpcError as error:
            raise from_rpc_error(error, method=self._method) from None
        except asyncio.InvalidStateError:
            # grpc.aio says this when the call ended under the writer; its status is the cause.
            ended = grpc.aio.AioRpcError(
                await self._call.code(),
                await self._call.initial_metadata(),
                await self._call.trailing_metadata(),
                await self._call.details(),
                None,
            )
            raise from_rpc_error(ended, method=self._method) from None

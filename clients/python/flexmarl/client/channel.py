"""The channel that every stub is built on: deadlines, typed errors, ids.

`Channel` is a `grpc.aio.Channel`, so generated stubs take it as it is::

    channel = connect("127.0.0.1:7001")
    run = await MegStoreServiceStub(channel).GetRun(request, timeout=2.0)

Each call gets `min(timeout or the method's default, what the caller's own deadline leaves)`.
Nothing is repeated here: that takes patience, which clients have (`flexmarl.client.base`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from typing import Any, Self

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
        credentials: Certificates and token; the process's own by default.

    Raises:
        InvalidError: A token would cross a network in clear.
    """
    shown = current_credentials() if credentials is None else credentials
    return Channel(
        open_channel(address, shown),
        address=address,
        deadlines_s=deadlines_s,
        default_deadline_s=default_deadline_s,
        token=shown.token,
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


def _is_local(address: str) -> bool:
    return address.startswith("unix:") or is_loopback(address.rpartition(":")[0])


class Channel(grpc.aio.Channel):
    """A gRPC channel with this project's call rules; made by `connect`."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        address: str,
        deadlines_s: Mapping[str, float | None],
        default_deadline_s: float,
        token: str = "",
    ) -> None:
        self.address = address
        self._shown: Metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._channel = channel
        self._deadlines_s = deadlines_s
        self._default_deadline_s = default_deadline_s

    async def wait_ready(self, *, timeout_s: float) -> None:
        """Wait until the connection stands.

        Raises:
            UnavailableError: After `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._channel.channel_ready()
        except TimeoutError:
            raise make_error(
                ErrorReason.UNAVAILABLE, f"no connection to {self.address} within {timeout_s:g} s"
            ) from None

    def rule(self, method: str) -> CallRule:
        """How calls of a method are made."""
        deadline_s = self._deadlines_s.get(method, self._default_deadline_s)
        return CallRule(method, deadline_s, self._shown)

    def unary_unary(
        self,
        method: str,
        request_serializer: _Codec = None,
        response_deserializer: _Codec = None,
        _registered_method: bool | None = False,
    ) -> Any:  # noqa: ANN401 - the generated stub gives it its type
        """Callable of a unary method: `await call(request, timeout=...)`."""
        inner = self._channel.unary_unary(method, request_serializer, response_deserializer)
        return UnaryCallable(inner, self.rule(method))

    def stream_unary(
        self,
        method: str,
        request_serializer: _Codec = None,
        response_deserializer: _Codec = None,
        _registered_method: bool | None = False,
    ) -> Any:  # noqa: ANN401 - the generated stub gives it its type
        """Callable of a client stream: `await call(async_iterator, timeout=...)`."""
        inner = self._channel.stream_unary(method, request_serializer, response_deserializer)
        return StreamCallable(inner, self.rule(method))

    def unary_stream(
        self,
        method: str,
        request_serializer: _Codec = None,
        response_deserializer: _Codec = None,
        _registered_method: bool | None = False,
    ) -> Any:  # noqa: ANN401 - the generated stub gives it its type
        """Callable of a server stream: `async for response in call(request)`."""
        inner = self._channel.unary_stream(method, request_serializer, response_deserializer)
        return StreamCallable(inner, self.rule(method))

    def stream_stream(
        self,
        method: str,
        request_serializer: _Codec = None,
        response_deserializer: _Codec = None,
        _registered_method: bool | None = False,
    ) -> Any:  # noqa: ANN401 - the generated stub gives it its type
        """Callable of a bidirectional stream."""
        inner = self._channel.stream_stream(method, request_serializer, response_deserializer)
        return StreamCallable(inner, self.rule(method))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Cancel what runs (after `grace` seconds) and close the connection."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Connectivity now."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the connectivity differs."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until the connection stands; prefer `wait_ready`, which has a deadline."""
        await self._channel.channel_ready()


class CallRule:
    """Deadline and metadata of one method's calls."""

    __slots__ = ("_deadline_s", "_shown", "method")

    def __init__(self, method: str, deadline_s: float | None, shown: Metadata = ()) -> None:
        self.method = method
        self._deadline_s = deadline_s
        self._shown = shown

    def timeout_s(self, asked_s: float | None) -> float | None:
        """Timeout of a call that starts now."""
        default_s = self._deadline_s if asked_s is None else asked_s
        left_s = onward_timeout_s(default_s, now=time.monotonic())
        if left_s is not None and left_s <= 0.0:
            raise make_error(
                ErrorReason.DEADLINE_EXCEEDED,
                f"{self.method}: the caller's deadline leaves no time",
            )
        return left_s

    def metadata(self, extra: Metadata | None) -> Metadata | None:
        """Metadata of a call: the ids bound to its task, the token, and what the caller adds."""
        ids = current_ids()
        if not ids:
            return (*self._shown, *(extra or ())) if self._shown else extra
        return ((IDS_METADATA_KEY, encode_ids(ids)), *self._shown, *(extra or ()))


class UnaryCallable:
    """A unary method: `await callable(request)`."""

    __slots__ = ("_inner", "_rule")

    def __init__(self, inner: Any, rule: CallRule) -> None:  # noqa: ANN401
        self._inner = inner
        self._rule = rule

    async def __call__(
        self,
        request: Any,  # noqa: ANN401
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> Any:  # noqa: ANN401
        """Call; raise `FlexMarlError`."""
        rule = self._rule
        try:
            return await self._inner(
                request, timeout=rule.timeout_s(timeout), metadata=rule.metadata(metadata)
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error, method=rule.method) from None


class StreamCallable:
    """A method with a stream on either side, or on both."""

    __slots__ = ("_inner", "_rule")

    def __init__(self, inner: Any, rule: CallRule) -> None:  # noqa: ANN401
        self._inner = inner
        self._rule = rule

    def __call__(
        self,
        request: Any = None,  # noqa: ANN401 - a message or an async iterator of them
        *,
        timeout: float | None = None,
        metadata: Metadata | None = None,
    ) -> StreamCall:
        """Start the call."""
        rule = self._rule
        call = self._inner(
            request, timeout=rule.timeout_s(timeout), metadata=rule.metadata(metadata)
        )
        return StreamCall(call, rule.method)


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

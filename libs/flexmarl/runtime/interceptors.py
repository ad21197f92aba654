"""What happens around every RPC handler, in this order.

1. ids and log context from the call's metadata, 2. metrics, 3. error translation, 4. who calls and
whether they may, 5. deadline check.

This is the hot path, so the five are one interceptor: gRPC builds no chain of coroutines per call,
and the wrapped handler of a method is made once. Handlers must be `async def`, plain or generator.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import aclosing
from typing import Any, NoReturn, TypeAlias, cast

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from flexmarl.core.call_context import IDS_METADATA_KEY, decode_ids, reset_ids, set_deadline
from flexmarl.core.errors import ERROR_DOMAIN, DomainError, ErrorReason
from flexmarl.runtime.gate import Gate
from flexmarl.runtime.logging import get_logger
from flexmarl.runtime.metrics import MethodStats, RpcStats

STATUS_DETAILS_KEY = "grpc-status-details-bin"

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in the type stubs only
Behavior: TypeAlias = Callable[[Any, "Context"], Any]

_log = get_logger(__name__)

_MAKE_HANDLER: dict[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler of a server.

    Args:
        stats: Receives counts and latencies.
        without_deadline: Full method names (`/package.Service/Method`), or prefixes that end in
            `/`, which may be called without a deadline.
        gate: Asks callers for a token; None: everybody may call.
    """

    def __init__(
        self,
        *,
        stats: RpcStats,
        without_deadline: Collection[str] = (),
        gate: Gate | None = None,
    ) -> None:
        self._stats = stats
        self._gate = gate
        self._exempt = frozenset(without_deadline)
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the wrapped handler of the method; None of an unknown one passes through."""
        method: str = handler_call_details.method
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handler = await continuation(handler_call_details)
            if handler is None:  # gRPC answers UNIMPLEMENTED; nothing is kept for foreign names
                return None
            wrapped = self._wrapped[method] = self._wrap(method, handler)
        return wrapped

    def _wrap(self, method: str, handler: Handler) -> Handler:
        kind = (bool(handler.request_streaming), bool(handler.response_streaming))
        name = f"{'stream' if kind[0] else 'unary'}_{'stream' if kind[1] else 'unary'}"
        behavior: Behavior = getattr(handler, name)
        service = method[: method.rindex("/") + 1]
        guard = _Guard(
            stats=self._stats.method(method),
            needs_deadline=method not in self._exempt and service not in self._exempt,
            gate=self._gate,
            is_streamed_to=kind[0],
        )
        if inspect.isasyncgenfunction(behavior):
            wrapped = guard.around_generator(behavior)
        elif inspect.iscoroutinefunction(behavior):
            wrapped = guard.around_coroutine(behavior)
        else:
            raise TypeError(f"{method}: the handler must be `async def`")
        made: Handler = _MAKE_HANDLER[kind](
            wrapped,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return made


class _Guard:
    """The steps around the handler of one method; every RPC runs in an asyncio task of its own."""

    __slots__ = ("_gate", "_is_streamed_to", "_needs_deadline", "_stats")

    def __init__(
        self,
        *,
        stats: MethodStats,
        needs_deadline: bool,
        gate: Gate | None,
        is_streamed_to: bool,
    ) -> None:
        self._stats = stats
        self._gate = gate
        self._needs_deadline = needs_deadline
        self._is_streamed_to = is_streamed_to

    def around_coroutine(self, behavior: Behavior) -> Behavior:
        """For handlers that return their response, and for streams that write to the context."""

        async def call(request: Any, context: Context) -> Any:  # noqa: ANN401 - any message
            started = self._enter(context)
            code, refusal = "OK", None
            try:
                check_again = self._admit(request, context)
                self._check_deadline(context, started)
                return await behavior(self._checked(request, check_again), context)
            except BaseException as error:
                code = _code_of(error, context)
                refusal = self._refusal(error)
                if refusal is None:
                    raise
                await abort(context, refusal)
            finally:
                self._leave(started, code)
                del request, context, refusal  # see `abort`

        return call

    def around_generator(self, behavior: Behavior) -> Behavior:
        """For streams of responses written as async generators."""

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: ANN401
            started = self._enter(context)
            code, refusal = "OK", None
            try:
                check_again = self._admit(request, context)
                self._check_deadline(context, started)
                # Runs the handler's own `finally` at the end, not when the garbage collector does.
                async with aclosing(behavior(self._checked(request, check_again), context)) as said:
                    async for response in said:
                        if check_again is not None:
                            check_again()
                        yield response
            except GeneratorExit:
                code = "CANCELLED"
                raise
            except BaseException as error:
                code = _code_of(error, context)
                refusal = self._refusal(error)
                if refusal is None:
                    raise
                await abort(context, refusal)
            finally:
                self._leave(started, code)
                del request, context, refusal  # see `abort`

        return stream

    def _admit(self, request: Any, context: Context) -> Callable[[], None] | None:  # noqa: ANN401
        """Have the gate let the call in; what to ask at its later messages, if anything."""
        if self._gate is None:
            return None
        return self._gate.admit(self._stats.method, request, context)

    def _checked(self, request: Any, check_again: Callable[[], None] | None) -> Any:  # noqa: ANN401
        """The request; where it is a stream, each of its messages is let in."""
        if check_again is None or not self._is_streamed_to:
            return request
        return _each_checked(request, check_again)

    def _enter(self, context: Context) -> float:
        for key, value in context.invocation_metadata() or ():
            if key == IDS_METADATA_KEY:
                reset_ids(decode_ids(value if isinstance(value, str) else value.decode()))
                break
        self._stats.in_flight += 1
        return time.monotonic()

    def _leave(self, started: float, code: str) -> None:
        self._stats.in_flight -= 1
        self._stats.finished(code=code, seconds=time.monotonic() - started)

    def _check_deadline(self, context: Context, now: float) -> None:
        left_s = cast("float | None", context.time_remaining())  # the stubs forget None
        if left_s is not None:
            set_deadline(now + left_s)
        elif self._needs_deadline:
            method = self._stats.method
            raise DomainError(
                ErrorReason.DEADLINE_REQUIRED, f"{method} needs a deadline", {"method": method}
            )

    def _refusal(self, error: BaseException) -> DomainError | None:
        """What the caller is told; None of what passes through as it is."""
        if isinstance(error, DomainError):
            return error
        if isinstance(error, TimeoutError):
            message = f"{self._stats.method}: time ran out in the service"
            return DomainError(ErrorReason.DEADLINE_EXCEEDED, message)
        if isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
            _log.error("rpc_failed", method=self._stats.method, exc_info=error)
            message = f"{self._stats.method} failed inside the service; its log has the cause"
            return DomainError(ErrorReason.INTERNAL, message)
        return None


async def _each_checked(
    requests: AsyncIterator[Any], check: Callable[[], None]
) -> AsyncIterator[Any]:
    async for request in requests:
        check()
        yield request


async def abort(context: Context, error: DomainError) -> NoReturn:
    """End the call with the error as `google.rpc.Status` with an `ErrorInfo`.

    gRPC's state of the call keeps the exception that ends it. An exception keeps the error that it
    came of, and the locals of every function on its way; any of those that holds the context holds
    that state again, and with it the request, until some full collection.
    """
    code = grpc.StatusCode[error.reason.status]
    details = ((STATUS_DETAILS_KEY, status_of(error).SerializeToString()),)
    try:
        await context.abort(code, error.message, details)
    except grpc.aio.AbortError as ended:
        ended.__context__ = None
        raise
    finally:
        del context, error


def status_of(error: DomainError) -> Any:  # noqa: ANN401 - google.rpc has no stubs
    """The `google.rpc.Status` of an error; also what item-wise answers of batch calls carry."""
    info = error_details_pb2.ErrorInfo(
        reason=error.reason.value, domain=ERROR_DOMAIN, metadata=dict(error.metadata)
    )
    detail = any_pb2.Any()
    detail.Pack(info)
    code: int = grpc.StatusCode[error.reason.status].value[0]
    return status_pb2.Status(code=code, message=error.message, details=[detail])


def _code_of(error: BaseException, context: Context) -> str:
    if isinstance(error, DomainError):
        return error.reason.status
    if isinstance(error, asyncio.CancelledError):
        return "DEADLINE_EXCEEDED" if context.time_remaining() == 0 else "CANCELLED"
    if isinstance(error, TimeoutError):
        return "DEADLINE_EXCEEDED"
    if isinstance(error, grpc.aio.AbortError):
        code = context.code()
        return code.name if isinstance(code, grpc.StatusCode) else str(code)
    return "INTERNAL"

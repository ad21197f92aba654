"""A small real gRPC service without contracts: bytes in, bytes out; every kind of call."""

import asyncio
from contextlib import asynccontextmanager

import grpc

from flexmarl.core.call_context import current_ids
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.config import ServerConfig
from flexmarl.runtime.server import GrpcServer

NAME = "test.Echo"


def path(method):
    return f"/{NAME}/{method}"


LONG_LIVED = (path("Chat"), path("Forever"))


class Echo:
    """`unavailable` calls of Unary fail before one succeeds."""

    def __init__(self):
        self.unavailable = 0
        self.seen = []
        self.cleaned = asyncio.Event()
        self.entered = asyncio.Event()

    async def unary(self, request, context):
        self.seen.append(request)
        if self.unavailable > 0:
            self.unavailable -= 1
            raise DomainError(ErrorReason.NOT_READY, "warming up")
        return request

    async def fail(self, request, context):
        self.seen.append(request)
        raise DomainError(ErrorReason(request.decode()), "as asked", {"key": "value"})

    async def crash(self, request, context):
        raise ValueError("internal secret")

    async def time_out(self, request, context):
        raise TimeoutError

    async def abort(self, request, context):
        await context.abort(grpc.StatusCode.DATA_LOSS, "by hand")

    async def unknown_reason(self, request, context):
        raise DomainError(_later_reason(), "from the future")

    async def time_left(self, request, context):
        return str(context.time_remaining()).encode()

    async def ids(self, request, context):
        return repr(dict(current_ids())).encode()

    async def sleep(self, request, context):
        self.entered.set()
        try:
            await asyncio.sleep(3600)
        finally:
            self.cleaned.set()

    async def count(self, request, context):
        """Yields 0..n-1, then fails if n is 3."""
        for number in range(int(request)):
            yield str(number).encode()
        if int(request) == 3:
            raise DomainError(ErrorReason.CURSOR_OUT_OF_RANGE, "there is no 3")

    async def forever(self, request, context):
        try:
            self.entered.set()
            while True:
                yield b"tick"
                await asyncio.sleep(0.001)
        finally:
            self.cleaned.set()

    async def write_to_context(self, request, context):
        await context.write(b"one")
        await context.write(b"two")

    async def collect(self, requests, context):
        return b"".join([request async for request in requests])

    async def chat(self, requests, context):
        async for request in requests:
            if request == b"fail":
                raise DomainError(ErrorReason.TERM_STALE, "older term")
            yield request

    def add_to_server(self, server):
        unary_unary = grpc.unary_unary_rpc_method_handler
        unary_stream = grpc.unary_stream_rpc_method_handler
        handlers = {
            "Unary": unary_unary(self.unary),
            "Fail": unary_unary(self.fail),
            "Crash": unary_unary(self.crash),
            "TimeOut": unary_unary(self.time_out),
            "Abort": unary_unary(self.abort),
            "UnknownReason": unary_unary(self.unknown_reason),
            "TimeLeft": unary_unary(self.time_left),
            "Ids": unary_unary(self.ids),
            "Sleep": unary_unary(self.sleep),
            "Count": unary_stream(self.count),
            "Forever": unary_stream(self.forever),
            "WriteToContext": unary_stream(self.write_to_context),
            "Collect": grpc.stream_unary_rpc_method_handler(self.collect),
            "Chat": grpc.stream_stream_rpc_method_handler(self.chat),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))


def _later_reason():
    """A reason that this release's catalogue does not have."""
    reason = str.__new__(ErrorReason, "OF_A_LATER_RELEASE")
    reason._value_ = "OF_A_LATER_RELEASE"
    reason.family = ErrorReason.TERM_STALE.family
    return reason


@asynccontextmanager
async def serving(echo, *, config=None, extra=()):
    """A started, ready server."""
    server = GrpcServer(
        config or ServerConfig(grace_s=0.1),
        name="echo",
        add_to_server=[echo.add_to_server, *extra],
        services=[NAME],
        long_lived=LONG_LIVED,
    )
    await server.start()
    server.set_ready(True)
    try:
        yield server
    finally:
        await server.stop()

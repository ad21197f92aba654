"""Deadlines and typed errors of the client's channel, against real servers."""

import asyncio
import time

import grpc
import pytest
from runtime.echo_service import Echo, path, serving

from flexmarl.client import errors
from flexmarl.client.channel import connect
from flexmarl.client.request import new_request_id
from flexmarl.core import keepalive
from flexmarl.core.call_context import bind_ids, reset_ids, set_deadline
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.keepalive import MAX_MESSAGE_BYTES


@pytest.fixture
async def echo():
    return Echo()


@pytest.fixture
async def channel(echo):
    async with (
        serving(echo) as server,
        connect(
            server.address,
            deadlines_s={path("Chat"): None, path("Forever"): None, path("Sleep"): 0.2},
        ) as channel,
    ):
        yield channel


@pytest.fixture(autouse=True)
def _own_context():
    set_deadline(None)
    reset_ids()
    yield
    set_deadline(None)
    reset_ids()


async def test_methods_have_default_deadlines_that_callers_and_outer_calls_shorten(channel):
    time_left = channel.unary_unary(path("TimeLeft"))
    slack_s = 0.2  # the wire rounds deadlines
    assert 3.0 + slack_s < float(await time_left(b"")) <= 10.0 + slack_s
    assert float(await time_left(b"", timeout=3.0)) <= 3.0 + slack_s
    set_deadline(time.monotonic() + 6.0)
    assert float(await time_left(b"")) <= 6.0 + slack_s
    assert float(await time_left(b"", timeout=3.0)) <= 3.0 + slack_s


async def test_a_call_without_time_left_is_not_made(channel, echo):
    set_deadline(time.monotonic() - 1.0)
    with pytest.raises(errors.DeadlineError):
        await channel.unary_unary(path("Unary"))(b"")
    with pytest.raises(errors.DeadlineError):
        channel.unary_stream(path("Count"))(b"1")
    assert echo.seen == []


async def test_a_deadline_that_passes_is_typed_and_ends_the_handler(channel, echo):
    while not echo.entered.is_set():  # a call that never got there has no handler to end
        with pytest.raises(errors.DeadlineError):
            await channel.unary_unary(path("Sleep"))(b"")
    async with asyncio.timeout(20):
        await echo.cleaned.wait()


async def test_deadlines_pass_through_a_service_in_between():
    """Client -> middle -> echo: the inner call gets what the outer one leaves, less a margin."""
    async with serving(Echo()) as inner, connect(inner.address) as onward:
        call_on = onward.unary_unary(path("TimeLeft"))

        async def relay(request, context):
            return await call_on(request)

        def add(server):
            handlers = {"Relay": grpc.unary_unary_rpc_method_handler(relay)}
            handler = grpc.method_handlers_generic_handler("test.Middle", handlers)
            server.add_generic_rpc_handlers((handler,))

        async with (
            serving(Echo(), extra=[add]) as middle,
            connect(middle.address) as channel,
        ):
            left_s = float(await channel.unary_unary("/test.Middle/Relay")(b"", timeout=8.0))
            assert left_s <= 8.0  # without passing on it would be the default of 10 s


async def test_errors_of_an_inner_service_reach_the_outer_caller_unchanged():
    async with serving(Echo()) as inner, connect(inner.address) as onward:

        async def relay(request, context):
            return await onward.unary_unary(path("Fail"))(request)

        def add(server):
            handlers = {"Relay": grpc.unary_unary_rpc_method_handler(relay)}
            handler = grpc.method_handlers_generic_handler("test.Middle", handlers)
            server.add_generic_rpc_handlers((handler,))

        async with serving(Echo(), extra=[add]) as middle, connect(middle.address) as channel:
            with pytest.raises(errors.RefusedError) as caught:
                await channel.unary_unary("/test.Middle/Relay")(b"SUBGRAPH_CLOSED")
            assert caught.value.reason is ErrorReason.SUBGRAPH_CLOSED
            assert caught.value.metadata == {"key": "value"}


async def test_nothing_is_repeated_here(channel, echo):
    for reason in ErrorReason:
        echo.seen.clear()
        with pytest.raises(errors.FlexMarlError):
            await channel.unary_unary(path("Fail"))(reason.value.encode())
        assert len(echo.seen) == 1


async def test_nobody_there_is_unavailable_by_name():
    async with connect("127.0.0.1:1") as channel:
        with pytest.raises(errors.UnavailableError, match=path("Unary")):
            await channel.unary_unary(path("Unary"))(b"")
        with pytest.raises(errors.UnavailableError, match=r"127\.0\.0\.1:1"):
            await channel.wait_ready(timeout_s=0.05)


async def test_a_hosts_proxy_for_the_web_is_not_used(echo, monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with serving(echo) as server, connect(server.address) as channel:
        assert await channel.unary_unary(path("Unary"))(b"x") == b"x"


async def test_a_call_over_a_channel_that_was_closed_here_is_cancelled(channel):
    unary, count = channel.unary_unary(path("Unary")), channel.unary_stream(path("Count"))
    await channel.close()
    with pytest.raises(DomainError, match="closed on this side") as caught:
        await unary(b"")
    assert caught.value.reason is ErrorReason.CANCELLED
    with pytest.raises(DomainError, match="closed on this side"):
        count(b"1")


async def test_ids_travel_with_the_call(channel):
    ids = channel.unary_unary(path("Ids"))
    assert await ids(b"") == b"{}"
    bind_ids(run="r1", vertex="v1")
    assert await ids(b"") == b"{'run': 'r1', 'vertex': 'v1'}"


async def test_streams_fail_typed(channel):
    got = []
    with pytest.raises(errors.OutOfRangeError):
        async for item in channel.unary_stream(path("Count"))(b"3"):
            got.append(item)
    assert got == [b"0", b"1", b"2"]
    assert await channel.stream_unary(path("Collect"))(iter([b"a", b"b"])) == b"ab"


async def test_a_chat_reads_writes_ends_and_fails_typed(channel):
    chat = channel.stream_stream(path("Chat"))()
    for word in (b"a", b"b"):
        await chat.write(word)
        assert await chat.read() == word
    await chat.done_writing()
    assert await chat.read() is grpc.aio.EOF
    assert chat.done()

    chat = channel.stream_stream(path("Chat"))()
    await chat.write(b"fail")
    with pytest.raises(errors.ConflictError):
        async for _ in chat:
            pass
    with pytest.raises(errors.ConflictError):  # a writer learns the cause, too
        await chat.write(b"more")


async def test_large_messages_pass_up_to_the_limit(channel):
    unary = channel.unary_unary(path("Unary"))
    big = bytes(16 << 20)
    assert await unary(big) == big
    with pytest.raises(errors.ExhaustedError) as caught:
        await unary(bytes(MAX_MESSAGE_BYTES + 1))
    assert caught.value.reason is ErrorReason.MESSAGE_TOO_LARGE
    assert str(MAX_MESSAGE_BYTES) in caught.value.message


@pytest.mark.parametrize("tolerant", [True, False])
async def test_a_silent_call_outlasts_many_pings(echo, monkeypatch, tolerant):
    """G3: the intervals of both ends as they are, twenty times as fast (no faster: gRPC).

    The intolerant server proves that pings are sent and that a test of this kind can fail.
    """
    for name in ("CLIENT_PING_INTERVAL_MS", "SERVER_MIN_PING_INTERVAL_MS"):
        monkeypatch.setattr(keepalive, name, getattr(keepalive, name) // 20)
    if not tolerant:
        monkeypatch.setattr(keepalive, "SERVER_MIN_PING_INTERVAL_MS", 300_000)
    async with serving(echo) as server, connect(server.address) as channel:
        silent = channel.unary_unary(path("Sleep"))(b"", timeout=6 if tolerant else 30)
        with pytest.raises(errors.DeadlineError if tolerant else errors.UnavailableError):
            await silent


def test_request_ids_differ():
    assert len({new_request_id() for _ in range(1000)}) == 1000


async def test_a_host_that_answers_slowly_is_reached():
    """A busy host takes longer to set a connection up than the first back-off lasts."""
    slow_s = 5 * keepalive.RECONNECT_INITIAL_BACKOFF_MS / 1000

    async with serving(Echo()) as server, asyncio.TaskGroup() as tasks:
        host, port = server.address.rsplit(":", 1)

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1 << 16):
                writer.write(data)
            writer.close()

        async def delayed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(slow_s)
            onward_reader, onward_writer = await asyncio.open_connection(host, int(port))
            tasks.create_task(pass_on(onward_reader, writer))
            await pass_on(reader, onward_writer)

        front = await asyncio.start_server(delayed, "127.0.0.1", 0)
        address = "{}:{}".format(*front.sockets[0].getsockname())
        async with connect(address) as channel:
            assert await channel.unary_unary(path("Unary"))(b"there", timeout=5.0)
        front.close()

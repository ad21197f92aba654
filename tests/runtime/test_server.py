"""The server's rules around every call, its health, and its orderly stop."""

import asyncio
import json
import urllib.request

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from runtime.echo_service import LONG_LIVED, NAME, Echo, path, serving

from flexmarl.client.channel import connect
from flexmarl.client.errors import UnavailableError
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.config import ServerConfig
from flexmarl.runtime.server import GrpcServer, ServiceFailedError

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def info_of(error):
    """The ErrorInfo of a raw gRPC error."""
    trailing = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert status.code == error.code().value[0]
    return info


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


@pytest.fixture
async def echo():
    return Echo()


@pytest.fixture
async def server(echo):
    async with serving(echo) as server:
        yield server


@pytest.fixture
async def channel(server):
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield channel


async def test_domain_errors_cross_the_wire_with_reason_and_metadata(channel):
    error = await refused(channel.unary_unary(path("Fail"))(b"TERM_STALE", timeout=5))
    info = info_of(error)
    assert (error.code(), error.details()) == (grpc.StatusCode.ABORTED, "as asked")
    assert (info.reason, info.domain) == ("TERM_STALE", "flexmarl")
    assert info.metadata == {"key": "value"}


async def test_an_unexpected_error_says_nothing_internal(channel, caplog):
    error = await refused(channel.unary_unary(path("Crash"))(b"", timeout=5))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert info_of(error).reason == "INTERNAL"
    told = error.details() + repr(error.trailing_metadata())
    assert "secret" not in told
    assert "ValueError" not in told


async def test_a_timeout_inside_is_a_deadline_and_an_abort_stays_what_it_is(channel):
    error = await refused(channel.unary_unary(path("TimeOut"))(b"", timeout=5))
    assert info_of(error).reason == "DEADLINE_EXCEEDED"
    error = await refused(channel.unary_unary(path("Abort"))(b"", timeout=5))
    assert (error.code(), error.details()) == (grpc.StatusCode.DATA_LOSS, "by hand")


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary"])
async def test_calls_without_a_deadline_are_refused(channel, kind):
    method = {"unary_unary": "Unary", "unary_stream": "Count", "stream_unary": "Collect"}[kind]
    request = iter([b"1"]) if kind == "stream_unary" else b"1"
    call = getattr(channel, kind)(path(method))(request)
    error = await refused(call.read() if kind == "unary_stream" else call)
    assert info_of(error).reason == "DEADLINE_REQUIRED"


async def test_long_lived_streams_need_no_deadline(channel):
    call = channel.stream_stream(path("Chat"))()
    await call.write(b"hello")
    assert await call.read() == b"hello"
    call.cancel()


async def test_every_kind_of_stream_passes_and_fails_typed(channel):
    count = channel.unary_stream(path("Count"))
    assert [item async for item in count(b"2", timeout=5)] == [b"0", b"1"]
    written = channel.unary_stream(path("WriteToContext"))(b"", timeout=5)
    assert [item async for item in written] == [b"one", b"two"]
    assert await channel.stream_unary(path("Collect"))(iter([b"a", b"b"]), timeout=5) == b"ab"

    call, got = count(b"3", timeout=5), []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for item in call:
            got.append(item)
    assert got == [b"0", b"1", b"2"]
    assert info_of(caught.value).reason == "CURSOR_OUT_OF_RANGE"

    chat = channel.stream_stream(path("Chat"))()
    await chat.write(b"fail")
    assert info_of(await refused(chat.read())).reason == "TERM_STALE"


@pytest.mark.parametrize("method", ["Sleep", "Forever"])
async def test_a_cancelled_call_cleans_up_in_the_handler(channel, echo, server, method):
    if method == "Sleep":
        call = channel.unary_unary(path(method))(b"", timeout=60)
    else:
        call = channel.unary_stream(path(method))(b"")
        await call.read()
    async with asyncio.timeout(10):
        await echo.entered.wait()
        call.cancel()
        await echo.cleaned.wait()


async def test_an_unknown_method_is_unimplemented(channel):
    error = await refused(channel.unary_unary(path("Nope"))(b"", timeout=5))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_handlers_that_block_the_loop_are_refused():
    def add_blocking(server):
        handlers = {"Block": grpc.unary_unary_rpc_method_handler(lambda request, context: request)}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Blocking", handlers),)
        )

    async with (
        serving(Echo(), extra=[add_blocking]) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        await refused(channel.unary_unary("/test.Blocking/Block")(b"", timeout=5))


async def test_health_is_readiness():
    server = GrpcServer(
        ServerConfig(grace_s=60),
        name="echo",
        add_to_server=[Echo().add_to_server],
        services=[NAME, "test.Other"],
    )
    await server.start()
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def status(service):
            request = health_pb2.HealthCheckRequest(service=service)
            return (await stub.Check(request)).status

        assert [await status(name) for name in ("", NAME)] == [NOT_SERVING, NOT_SERVING]
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=""))
        assert (await watch.read()).status == NOT_SERVING
        server.set_ready(True, service=NAME)
        assert [await status(n) for n in ("", NAME, "test.Other")] == [
            NOT_SERVING,
            SERVING,
            NOT_SERVING,
        ]
        server.set_ready(True)
        assert (await watch.read()).status == SERVING
        error = await refused(stub.Check(health_pb2.HealthCheckRequest(service="test.Unknown")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        await server.stop()
        # The watch ends with the server, so that a stop does not take the whole grace period.
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF


async def test_reflection_lists_the_services_by_config(channel):
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    async for answer in stub.ServerReflectionInfo(iter([request])):
        names = {service.name for service in answer.list_services_response.service}
        assert {NAME, "grpc.health.v1.Health"} <= names
    async with (
        serving(Echo(), config=ServerConfig(reflection=False, grace_s=0.1)) as other,
        grpc.aio.insecure_channel(other.address) as closed,
    ):
        stub = reflection_pb2_grpc.ServerReflectionStub(closed)
        error = await refused(stub.ServerReflectionInfo(iter([request])).read())
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.fixture
async def measured(echo):
    async with serving(echo, config=ServerConfig(grace_s=0.1, metrics_port=0)) as server:
        yield server


async def test_a_port_in_use_is_refused_not_shared(measured):
    server = measured
    for config in (
        ServerConfig(port=server.port),
        ServerConfig(metrics_port=server.metrics_port),
    ):
        other = GrpcServer(
            config, name="other", add_to_server=[], services=[], long_lived=LONG_LIVED
        )
        with pytest.raises(DomainError) as caught:
            await other.start()
        assert caught.value.reason is ErrorReason.PORT_IN_USE


async def test_a_stopping_server_is_unavailable_to_calls_in_flight(echo):
    async with serving(echo) as server, connect(server.address) as channel:
        sleeping = asyncio.create_task(channel.unary_unary(path("Sleep"))(b"", timeout=60))
        chat = channel.stream_stream(path("Chat"))(timeout=60)
        await chat.write(b"hello")
        assert await chat.read() == b"hello"
        await echo.entered.wait()
        await server.stop()
        for call in (sleeping, chat.read()):
            with pytest.raises(UnavailableError):
                await call
        assert echo.cleaned.is_set()


async def test_metrics_count_calls_by_method_and_code(measured):
    async with grpc.aio.insecure_channel(measured.address) as channel:
        for _ in range(3):
            await channel.unary_unary(path("Unary"))(b"x", timeout=5)
        await refused(channel.unary_unary(path("Fail"))(b"DISK_FULL", timeout=5))
        async for _ in channel.unary_stream(path("Count"))(b"2", timeout=5):
            pass
    url = f"http://127.0.0.1:{measured.metrics_port}/metrics"

    def scrape():
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read().decode()

    text = await asyncio.to_thread(scrape)
    finished = "flexmarl_rpc_finished_total"
    assert f'{finished}{{code="OK",method="{path("Unary")}",service="echo"}} 3.0' in text
    refused_line = f'code="RESOURCE_EXHAUSTED",method="{path("Fail")}",service="echo"}} 1.0'
    assert refused_line in text
    assert f'flexmarl_rpc_in_flight{{method="{path("Count")}",service="echo"}} 0.0' in text
    assert f'le="+Inf",method="{path("Unary")}",service="echo"}} 3.0' in text


async def test_the_address_file_appears_with_readiness_and_goes_with_the_server(tmp_path):
    address_file = tmp_path / "run" / "echo.json"
    server = GrpcServer(
        ServerConfig(address_file=address_file, advertise_host="localhost", grace_s=0.1),
        name="echo",
        add_to_server=[Echo().add_to_server],
        services=[NAME],
    )
    await server.start()
    server.set_ready(True)
    assert not address_file.exists()  # a signal would not yet end the service in order
    serving = asyncio.create_task(server.serve_until_signal())
    await asyncio.sleep(0)
    described = json.loads(address_file.read_text())
    assert described["address"] == f"localhost:{server.port}"
    assert described["service"] == "echo"
    server.request_stop("the test is over")
    await serving
    assert not address_file.exists()
    assert list(address_file.parent.iterdir()) == []


async def test_stop_drains_in_order_whatever_hooks_do_and_raises_the_cause():
    order = []
    server = GrpcServer(
        ServerConfig(drain_s=0.2, grace_s=0.1),
        name="echo",
        add_to_server=[Echo().add_to_server],
        services=[NAME],
    )
    await server.start()
    server.set_ready(True)

    async def first():
        order.append("first")
        raise ValueError("a broken hook")

    async def stuck():
        order.append("stuck")
        await asyncio.Event().wait()

    async def last():
        order.append("last")

    for hook in (first, stuck, last):
        server.on_drain(hook)
    server.request_stop("writer failed", RuntimeError("disk gone"))
    server.request_stop("a later reason")
    with pytest.raises(ServiceFailedError, match="writer failed") as caught:
        await server.serve_until_signal()
    assert str(caught.value.__cause__) == "disk gone"
    assert order == ["first", "stuck", "last"]
    await server.stop()

"""The store as a process: kill -9, second opener, bad config, health, drain."""

from __future__ import annotations

import asyncio
import os

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from meg_store.store_harness import (
    RUN,
    a_group,
    a_record,
    a_run,
    a_vertex,
    closure,
    ref,
)

from flexmarl.client.buffers import BufferSpec
from flexmarl.client.errors import FlexMarlError
from flexmarl.client.store import StoreClient


async def test_every_acknowledged_row_is_found_after_kills(process):
    """B2, I12: writers never notice; what was acknowledged is there."""
    acknowledged: list[int] = []
    async with StoreClient.connect(await process.start(), patience_s=30) as store:
        await store.create_run(a_run())
        await store.write_graph(RUN, term=0, groups=[a_group()])
        numbers = iter(range(100_000))
        stop = asyncio.Event()

        async def write() -> None:
            while not stop.is_set():
                call = next(numbers)
                await store.write_graph(RUN, term=0, vertices=[a_vertex(call)])
                acknowledged.append(call)

        writers = [asyncio.create_task(write()) for _ in range(4)]
        for _ in range(2):
            before = len(acknowledged)
            while len(acknowledged) < before + 100:  # noqa: ASYNC110 - counts, not an event
                await asyncio.sleep(0.01)
            process.kill()
            await process.start()
        stop.set()
        await asyncio.gather(*writers)
        wanted = [a_vertex(call) for call in acknowledged]
        found = await store.get_vertices(RUN, [ref(vertex) for vertex in wanted])
        assert list(found) == wanted
        listed = [v.meta.vertex_id async for v in store.list_vertices(RUN)]
        assert len(listed) == len(set(listed)) == len(wanted)


async def test_training_record_survives_a_kill(process):
    async with StoreClient.connect(await process.start(), patience_s=30) as store:
        await store.create_run(a_run())
        term = await store.acquire_term(RUN, "orchestrator", holder="a")
        row = a_vertex()
        await store.write_graph(RUN, term=term, groups=[a_group()], vertices=[row])
        await store.close_groups(RUN, [closure(row)], term=term)
        record = a_record(row, term=term)
        await store.create_micro_batch(RUN, record)
        writer = await store.allocate_segment(RUN, "w0", [BufferSpec("w", "U8", (8,))])
        writer.buffers["w"].data[:] = b"weights!"
        process.kill()
        await process.start()
        await writer.seal()  # the publisher goes on where it was
        assert list(await store.list_micro_batches(RUN, batch=0)) == [record]
        assert await store.acquire_term(RUN, "orchestrator", holder="b") == term + 1
        process.kill()
        await process.start()
        async with store.open_segment(RUN, "w0", holder="x") as reader:
            assert bytes(reader.buffers["w"].data) == b"weights!"


async def test_second_process_is_refused_and_the_first_goes_on(process):
    """B1."""
    async with StoreClient.connect(await process.start()) as store:
        await store.create_run(a_run())
        second = await process.run_refused()
        assert second.returncode == 2
        line = second.stderr.decode().strip()
        assert line.count("\n") == 0
        assert "STORE_LOCKED" in line
        assert str(process.folder) in line
        assert (await store.get_run(RUN)).run_id == RUN
        assert process.stop() == 0
        assert not process.address_file.exists()


async def test_unknown_key_is_refused(process):
    bad = await process.run_refused("store.durabilty=fsync")
    assert bad.returncode == 2
    assert b"durability" in bad.stderr


async def test_health_serves_when_the_store_is_open(process):
    address = await process.start()
    async with grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_failed_write_ends_the_process(process):
    """A failed flush is fatal: rows that may be lost are never served on."""
    limit = ("bash", "-c", 'ulimit -f 2048; exec "$@"', "bash")
    address = await process.start(wrapper=limit)
    async with StoreClient.connect(address, patience_s=1.0) as store:
        await store.create_run(a_run())
        await store.write_graph(RUN, term=0, groups=[a_group()])
        try:
            for call in range(100):
                vertex = a_vertex(call)
                vertex.payload.output = os.urandom(256 << 10)
                await store.write_graph(RUN, term=0, vertices=[vertex])
        except FlexMarlError as error:
            assert error.reason.value == "UNAVAILABLE"
        else:
            raise AssertionError("the file size limit was not reached")
    assert process.process.wait(timeout=30) != 0

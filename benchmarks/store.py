"""Figures of the MEG Store: a store process, a client in this one, the machine's floor beside.

What is compared is measured interleaved, in the same run. Every write is durable (`fsync`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import mmap
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks import store_scale, store_transfer_queue
from benchmarks.report import Report
from benchmarks.store_process import described, scratch, serving, start_module
from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.buffers import BufferSpec
from flexmarl.client.channel import connect
from flexmarl.client.store import StoreClient
from flexmarl.core.keepalive import server_options

RUN = "bench"
GROUP = "b000000a0-g0000"
SAMPLE_MARK = b"s000000a0"
ROWS_PER_CALL = 256
ROW_BYTES = 4096
IN_FLIGHT = 4
ROUNDS = 3
ROUND_S = float(os.environ.get("FLEXMARL_BENCH_ROUND_S", "6"))
PAIRS = 400
STATE_BYTES = 1 << 30
_WRITE = "/flexmarl.api.meg_store.v1.MegStoreService/WriteGraph"


def run(report: Report) -> None:
    """Measure and report."""
    asyncio.run(_run(report))


async def _run(report: Report) -> None:
    with scratch() as (folder, shm), serving(folder, shm) as process:
        address = process.address
        async with _echo() as echo_address, StoreClient.connect(address) as store:
            await _prepare(store)
            await _single(report, store, echo_address, folder)
            with _peer(report) as theirs:
                written = await _bulk(report, address, process.pid, theirs)
                await _reads(report, store, theirs, samples=range(1, 1 + written))
            await _beside_bulk(report, store, address)
            await store_scale.stalls(
                report,
                address,
                lambda: asyncio.create_task(_write_for(address, first=700_000, seconds=ROUND_S)),
            )
            await _publish(report, store)


async def _prepare(store: StoreClient) -> None:
    await store.create_run(graph.Run(run_id=RUN, config_json=b"{}"))
    await store.write_graph(RUN, term=0, groups=[_group()])


async def _single(report: Report, store: StoreClient, echo: str, folder: Path) -> None:
    """One vertex, durable, then read back; against two bare echoes and one fdatasync."""
    report.progress("store: single writes")
    ours: list[float] = []
    floor: list[float] = []
    request = _row(0, 0).SerializeToString()
    handle = os.open(folder / "floor", os.O_WRONLY | os.O_CREAT)
    async with grpc.aio.insecure_channel(echo) as channel:
        call: Any = channel.unary_unary("/bench.Echo/Echo")
        for number in range(PAIRS):
            vertex = _row(900_000 + number, 0)
            started = time.perf_counter()
            await store.write_graph(RUN, term=0, vertices=[vertex])
            await store.get_vertices(RUN, [_ref(vertex)])
            ours.append(time.perf_counter() - started)
            started = time.perf_counter()
            await call(request)
            os.write(handle, request)
            os.fdatasync(handle)
            await call(request)
            floor.append(time.perf_counter() - started)
    os.close(handle)
    half = PAIRS // 10  # the first ones warm connections and caches
    ours, floor = ours[half:], floor[half:]
    p50, floor_p50 = statistics.median(ours), statistics.median(floor)
    p99, floor_p99 = _p99(ours), _p99(floor)
    against = "two bare echoes + one fdatasync, interleaved"
    report.figure("store.write_read_p50_ms", p50 * 1e3, "ms", bound="<= 2.0")
    report.figure(
        "store.write_read_vs_floor",
        p50 / floor_p50,
        "ratio",
        against=against,
        ratio=p50 / floor_p50,
        bound="<= 1.7",
    )
    report.figure(
        "store.write_read_p99_vs_floor",
        p99 / floor_p99,
        "ratio",
        against=against,
        ratio=p99 / floor_p99,
        bound="<= 3",
    )
    report.note(
        f"floor of a write and read: p50 {floor_p50 * 1e3:.2f} ms, p99 {floor_p99 * 1e3:.2f} ms"
    )


@contextmanager
def _peer(report: Report) -> Iterator[store_transfer_queue.Peer | None]:
    """TransferQueue, where it is installed."""
    if not store_transfer_queue.is_installed():
        report.note("store: TransferQueue is not installed (pip install transferqueue)")
        yield None
        return
    report.progress("store: starting TransferQueue")
    with store_transfer_queue.peer(
        rows=ROWS_PER_CALL, row_bytes=ROW_BYTES, in_flight=IN_FLIGHT
    ) as theirs:
        theirs.put(1.0)  # it has warmed up when it counts
        yield theirs


async def _bulk(
    report: Report, address: str, pid: int, theirs: store_transfer_queue.Peer | None
) -> int:
    """Inserts of 256 rows of 4 KB per call, four calls in flight; returns the number of calls."""
    report.progress("store: bulk writes")
    process = psutil.Process(pid)
    best = peer_best = 0.0
    cpu_us = float("inf")
    first = 1
    for _ in range(ROUNDS):
        before = sum(process.cpu_times()[:2])
        started = time.perf_counter()
        calls = await _write_for(address, first=first, seconds=ROUND_S)
        elapsed = time.perf_counter() - started
        spent = sum(process.cpu_times()[:2]) - before
        rows = calls * ROWS_PER_CALL
        first += calls
        best = max(best, rows / elapsed)
        cpu_us = min(cpu_us, spent / rows * 1e6)
        if theirs is not None:
            peer_best = max(peer_best, await asyncio.to_thread(theirs.put, ROUND_S))
    _beside_peer(report, "store.durable_rows_per_s", best, peer_best, bound=">= 30000")
    report.figure("store.write_cpu_us_per_row", cpu_us, "us", bound="<= 25")
    return first - 1


async def _write_for(address: str, *, first: int, seconds: float, limit: int = 1 << 30) -> int:
    """Write calls of consecutive samples for a time; returns their number."""
    template = _template()
    end = time.perf_counter() + seconds
    numbers = iter(range(first, first + limit))
    done = 0

    async with connect(address, default_deadline_s=60) as channel:
        call = channel.unary_unary(_WRITE)

        async def writer() -> None:
            nonlocal done
            for number in numbers:
                if time.perf_counter() >= end:
                    return
                mark = b"s%06da0" % number
                await call(template.replace(SAMPLE_MARK, mark))
                done += 1

        await asyncio.gather(*(writer() for _ in range(IN_FLIGHT)))
    return done


def _beside_peer(report: Report, name: str, ours: float, theirs: float, *, bound: str) -> None:
    report.figure(
        name, ours, "1/s", bound=bound,
        against=f"TransferQueue in turns, in memory, {theirs:,.0f}/s" if theirs else "",
        ratio=ours / theirs if theirs else None,
    )  # fmt: skip


async def _reads(
    report: Report, store: StoreClient, theirs: store_transfer_queue.Peer | None, *, samples: range
) -> None:
    """The same rows by reference, at random, whole."""
    report.progress("store: reads")
    rng = random.Random(7)
    best = peer_best = 0.0
    for _ in range(ROUNDS):
        started = time.perf_counter()
        readers = (
            _read_until(store, rng, samples, started + ROUND_S / 2) for _ in range(IN_FLIGHT)
        )
        read = sum(await asyncio.gather(*readers))
        best = max(best, read / (time.perf_counter() - started))
        if theirs is not None:
            peer_best = max(peer_best, await asyncio.to_thread(theirs.get, ROUND_S / 2))
    _beside_peer(report, "store.read_rows_per_s", best, peer_best, bound=">= 70000")


async def _read_until(store: StoreClient, rng: random.Random, samples: range, end: float) -> int:
    read = 0
    while time.perf_counter() < end:
        refs = [
            _ref_of(rng.choice(samples), rng.randrange(ROWS_PER_CALL)) for _ in range(ROWS_PER_CALL)
        ]
        read += len(await store.get_vertices(RUN, refs))
    return read


async def _beside_bulk(report: Report, store: StoreClient, address: str) -> None:
    """Single writes and a watch while bulk writes run."""
    report.progress("store: single writes beside bulk")
    bulk = asyncio.create_task(_write_for(address, first=500_000, seconds=ROUND_S / 2))
    times: list[float] = []
    number = 950_000
    while not bulk.done():
        vertex = _row(number, 0)
        number += 1
        started = time.perf_counter()
        await store.write_graph(RUN, term=0, vertices=[vertex])
        times.append(time.perf_counter() - started)
    await bulk
    report.figure("store.single_under_bulk_ms", statistics.median(times) * 1e3, "ms", bound="<= 25")


async def _publish(report: Report, store: StoreClient) -> None:
    """Allocate, fill and seal 1 GiB in a reused segment; against a copy into warm memory."""
    report.progress("store: publishing state")
    term = await store.acquire_term(RUN, "policy/p", holder="bench")
    source = memoryview(bytearray(os.urandom(1 << 20)) * (STATE_BYTES >> 20))
    warm = memoryview(mmap.mmap(-1, STATE_BYTES))
    warm[:] = source
    specs = [BufferSpec("state", "U8", (STATE_BYTES,))]
    ours: list[float] = []
    copies: list[float] = []
    checksum_s = 0.0
    for number in range(6):
        started = time.perf_counter()
        writer = await store.allocate_segment(RUN, f"state-{number}", specs)
        writer.buffers["state"].data[:] = source
        ref = await writer.seal(checksum="sha256:not-computed-here")
        elapsed = time.perf_counter() - started
        # Supersedes the one before, whose pages the next but one gets.
        await store.save_state(
            RUN, graph.StateRecord(policy="p", version=0, term=term, weights=ref)
        )
        if writer.reused:
            ours.append(elapsed)
        started = time.perf_counter()
        warm[:] = source
        copies.append(time.perf_counter() - started)
    started = time.perf_counter()
    hashlib.sha256(source).digest()
    checksum_s = time.perf_counter() - started
    gets = [await _get(store, f"state-{number}", warm) for number in (5, 5, 5)]
    report.figure(
        "store.state_get_vs_memcpy",
        min(copies) / min(gets),
        "ratio",
        against="copy of 1 GiB into warm memory",
        ratio=min(copies) / min(gets),
        bound=">= 0.9",
    )
    mine, copy = min(ours[1:] or ours), min(copies)
    report.figure(
        "store.state_publish_vs_memcpy",
        copy / mine,
        "ratio",
        against="copy of 1 GiB into warm memory",
        ratio=copy / mine,
        bound=">= 0.85",
    )
    report.note(
        f"1 GiB: publish {mine:.3f} s, copy {copy:.3f} s, checksum (beside) {checksum_s:.2f} s"
    )


async def _get(store: StoreClient, key: str, target: memoryview) -> float:
    """Open, copy into warm memory, close: seconds."""
    started = time.perf_counter()
    async with store.open_segment(RUN, key, holder="bench") as reader:
        target[:] = reader.buffers["state"].data
    return time.perf_counter() - started


def _group() -> graph.Group:
    return graph.Group(group_id=GROUP, num_samples=1, status=common.GROUP_STATUS_OPEN)


def _row(sample: int, call: int) -> graph.Vertex:
    tokens = ROW_BYTES // 10  # a token id and a log-probability each
    sample_id = f"{GROUP}-s{sample:06d}a0"
    meta = graph.VertexMeta(
        vertex_id=f"{sample_id}/0:{call}",
        sample_id=sample_id,
        group_id=GROUP,
        path=f"0:{call}",
        agent="solver",
        policy="p",
        kind=common.VERTEX_KIND_AGENT,
        status=common.VERTEX_STATUS_DONE,
        attempt=1,
        policy_version=3,
        weights_hash="sha256:" + "0" * 64,
        version_runs=[common.VersionRun(version=3, num_tokens=tokens)],
        num_prompt_tokens=16,
        num_response_tokens=tokens,
        finish_reason="stop",
        instance_id="host0-e1",
        trainable=True,
    )
    payload = graph.VertexPayload(
        prompt_tokens=range(100, 116),
        response_tokens=[call % 30_000 + 200] * tokens,
        logprobs=[-0.5 - call] * tokens,
        temperature=1.0,
    )
    return graph.Vertex(meta=meta, payload=payload)


def _ref(vertex: graph.Vertex) -> common.VertexRef:
    return common.VertexRef(vertex_id=vertex.meta.vertex_id, agent=vertex.meta.agent)


def _ref_of(sample: int, call: int) -> common.VertexRef:
    return common.VertexRef(vertex_id=f"{GROUP}-s{sample:06d}a0/0:{call}", agent="solver")


def _template() -> bytes:
    """A serialised call whose sample, and with it request id, is replaced per call."""
    vertices = [_row(0, call) for call in range(ROWS_PER_CALL)]
    mark = SAMPLE_MARK.decode()
    request = pb.WriteGraphRequest(request_id=f"call-{mark}", run_id=RUN, vertices=vertices)
    return request.SerializeToString()


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


@asynccontextmanager
async def _echo() -> AsyncIterator[str]:
    folder = Path(tempfile.mkdtemp(prefix="flexmarl-bench-"))
    process = start_module("benchmarks.store", str(folder / "a.json"))
    try:
        yield described(process, folder / "a.json")["address"]
    finally:
        process.terminate()
        process.wait(timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


async def _serve_echo(path: Path) -> None:
    """The floor: a bare grpc.aio server that answers what it got."""

    async def echo(request: bytes, _: object) -> bytes:
        return request

    server = grpc.aio.server(options=server_options())
    handler: Any = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("bench.Echo", {"Echo": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"address": f"127.0.0.1:{port}"}))
    temporary.replace(path)
    await server.wait_for_termination()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve_echo(Path(sys.argv[1])))

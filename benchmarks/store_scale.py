"""Figures of a MEG Store that holds a million rows: claims, start, memory, delivery, stalls.

The rows are small: what is measured is their number. `FLEXMARL_BENCH_ROWS` makes it smaller.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import psutil

from benchmarks.report import Report
from benchmarks.store_process import StoreProcess, scratch, serving
from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.channel import connect
from flexmarl.client.store import StoreClient

RUN = "scale"
ROWS = int(os.environ.get("FLEXMARL_BENCH_ROWS", "1000000"))
ROWS_PER_GROUP = 256
IN_FLIGHT = 4
CONSUMED = 0.8
SAMPLED_CLAIMS = 200
ROWS_PER_BIG_CLAIM = 4096
EVENTS = 1500
_SERVICE = "/flexmarl.api.meg_store.v1.MegStoreService/"
_MARK = "b000000a0-g0000"


def run(report: Report) -> None:
    """Measure and report."""
    with scratch() as (folder, shm), serving(folder, shm) as process:
        asyncio.run(_measure(report, process))


async def _measure(report: Report, process: StoreProcess) -> None:
    """Fill a store, then measure."""
    groups = -(-ROWS // ROWS_PER_GROUP)
    async with StoreClient.connect(process.address) as store:
        await store.create_run(graph.Run(run_id=RUN, config_json=b"{}"))
        report.progress(f"store: {groups * ROWS_PER_GROUP:,} rows, released")
        started = time.perf_counter()
        await _fill(process.address, groups)
        filled_s = time.perf_counter() - started
        report.note(
            f"{groups * ROWS_PER_GROUP:,} small rows written and released: {filled_s:.0f} s"
        )
        await _delivery(report, store)
        await _claims(report, store, rows=groups * ROWS_PER_GROUP)
    await _restart(report, process, rows=groups * ROWS_PER_GROUP)


async def _fill(address: str, groups: int) -> None:
    write, close = _templates()
    numbers = iter(range(1000, 1000 + groups))  # of four digits, as the mark
    async with connect(address, default_deadline_s=120) as channel:
        writes = channel.unary_unary(_SERVICE + "WriteGraph")
        closes = channel.unary_unary(_SERVICE + "CloseGroups")

        async def writer() -> None:
            for number in numbers:
                name = f"b000000a0-g{number:04d}"
                group = graph.Group(
                    group_id=name,
                    ordinal=number,
                    num_samples=1,
                    status=common.GROUP_STATUS_OPEN,
                )
                # Messages one after the other are one message.
                admission = pb.WriteGraphRequest(groups=[group]).SerializeToString()
                await writes(write.replace(_MARK.encode(), name.encode()) + admission)
                await closes(close.replace(_MARK.encode(), name.encode()))

        await asyncio.gather(*(writer() for _ in range(IN_FLIGHT)))


async def _claims(report: Report, store: StoreClient, *, rows: int) -> None:
    """List and mark 256 rows at a time, many more at a time in between, until most are consumed."""
    report.progress("store: claims")
    numbers = itertools.count()

    async def claim(max_rows: int) -> float:
        started = time.perf_counter()
        listed = await store.list_claimable(RUN, "p", max_rows=max_rows)
        name = f"b000000a0-m{next(numbers):06d}-p"
        await store.mark_rows(RUN, name, [row.row for row in listed.rows], term=0)
        elapsed = time.perf_counter() - started
        assert len(listed.rows) == max_rows
        return elapsed

    sampled = SAMPLED_CLAIMS * ROWS_PER_GROUP
    early = [await claim(ROWS_PER_GROUP) for _ in range(SAMPLED_CLAIMS)]
    for _ in range((int(rows * CONSUMED) - 2 * sampled) // ROWS_PER_BIG_CLAIM):
        await claim(ROWS_PER_BIG_CLAIM)
    late = [await claim(ROWS_PER_GROUP) for _ in range(SAMPLED_CLAIMS)]
    times = early + late
    first, last = statistics.median(early), statistics.median(late)
    report.figure(
        "store.claim_ms",
        statistics.median(times) * 1e3,
        "ms",
        against=f"list and mark {ROWS_PER_GROUP} of {rows:,} rows",
        bound="<= 5",
    )
    report.figure(
        "store.claim_drift",
        last / first,
        "ratio",
        against=f"first {SAMPLED_CLAIMS} claims; these after {CONSUMED:.0%} were consumed",
        ratio=last / first,
        bound="<= 1.5",
    )


async def _delivery(report: Report, store: StoreClient) -> None:
    """From the call that writes a sample's end to the event of it."""
    report.progress("store: delivery of events")
    group = graph.Group(
        group_id="b000001a0-g0000", batch=1, num_samples=1, status=common.GROUP_STATUS_OPEN
    )
    await store.write_graph(RUN, term=0, groups=[group])
    sent: dict[str, float] = {}
    times: list[float] = []

    async def watch() -> None:
        async for response in store.watch(RUN, kinds=[pb.EVENT_KIND_SAMPLE]):
            now = time.perf_counter()
            times.extend(now - sent[event.sample.sample_id] for event in response.events)
            if len(times) >= EVENTS:
                return

    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0.2)
    for number in range(EVENTS):
        sample = graph.Sample(
            sample_id=f"b000001a0-g0000-s{number:06d}a0",
            group_id=group.group_id,
            batch=1,
            ordinal=number,
            status=common.SAMPLE_STATUS_DONE,
        )
        sent[sample.sample_id] = time.perf_counter()
        await store.write_graph(RUN, term=0, samples=[sample])
    async with asyncio.timeout(60):
        await watcher
    report.figure("store.watch_p99_ms", _p99(times) * 1e3, "ms", bound="<= 15")
    report.note(
        f"delivery of an event, from the call on: p50 {statistics.median(times) * 1e3:.2f} ms"
    )


async def _restart(report: Report, process: StoreProcess, *, rows: int) -> None:
    """Kill, start, and look at the memory once it serves."""
    report.progress("store: start")
    process.kill()
    started = time.perf_counter()
    process.start()
    elapsed = time.perf_counter() - started
    against = f"{rows:,} rows"
    report.figure("store.start_s", elapsed, "s", against=against, bound="<= 3")
    async with StoreClient.connect(process.address) as store:
        listed = await store.list_claimable(RUN, "p", max_rows=ROWS_PER_GROUP)
        assert listed.rows
        chosen = pb.VertexFilter(id_prefix="b000000a0-g1001-")
        assert [v async for v in store.list_vertices(RUN, chosen)]
    resident = psutil.Process(process.pid).memory_info().rss / 2**20
    report.figure("store.resident_mib", resident, "MiB", against=against, bound="<= 512")


async def stalls(report: Report, address: str, load: Callable[[], asyncio.Task[int]]) -> None:
    """The longest that the store's loop served nobody, seen from a process of its own.

    Args:
        report: Where figures go.
        address: Of the store.
        load: Starts what it does meanwhile.
    """
    report.progress("store: stalls under load")
    task = load()
    probe = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.store_scale", address, "5",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await probe.communicate()
    await task
    seen = json.loads(out)
    report.figure(
        "store.stall_ms",
        seen["max_ms"],
        "ms",
        against="slowest of many small reads beside bulk writes and compaction",
        bound="<= 50",
    )
    report.note(
        f"small reads beside bulk: p50 {seen['p50_ms']:.2f}, p99 {seen['p99_ms']:.2f} ms, "
        f"{seen['calls']} calls; the machine's own gaps meanwhile: {seen['gap_ms']:.1f} ms"
    )


async def _probe(address: str, seconds: float) -> dict[str, float]:
    """Small reads one after the other, and the longest gap of this process's own loop beside."""
    times: list[float] = []
    gaps: list[float] = []
    end = time.perf_counter() + seconds

    async def tick() -> None:
        while time.perf_counter() < end:
            started = time.perf_counter()
            await asyncio.sleep(0.001)
            gaps.append(time.perf_counter() - started - 0.001)

    ticking = asyncio.create_task(tick())
    async with StoreClient.connect(address) as store:
        await store.get_stats()
        while time.perf_counter() < end:
            started = time.perf_counter()
            await store.get_stats()
            times.append(time.perf_counter() - started)
    await ticking
    return {
        "max_ms": max(times) * 1e3,
        "p50_ms": statistics.median(times) * 1e3,
        "p99_ms": _p99(times) * 1e3,
        "gap_ms": max(gaps) * 1e3,
        "calls": len(times),
    }


def _templates() -> tuple[bytes, bytes]:
    """A group's rows and its closure, serialised; the group's id is replaced per call."""
    sample_id = f"{_MARK}-s000a0"
    vertices = list(_vertices(sample_id))
    write = pb.WriteGraphRequest(
        request_id=f"w-{_MARK}",
        run_id=RUN,
        vertices=vertices,
    )
    close = pb.CloseGroupsRequest(
        request_id=f"c-{_MARK}",
        run_id=RUN,
        closures=[
            pb.GroupClosure(
                group_id=_MARK,
                status=common.GROUP_STATUS_CLOSED,
                released=[
                    pb.ReleasedRow(
                        row=common.VertexRef(vertex_id=v.meta.vertex_id, agent=v.meta.agent),
                        reward=1.0,
                        advantage=0.5,
                    )
                    for v in vertices
                ],
            )
        ],
    )
    return write.SerializeToString(), close.SerializeToString()


def _vertices(sample_id: str) -> Iterator[graph.Vertex]:
    for call in range(ROWS_PER_GROUP):
        meta = graph.VertexMeta(
            vertex_id=f"{sample_id}/0:{call}",
            sample_id=sample_id,
            group_id=_MARK,
            path=f"0:{call}",
            agent="solver",
            policy="p",
            kind=common.VERTEX_KIND_AGENT,
            status=common.VERTEX_STATUS_DONE,
            attempt=1,
            num_prompt_tokens=4,
            num_response_tokens=4,
            trainable=True,
        )
        payload = graph.VertexPayload(
            prompt_tokens=range(4), response_tokens=range(4), logprobs=[-0.5] * 4, temperature=1.0
        )
        yield graph.Vertex(meta=meta, payload=payload)


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_probe(sys.argv[1], float(sys.argv[2])))))

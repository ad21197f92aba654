"""Rollout's rate: worker, dispatcher, engine host and store as processes; engines without a model.

Everything of a vertex is real but its tokens: rendered, dispatched over the stream, answered by an
engine process that computes nothing, stored durably, then given to the workflow.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.report import Report
from benchmarks.shared_memory import shared_folder
from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.common.v1.common_pb2 import ShardAddress
from flexmarl.api.meg_store.v1.graph_pb2 import Group, Manifest, PolicyManifest, Sample
from flexmarl.api.rollout.v1.rollout_pb2 import SampleSpec
from flexmarl.client.buffers import BufferSpec
from flexmarl.client.rollout import RolloutClient
from flexmarl.client.runs import RunSource, store_run
from flexmarl.client.store import StoreClient
from flexmarl.core.ids import BatchId, GroupId, SampleId
from flexmarl.runtime.run_config import RunConfig

RUN = "bench"
CALLS_PER_SAMPLE = 8
ROUNDS = 3
MODEL = Path(__file__).parents[1] / "examples/quickstart/model"
DEFAULT_POLICY: Mapping[str, Any] = {"model": {"path": str(MODEL)}}
SERVICES = ("meg_store", "dispatcher", "engine-host")

TEAM = f"""
async def team(ctx, query):
    last = await ctx.call("agent", text="0123")
    for _ in range({CALLS_PER_SAMPLE - 1}):
        last = await ctx.call("agent", text="0123", after=last)

def reward(sample):
    return 1.0
"""


def run(report: Report) -> None:
    """Measures the rates at 64 and at 1 sample in flight: best of three rounds each."""
    for name, in_flight, samples, asked in (
        ("rollout.vertices_per_s", 64, 1500, ">= 5,000"),
        ("rollout.vertices_per_s_1", 1, 150, ">= 500"),
    ):
        rounds = asyncio.run(_measure(in_flight=in_flight, samples=samples))
        best = max(rounds, key=lambda measured: measured.rate)
        report.figure(name, best.rate, "1/s", bound=asked)
        shares = ", ".join(f"{k} {v:.0f}" for k, v in best.cpu_us.items())
        report.note(
            f"{name}: rounds {', '.join(f'{each.rate:,.0f}' for each in rounds)}; of the best, CPU "
            f"µs per vertex: {shares}; sum {sum(best.cpu_us.values()):.0f}. "
            f"Median ms: {best.engine_ms:.2f} to the engine and back, {best.onward_ms:.2f} "
            "from there to the next call: its row, the answer, the workflow"
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """One round.

    Attributes:
        rate: Vertices per second, from the first sample's admission to the last one's end.
        cpu_us: CPU time per vertex, by process.
        engine_ms: Median from a call's readiness until its result is at the dispatcher.
        onward_ms: Median from there until the sample's next call is ready.
    """

    rate: float
    cpu_us: dict[str, float]
    engine_ms: float
    onward_ms: float


async def _measure(*, in_flight: int, samples: int) -> list[Measured]:
    with tempfile.TemporaryDirectory(prefix="flexmarl-bench-") as scratch:
        folder = Path(scratch)
        async with cluster(folder, dispatcher=["engine=instant"]) as (store, rollout, pids):
            await open_run(store, rollout, folder, max_samples_per_worker=in_flight)
            await _batch(store, rollout, 0, samples // 5)  # warms up
            return [
                await _round(store, rollout, pids, batch, samples) for batch in range(1, ROUNDS + 1)
            ]


async def _round(
    store: StoreClient, rollout: RolloutClient, pids: dict[str, int], batch: int, samples: int
) -> Measured:
    before = _cpu_s(pids)
    await _batch(store, rollout, batch, samples)
    after = _cpu_s(pids)
    vertices = samples * CALLS_PER_SAMPLE
    # By the samples' own times: the batch's weights and looking whether it has ended are no part.
    rows = await store.list_samples(RUN, batch=batch)
    first = min(sample.started_unix_ns for sample in rows)
    took_s = (max(sample.finished_unix_ns for sample in rows) - first) / 1e9
    cpu_us = {name: (after[name] - before[name]) / vertices * 1e6 for name in after}
    engine_ms, onward_ms = await _hops_ms(store, rows[:100])
    return Measured(vertices / took_s, cpu_us, engine_ms, onward_ms)


async def _hops_ms(store: StoreClient, samples: Sequence[Sample]) -> tuple[float, float]:
    """Medians over the calls of some samples: see `Measured`."""
    there_ns, onward_ns = [], []
    for sample in samples:
        graph = await store.get_sample_graph(RUN, sample.sample_id)
        metas = sorted((v.meta for v in graph.vertices), key=lambda meta: meta.ready_unix_ns)
        there_ns += [meta.finished_unix_ns - meta.ready_unix_ns for meta in metas]
        onward_ns += [b.ready_unix_ns - a.finished_unix_ns for a, b in pairwise(metas)]
    return median(there_ns) / 1e6, median(onward_ns) / 1e6


@contextlib.asynccontextmanager
async def cluster(
    folder: Path, *, dispatcher: Sequence[str] = (), host: Sequence[str] = ()
) -> AsyncIterator[tuple[StoreClient, RolloutClient, dict[str, int]]]:
    """Store, dispatcher and engine host as processes; their further settings, and their pids."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    with shared_folder() as shm:
        try:
            store_at = await _start(
                processes, folder, "meg_store", "flexmarl.meg_store",
                f"store.data_dir={folder / 'data'}", f"store.shm_dir={shm}",
                "store.durability=fsync",
            )  # fmt: skip
            rollout_at = await _start(
                processes, folder, "dispatcher", "flexmarl.rollout",
                f"data_dir={folder / 'dispatcher'}", *dispatcher,
            )  # fmt: skip
            await _start(
                processes, folder, "engine-host", "flexmarl.rollout", "role=engine-host",
                f"data_dir={folder / 'host'}", f"dispatcher={rollout_at}", *host,
            )  # fmt: skip
            store, rollout = StoreClient.connect(store_at), RolloutClient.connect(rollout_at)
            async with store, rollout:
                yield store, rollout, {name: p.pid for name, p in processes.items()}
        finally:
            for process in reversed(processes.values()):
                process.send_signal(signal.SIGTERM)
            for process in processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(15)
                process.kill()


async def _start(
    processes: dict[str, subprocess.Popen[bytes]], folder: Path, name: str, module: str, *sets: str
) -> str:
    address_file = folder / f"{name}.json"
    log = folder / f"{name}.log"
    sets = (*sets, f"server.address_file={address_file}", f"log.file={log}", "log.level=warning")
    arguments = [part for item in sets for part in ("--set", item)]
    with (folder / f"{name}.txt").open("ab") as output:
        processes[name] = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    async with asyncio.timeout(60):
        while not address_file.exists():
            if processes[name].poll() is not None:
                raise RuntimeError((folder / f"{name}.txt").read_text())
            await asyncio.sleep(0.02)
    return str(json.loads(address_file.read_text())["address"])


async def open_run(
    store: StoreClient,
    rollout: RolloutClient,
    folder: Path,
    *,
    policy: Mapping[str, Any] = DEFAULT_POLICY,
    max_samples_per_worker: int = 64,
) -> None:
    """Stores and opens a run of one agent whose policy is `p`."""
    package = folder / "package"
    package.mkdir()
    (package / "team.py").write_text(TEAM)
    dataset = folder / "data.jsonl"
    dataset.write_text("{}\n")
    config = RunConfig.model_validate(
        {
            "name": RUN,
            "versions": 1,
            "dataset": {"path": str(dataset)},
            "batch": {"groups": 1, "samples_per_group": 1},
            "workflow": {
                "package": str(package), "entry": "team:team", "reward": "team:reward",
                "max_samples_per_worker": max_samples_per_worker,
            },
            "policies": {"p": policy},
            "agents": {"agent": {"policy": "p", "prompt": "{text}>", "max_tokens": 4}},
        }
    )  # fmt: skip
    shards = [ShardAddress(name="s0", address=store.address)]
    source = RunSource(
        run_id=RUN, config_json=config.model_dump_json().encode(), portable_config_json=b"{}",
        package=package, exclude=(), dataset=dataset,
        models={"p": Path(policy["model"]["path"])},
    )  # fmt: skip
    await store_run(store, source, shards=shards)
    await store.acquire_term(RUN, "orchestrator", holder="bench")
    await rollout.open_run(RUN, term=1, shards=shards)


async def _batch(store: StoreClient, rollout: RolloutClient, batch: int, samples: int) -> None:
    """Runs one batch of samples, each a group of its own."""
    weights = await _publish(store, batch)
    await rollout.activate_version(RUN, Manifest(version=batch, policies={"p": weights}), term=1)
    async with asyncio.timeout(60):
        while not (await rollout.get_status(RUN)).ready:
            await asyncio.sleep(0.05)
    groups = [GroupId(BatchId(batch), ordinal) for ordinal in range(samples)]
    rows = [
        Group(
            group_id=str(group), batch=batch, ordinal=group.ordinal, query_json=b"{}",
            num_samples=1, status=common_pb2.GROUP_STATUS_OPEN,
        )
        for group in groups
    ]  # fmt: skip
    await store.write_graph(RUN, term=1, groups=rows)
    specs = [
        SampleSpec(
            sample_id=str(SampleId(group, 0)), group_id=str(group), batch=batch,
            group_ordinal=group.ordinal, query_json=b"{}", version=batch, seed=group.ordinal,
        )
        for group in groups
    ]  # fmt: skip
    await rollout.start_samples(RUN, specs, term=1)
    async with asyncio.timeout(120):
        while (status := await rollout.get_status(RUN)).num_open_samples:
            if status.HasField("fatal"):
                raise RuntimeError(status.fatal.message)
            await asyncio.sleep(0.1)


async def _publish(store: StoreClient, version: int) -> PolicyManifest:
    specs = [BufferSpec(name="w", dtype="F32", shape=(16,))]
    writer = await store.allocate_segment(RUN, f"{RUN}.p.v{version}", specs)
    ref = await writer.seal()
    return PolicyManifest(weights=ref, weights_hash=f"sha256:{version:064x}")


def _cpu_s(pids: dict[str, int]) -> dict[str, float]:
    """CPU seconds by process; children count apart, so that workers and engines show."""
    found: dict[str, float] = {}
    for name, pid in pids.items():
        process = psutil.Process(pid)
        found[name] = _times(process)
        children = process.children(recursive=True)
        if children:
            label = {"dispatcher": "worker", "engine-host": "engine"}.get(name, f"{name} children")
            found[label] = sum(_times(child) for child in children)
    return found


def _times(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)

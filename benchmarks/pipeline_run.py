"""One run of an emulated workload on a cluster of its own, timed from outside."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import psutil

from benchmarks.pipeline_modes import Emulation, num_slots, run_config, trainer_settings
from benchmarks.pipeline_parts import Kind, Span
from flexmarl.api.common.v1.common_pb2 import VERTEX_STATUS_DONE
from flexmarl.api.meg_store.v1.graph_pb2 import VertexMeta
from flexmarl.api.meg_store.v1.meg_store_pb2 import VertexFilter
from flexmarl.api.rollout.v1.engine_pb2 import INSTANCE_STATE_SERVING
from flexmarl.api.rollout.v1.rollout_pb2 import RolloutStatus
from flexmarl.cli.clients import Clients, connect_cluster
from flexmarl.cli.cluster.attach import Addresses
from flexmarl.cli.cluster.folder import ClusterFolder
from flexmarl.cli.cluster.local import LocalCluster
from flexmarl.cli.cluster.plan import (
    DISPATCHER,
    ORCHESTRATOR,
    STORE,
    TRAINER,
    ClusterSettings,
)
from flexmarl.cli.launch import source_of
from flexmarl.cli.preflight.run import check_run
from flexmarl.client.errors import NotFoundError
from flexmarl.client.orchestrator import OrchestratorClient
from flexmarl.client.rollout import RolloutClient
from flexmarl.client.runs import store_run
from flexmarl.core.ideal_schedule import Mode
from flexmarl.runtime.spans import read_spans

_LOOK_S: Final = 0.02
_LOOKS_PER_CHECK: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run, in emulated seconds since the start of batch 0.

    Attributes:
        step_s: From the start of batch 0 until the last version is loaded, per batch.
        edges: When each batch began; the last: when the last version was loaded.
        spans: What took time.
        cores: CPU of all services meanwhile, in cores of this machine.
    """

    step_s: float
    edges: tuple[float, ...]
    spans: tuple[Span, ...]
    cores: float


async def measure(emulation: Emulation, mode: Mode) -> Measured:
    """Runs the workload under a mode's rules."""
    with tempfile.TemporaryDirectory(prefix="flexmarl-bench-") as scratch:
        folder = Path(scratch)
        config = run_config(emulation, mode, folder)
        check_run(config)
        run_id = f"{config.name.replace('_', '-')}-{uuid.uuid4().hex[:6]}"
        place = ClusterFolder(folder / "cluster")
        async with _cluster(emulation, mode, place) as (clients, rollout):
            await store_run(clients.store, source_of(run_id, config), shards=[clients.home_shard])
            await clients.orchestrator.submit_run(run_id, home_shard=clients.home_shard)
            num_batches = len(emulation.workload.batches)
            look = partial(_until, run_id, clients.orchestrator, rollout)
            begun_s = await look(version=0, sampling=True)
            cpu_s = _cpu_s()
            ended_s = await look(version=num_batches)
            cpu_s = _cpu_s() - cpu_s
            wanted = VertexFilter(status=VERTEX_STATUS_DONE)
            metas = [v.meta async for v in clients.store.list_vertices(run_id, wanted)]
            manifests = await clients.store.list_manifests(run_id, from_version=1)
            await clients.orchestrator.stop_run(run_id)
        clock = _Clock(begun_s, emulation.second_s)
        commits = [clock.at(manifest.committed_unix_ns / 1e9) for manifest in manifests]
        return Measured(
            step_s=clock.at(ended_s) / num_batches,
            edges=(0.0, *commits[: num_batches - 1], clock.at(ended_s)),
            spans=(*_request_spans(metas, clock), *_service_spans(place, run_id, clock)),
            cores=cpu_s / (ended_s - begun_s),
        )


@dataclass(frozen=True, slots=True)
class _Clock:
    begun_s: float
    second_s: float

    def at(self, unix_s: float) -> float:
        """Emulated seconds since the start of batch 0."""
        return (unix_s - self.begun_s) / self.second_s

    def span(self, kind: Kind, name: str, start_s: float, end_s: float) -> Span:
        return Span(kind, name, self.at(start_s), self.at(end_s))


def _request_spans(metas: Iterable[VertexMeta], clock: _Clock) -> Iterator[Span]:
    for meta in metas:
        ready_s, sent_s = meta.ready_unix_ns / 1e9, meta.dispatched_unix_ns / 1e9
        yield clock.span("wait", meta.policy, ready_s, sent_s)
        yield clock.span("request", meta.policy, sent_s, meta.finished_unix_ns / 1e9)


def _service_spans(folder: ClusterFolder, run_id: str, clock: _Clock) -> Iterator[Span]:
    """Loads, moves, closes and operations on slots, as the services have recorded them."""
    places = [folder.service(service) / "spans" for service in (DISPATCHER, ORCHESTRATOR, TRAINER)]
    for place in (*places, places[0] / run_id):  # the dispatcher keeps each run's apart
        for _, span in read_spans(place):
            times = span.start_s, span.end_s
            if span.track.startswith("weights/"):
                yield clock.span("load", span.name.split()[1], *times)
            elif span.track.startswith("moves/"):
                yield clock.span("move", span.name, *times)
            elif span.track.startswith("slot/") and "policy" in span.args:
                yield clock.span("train", span.name, *times)
            elif span.name == "CloseGroup":
                yield clock.span("close", "", *times)


def _cpu_s() -> float:
    """CPU of all processes below this one that live."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


@contextlib.asynccontextmanager
async def _cluster(
    emulation: Emulation, mode: Mode, folder: ClusterFolder
) -> AsyncIterator[tuple[Clients, RolloutClient]]:
    settings = ClusterSettings(
        durability="process",
        slots=num_slots(emulation, mode),
        overrides=tuple(trainer_settings(emulation, mode)),
    )
    cluster = LocalCluster(folder, settings, tell=lambda _: None)
    await cluster.start()
    try:
        addresses = Addresses(cluster.address(STORE), cluster.address(ORCHESTRATOR))
        async with (
            connect_cluster(addresses) as clients,
            RolloutClient.connect(cluster.address(DISPATCHER)) as rollout,
        ):
            yield clients, rollout
    finally:
        await cluster.stop()


async def _until(
    run_id: str,
    orchestrator: OrchestratorClient,
    rollout: RolloutClient,
    *,
    version: int,
    sampling: bool = False,
) -> float:
    """Moment at which every policy serves a version, and samples run where that is asked for."""
    for look in itertools.count():
        with contextlib.suppress(NotFoundError):  # the run is being opened
            status = await rollout.get_status(run_id)
            if _serves(status, version) and (status.num_open_samples or not sampling):
                break
        if look % _LOOKS_PER_CHECK == 0:
            progress = await orchestrator.get_run_status(run_id)
            if progress.HasField("failure"):
                raise RuntimeError(progress.failure.message)
        await asyncio.sleep(_LOOK_S)
    return time.time()


def _serves(status: RolloutStatus, version: int) -> bool:
    serving = {
        policy
        for instance in status.instances
        if instance.state == INSTANCE_STATE_SERVING and instance.version >= version
        for policy in instance.policies
    }
    return serving == set(status.queues) and status.version >= version

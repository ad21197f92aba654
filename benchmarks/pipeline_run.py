"""One run of an emulated workload on a cluster of its own, timed from outside."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.pipeline_modes import Emulation, num_slots, run_config, trainer_settings
from flexmarl.api.rollout.v1alpha1.engine_pb2 import INSTANCE_STATE_SERVING
from flexmarl.api.rollout.v1alpha1.rollout_pb2 import RolloutStatus
from flexmarl.cli.clients import Clients, connect_cluster
from flexmarl.cli.cluster.attach import Addresses
from flexmarl.cli.cluster.folder import ClusterFolder
from flexmarl.cli.cluster.local import LocalCluster
from flexmarl.cli.cluster.plan import DISPATCHER, ORCHESTRATOR, STORE, ClusterSettings
from flexmarl.cli.launch import source_of
from flexmarl.cli.preflight.run import check_run
from flexmarl.client.errors import NotFoundError
from flexmarl.client.orchestrator import OrchestratorClient
from flexmarl.client.rollout import RolloutClient
from flexmarl.client.runs import store_run
from flexmarl.core.ideal_schedule import Mode

_LOOK_S: Final = 0.02
_LOOKS_PER_CHECK: Final = 50


async def step_s(emulation: Emulation, mode: Mode) -> float:
    """Runs the workload under a mode's rules.

    Returns:
        Emulated seconds from the start of batch 0 until the last version is loaded, per batch.
    """
    with tempfile.TemporaryDirectory(prefix="flexmarl-bench-") as scratch:
        folder = Path(scratch)
        config = run_config(emulation, mode, folder)
        check_run(config)
        run_id = f"{config.name.replace('_', '-')}-{uuid.uuid4().hex[:6]}"
        async with _cluster(emulation, mode, folder / "cluster") as (clients, rollout):
            await store_run(clients.store, source_of(run_id, config), shards=[clients.home_shard])
            await clients.orchestrator.submit_run(run_id, home_shard=clients.home_shard)
            num_batches = len(emulation.workload.batches)
            look = partial(_until, run_id, clients.orchestrator, rollout)
            begun_s = await look(version=0, sampling=True)
            ended_s = await look(version=num_batches)
            await clients.orchestrator.stop_run(run_id)
        return (ended_s - begun_s) / num_batches / emulation.second_s


@contextlib.asynccontextmanager
async def _cluster(
    emulation: Emulation, mode: Mode, folder: Path
) -> AsyncIterator[tuple[Clients, RolloutClient]]:
    settings = ClusterSettings(
        durability="process",
        slots=num_slots(emulation, mode),
        overrides=tuple(trainer_settings(emulation, mode)),
    )
    cluster = LocalCluster(ClusterFolder(folder), settings, tell=lambda _: None)
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
    return time.monotonic()


def _serves(status: RolloutStatus, version: int) -> bool:
    serving = {
        policy
        for instance in status.instances
        if instance.state == INSTANCE_STATE_SERVING and instance.version >= version
        for policy in instance.policies
    }
    return serving == set(status.queues) and status.version >= version

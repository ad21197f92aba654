"""Runs of the proof's team on one cluster that stays up between them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import psutil
from integration.cluster_harness import Cluster
from proof.facts import Facts, read_facts

from flexmarl.api.common.v1 import common_pb2
from flexmarl.cli.clients import connect_cluster
from flexmarl.cli.cluster.attach import Addresses
from flexmarl.cli.follow import follow_run
from flexmarl.cli.launch import source_of
from flexmarl.cli.preflight.run import load_run_config
from flexmarl.client.runs import store_run
from flexmarl.client.trainer import TrainerClient

CONFIG = Path(__file__).parent / "team/config.toml"


class ProofCluster(Cluster):
    """A cluster, and runs on it through the SDK."""

    async def run(
        self, run_id: str, *overrides: str, beside: Awaitable[Any] | None = None
    ) -> tuple[Facts, float]:
        """Trains a run to its end, with something happening beside it.

        Returns:
            What it left, and the seconds that it took.
        """
        config = load_run_config(CONFIG, list(overrides))
        # Ports move when a service is started again, addresses of a run do not: the cluster keeps
        # each service's port.
        addresses = Addresses(self.address("meg_store"), self.address("orchestrator"))
        async with connect_cluster(addresses) as clients:
            await store_run(clients.store, source_of(run_id, config), shards=[clients.home_shard])
            begun_s = time.monotonic()
            await clients.orchestrator.submit_run(run_id, home_shard=clients.home_shard)
            happening = asyncio.ensure_future(beside) if beside is not None else None
            progress = await follow_run(
                clients.orchestrator,
                run_id,
                home_shard=clients.home_shard,
                on_message=lambda _message: None,
            )
            took_s = time.monotonic() - begun_s
            if happening is not None:
                await happening
            assert progress.status == common_pb2.RUN_STATUS_FINISHED, progress
            facts = await read_facts(clients.store, run_id)
            assert facts.versions == config.versions
            return facts, took_s

    async def held_slots(self) -> list[str]:
        """Trainer slots that a run still holds."""
        async with TrainerClient.connect(self.address("trainer")) as trainer:
            status = await trainer.get_status()
            return [f"{slot.slot}: {slot.run_id}" for slot in status.slots if slot.run_id]

    def victims(self, kind: str) -> list[int]:
        """Processes of a kind, by name; none when there is none right now."""
        service, _, prefix = VICTIMS[kind].partition("/")
        try:
            if not self.is_running(service):
                return []
            pids = [self.pid(service)]
            if prefix:
                (record,) = (self.folder / "services" / service).rglob("*children*.json")
                children = sorted(
                    (c["name"], int(c["pid"])) for c in json.loads(record.read_text())
                )
                pids = [pid for name, pid in children if name.startswith(prefix)]
            below = psutil.Process(int(self.state["pid"])).children(recursive=True)
        except (OSError, ValueError, KeyError, psutil.NoSuchProcess):
            return []
        # A record may name a process that has ended, and its pid somebody else's.
        alive = {process.pid for process in below}
        return [pid for pid in pids if pid in alive]

    def orphans(self) -> list[str]:
        """Processes of the cluster that live on without being below its supervisor."""
        supervisor = psutil.Process(int(self.state["pid"]))
        ours = {supervisor.pid, *(p.pid for p in supervisor.children(recursive=True))}
        return [line for line in self.survivors() if int(line.partition(" ")[0]) not in ours]


VICTIMS = {
    "meg-store": "meg_store",
    "dispatcher": "rollout",
    "engine-host": "engine_host",
    "trainer": "trainer",
    "orchestrator": "orchestrator",
    "workflow-worker": "rollout/worker",
    "reward-process": "rollout/reward",
    "engine": "engine_host/engine",
    "trainer-rank": "trainer/rank",
    "rendezvous": "trainer/rendezvous",
    "worker-zygote": "rollout/zygote",
    "engine-zygote": "engine_host/zygote",
    "trainer-zygote": "trainer/zygote",
}
"""Kinds of processes: the service, and behind the slash how its child's name begins."""

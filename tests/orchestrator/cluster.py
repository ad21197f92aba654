"""A store process, an orchestrator process, and stand-ins for the other services."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from meg_store.store_harness import StoreProcess
from orchestrator.standin_rollout import StandInRollout
from orchestrator.standin_trainer import StandInTrainer
from ports import own_port

from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.api.orchestrator.v1 import orchestrator_pb2
from flexmarl.api.rollout.v1.rollout_pb2_grpc import add_RolloutServiceServicer_to_server
from flexmarl.api.trainer.v1.trainer_pb2_grpc import add_TrainerServiceServicer_to_server
from flexmarl.client.errors import NotFoundError
from flexmarl.client.orchestrator import OrchestratorClient
from flexmarl.client.store import StoreClient
from flexmarl.runtime.config import ServerConfig
from flexmarl.runtime.run_config import RunConfig
from flexmarl.runtime.server import GrpcServer

AGENTS = ("splitter", "sorter", "merger")
ENDED = {common.RUN_STATUS_FINISHED, common.RUN_STATUS_FAILED, common.RUN_STATUS_STOPPED}


class OrchestratorProcess:
    """An orchestrator in a process of its own, to be killed and started again."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.folder = folder
        self.address_file = folder / "orchestrator.json"
        self._settings = (
            f"data_dir={folder / 'orchestrator'}",
            f"server.address_file={self.address_file}",
            "server.reflection=false",
            "status_interval_ms=50",
            "confirm_term_s=0.3",
            *settings,
        )
        self._port = own_port()
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> str:
        """Start, on the same port as before, and wait until it serves."""
        self.address_file.unlink(missing_ok=True)
        settings = (*self._settings, f"server.port={self._port}")
        pairs = [item for value in settings for item in ("--set", value)]
        with (self.folder / "orchestrator.log").open("ab") as log:
            self.process = subprocess.Popen(  # noqa: ASYNC220 - returns at once
                [sys.executable, "-m", "flexmarl.orchestrator", *pairs],
                stderr=log,
                start_new_session=True,
            )
        while not self.address_file.exists():
            assert self.process.poll() is None, self.log()
            await asyncio.sleep(0.02)
        return str(json.loads(self.address_file.read_text())["address"])

    def log(self) -> str:
        """What it logged."""
        return (self.folder / "orchestrator.log").read_text()

    def kill(self) -> None:
        """`kill -9`."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout=20)

    def clean(self) -> None:
        """End it in any case."""
        if self.process is not None and self.process.poll() is None:
            self.kill()


@dataclass
class Cluster:
    """Everything that one run needs."""

    run_id: str
    store_process: StoreProcess
    orchestrator_process: OrchestratorProcess
    store: StoreClient
    client: OrchestratorClient
    rollout: StandInRollout
    trainer: StandInTrainer
    home: common.ShardAddress
    reports: dict[int, orchestrator_pb2.VersionReport] = field(default_factory=dict)

    async def submit(self, config: RunConfig, *, queries: list[bytes] | None = None) -> None:
        """Store a run and submit it."""
        await self.store_run(config, queries=queries)
        await self.client.submit_run(self.run_id, home_shard=self.home)

    async def store_run(self, config: RunConfig, *, queries: list[bytes] | None = None) -> None:
        """Store a run."""
        lines = queries if queries is not None else [b'{"digits":"%d"}' % i for i in range(13)]
        dataset = await self.store.put_object(b"\n".join(lines) or b"\n")
        bundle = await self.store.put_object(b"no workflow is run here")
        run = graph.Run(
            run_id=self.run_id,
            config_json=config.model_dump_json().encode(),
            content_hash="sha256:0",
            shards=[self.home],
            workflow_bundle=bundle,
            dataset=dataset,
        )
        await self.store.create_run(run)

    async def follow(self) -> orchestrator_pb2.RunProgress:
        """Watch the run to its end, collecting reports."""
        first = max(self.reports, default=-1) + 1
        progress = None
        async for message in self.client.watch_progress(
            self.run_id, from_version=first, interval_ms=50
        ):
            for report in message.reports:
                assert report.version not in self.reports, "a report comes once"
                self.reports[report.version] = report
            progress = message.progress
            if progress.status in ENDED:
                return progress
        raise AssertionError(f"the stream ended before the run: {progress}")

    async def until(self, condition: Any) -> None:
        """Wait until a condition over the store's newest manifest holds."""
        while not condition(await self.store.get_manifest(self.run_id)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def manifests(self) -> list[graph.Manifest]:
        """All versions."""
        return await self.store.list_manifests(self.run_id)


def run_config(**more: Any) -> RunConfig:
    """A run of three policies, each agent with one of its own."""
    return RunConfig.model_validate(
        {
            "name": "quick",
            "seed": 7,
            "versions": more.get("versions", 3),
            "workflow": {"entry": "team:team", "reward": "team:reward"},
            "dataset": {"path": "data.jsonl", "columns": more.get("columns", ["digits"])},
            "batch": {
                "groups": more.get("groups", 4),
                "samples_per_group": more.get("samples", 3),
                **more.get("batch", {}),
            },
            "advantage": {"scope": "call_site", "normalize_std": False},
            "policies": {
                agent: {
                    "model": {"path": "model"},
                    "trainer": {
                        "micro_batch_rows": more.get("micro_batch_rows", 5),
                        "world_size": more.get("world_size", 1),
                    },
                }
                for agent in AGENTS
            },
            "agents": {agent: {"policy": agent, "prompt": "{digits}"} for agent in AGENTS},
            "trainer": {"slots": 2, **more.get("trainer", {})},
            "pipeline": more.get("pipeline", {}),
            "evaluation": more.get("evaluation", {}),
        }
    )


class Processes:
    """A store and an orchestrator that the tests of a module share; `port` is for the stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.port = own_port()
        self.store = StoreProcess(folder, "store.durability=process")
        self.orchestrator = OrchestratorProcess(
            folder, f"rollout=127.0.0.1:{self.port}", f'trainers=["127.0.0.1:{self.port}"]'
        )
        self.addresses = ("", "")

    def start(self) -> None:
        """Start both, side by side."""

        async def both() -> tuple[str, str]:
            return await asyncio.gather(self.store.start(), self.orchestrator.start())

        self.addresses = asyncio.run(both())

    def clean(self) -> None:
        """End both."""
        self.orchestrator.clean()
        self.store.clean()


@asynccontextmanager
async def cluster(
    processes: Processes,
    *,
    rollout: StandInRollout | None = None,
    trainer: StandInTrainer | None = None,
) -> AsyncIterator[Cluster]:
    """A cluster for one run: stand-ins of its own beside the shared processes."""
    rollout, trainer = rollout or StandInRollout(), trainer or StandInTrainer()
    server = GrpcServer(
        ServerConfig(port=processes.port, reflection=False, grace_s=0.1),
        name="stand-ins",
        add_to_server=[
            partial(add_RolloutServiceServicer_to_server, rollout),
            partial(add_TrainerServiceServicer_to_server, trainer),
        ],
        services=[],
    )
    await server.start()
    store_address, address = processes.addresses
    run_id = f"run-{uuid.uuid4().hex[:12]}"
    try:
        async with (
            StoreClient.connect(store_address) as store,
            OrchestratorClient.connect(address) as client,
        ):
            home = common.ShardAddress(name="s0", address=store_address)
            yield Cluster(
                run_id,
                processes.store,
                processes.orchestrator,
                store,
                client,
                rollout,
                trainer,
                home,
            )
            # Whatever the test left running must not be in the next one's way.
            with contextlib.suppress(NotFoundError):
                await client.stop_run(run_id)
    finally:
        await rollout.close()
        await trainer.close()
        await server.stop()

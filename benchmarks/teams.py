"""Runs of any team at the services of `benchmarks.rollout`: opened, given one batch, closed."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rollout import MODEL
from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.common.v1.common_pb2 import ShardAddress
from flexmarl.api.meg_store.v1.graph_pb2 import Group, Manifest, PolicyManifest
from flexmarl.api.rollout.v1.rollout_pb2 import RolloutStatus, SampleSpec
from flexmarl.client.buffers import BufferSpec
from flexmarl.client.rollout import RolloutClient
from flexmarl.client.runs import RunSource, store_run
from flexmarl.client.store import StoreClient
from flexmarl.core.ids import BatchId, GroupId, SampleId
from flexmarl.runtime.run_config import RunConfig

_PATIENCE_S = 170.0


@dataclass(frozen=True, slots=True)
class Team:
    """A team to measure.

    Attributes:
        name: Run id.
        source: Module with `team` and `reward`.
        agents: Agents section.
        policies: Policies section, models left aside.
        workflow: Further keys of the workflow section.
        rollout: Rollout section.
    """

    name: str
    source: str
    agents: Mapping[str, Any]
    policies: Mapping[str, Mapping[str, Any]]
    workflow: Mapping[str, Any]
    rollout: Mapping[str, Any]

    def config(self, folder: Path, *, model: Path) -> RunConfig:
        """The run's config; writes the package."""
        package = folder / self.name
        package.mkdir()
        (package / "team.py").write_text(self.source)
        (folder / "data.jsonl").write_text("{}\n")
        return RunConfig.model_validate(
            {
                "name": self.name,
                "versions": 1,
                "dataset": {"path": str(folder / "data.jsonl")},
                "batch": {"groups": 1, "samples_per_group": 1},
                "workflow": {
                    "package": str(package), "entry": "team:team", "reward": "team:reward",
                    **self.workflow,
                },
                "policies": {
                    name: {"model": {"path": str(model)}, **policy}
                    for name, policy in self.policies.items()
                },
                "agents": self.agents,
                "rollout": self.rollout,
            }
        )  # fmt: skip


class TeamRun:
    """One team's run at the services."""

    def __init__(self, store: StoreClient, rollout: RolloutClient, config: RunConfig) -> None:
        self._store = store
        self._rollout = rollout
        self._config = config
        self._run_id = config.name

    async def open(self) -> None:
        """Stores and opens the run; waits until version 0 is served."""
        shards = [ShardAddress(name="s0", address=self._store.address)]
        config = self._config
        source = RunSource(
            run_id=self._run_id, config_json=config.model_dump_json().encode(),
            portable_config_json=b"{}", package=config.workflow.package, exclude=(),
            dataset=config.dataset.path,
            models={name: policy.model.path for name, policy in config.policies.items()},
        )  # fmt: skip
        await store_run(self._store, source, shards=shards)
        await self._store.acquire_term(self._run_id, "orchestrator", holder="bench")
        await self._rollout.open_run(self._run_id, term=1, shards=shards)
        policies = {name: await self._publish(name) for name in config.policies}
        manifest = Manifest(version=0, policies=policies)
        await self._rollout.activate_version(self._run_id, manifest, term=1)
        async with asyncio.timeout(_PATIENCE_S):
            while not (await self.status()).ready:
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Ends its workers and engines."""
        await self._rollout.close_run(self._run_id, term=1)

    async def status(self) -> RolloutStatus:
        """The dispatcher's status.

        Raises:
            RuntimeError: The run cannot go on.
        """
        status = await self._rollout.get_status(self._run_id)
        if status.HasField("fatal"):
            raise RuntimeError(status.fatal.message)
        return status

    async def batch(self, queries: Sequence[Mapping[str, Any]]) -> tuple[float, RolloutStatus]:
        """Runs a sample of each query; returns how long it took, and the status at the end."""
        await self.admit(queries)
        started = time.perf_counter()
        async with asyncio.timeout(_PATIENCE_S):
            while (status := await self.status()).num_open_samples:
                await asyncio.sleep(0.1)
        return time.perf_counter() - started, status

    async def admit(self, queries: Sequence[Mapping[str, Any]]) -> None:
        """Starts a sample of each query."""
        texts = [json.dumps(query).encode() for query in queries]
        groups = [GroupId(BatchId(0), ordinal) for ordinal in range(len(queries))]
        rows = [
            Group(
                group_id=str(group), ordinal=group.ordinal, query_json=text, num_samples=1,
                status=common_pb2.GROUP_STATUS_OPEN,
            )
            for group, text in zip(groups, texts, strict=True)
        ]  # fmt: skip
        specs = [
            SampleSpec(
                sample_id=str(SampleId(group, 0)), group_id=str(group),
                group_ordinal=group.ordinal, query_json=text, seed=group.ordinal,
            )
            for group, text in zip(groups, texts, strict=True)
        ]  # fmt: skip
        for start in range(0, len(rows), 1000):
            part = slice(start, start + 1000)
            await self._store.write_graph(self._run_id, term=1, groups=rows[part])
            await self._rollout.start_samples(self._run_id, specs[part], term=1)

    async def _publish(self, policy: str) -> PolicyManifest:
        specs = [BufferSpec(name="w", dtype="F32", shape=(16,))]
        writer = await self._store.allocate_segment(
            self._run_id, f"{self._run_id}.{policy}.v0", specs
        )
        return PolicyManifest(weights=await writer.seal(), weights_hash=f"sha256:{policy:0>64}")


def copy_model(folder: Path, *, max_context: int) -> Path:
    """The quickstart's model folder with room for longer contexts; without weights, as it is."""
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = max_context
    (folder / "config.json").write_text(json.dumps(config))
    return folder

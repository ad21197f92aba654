"""A real MEG Store and a real trainer, each a process; a run with rows to train on."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from array import array
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ports import own_port
from trainer.harness import Row, read

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as store_pb2
from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.client.bundle import folder_hash, pack_folder
from flexmarl.client.store import StoreClient
from flexmarl.client.trainer import TrainerClient
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ids import BatchId, GroupId, SampleId, VertexId, micro_batch_id
from flexmarl.runtime.run_config import RunConfig


class Service:
    """A service process; `kill` and `start` again as often as needed."""

    def __init__(self, module: str, folder: Path, **settings: Any) -> None:
        self.module, self.folder, self.settings = module, folder, settings
        self.port = own_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.address = ""

    async def start(self, *, timeout_s: float = 250.0) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        address_file = self.folder / "address.json"
        address_file.unlink(missing_ok=True)
        args = [sys.executable, "-m", self.module]
        settings = {
            "server.address_file": address_file,
            "server.port": self.port,
            **self.settings,
        }
        for key, value in settings.items():
            args += ["--set", f"{key}={value}"]
        with (self.folder / "log").open("ab") as log:
            self.process = await asyncio.to_thread(
                subprocess.Popen,
                args,
                stderr=log,
                stdout=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        end = time.monotonic() + timeout_s
        while not address_file.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError((self.folder / "log").read_text()[-4000:])
            await asyncio.sleep(0.05)
        self.address = json.loads(address_file.read_text())["address"]

    async def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return await asyncio.to_thread(self.process.wait, 30)


@dataclass
class Cluster:
    store_service: Service
    trainer_service: Service
    store: StoreClient
    trainer: TrainerClient
    folder: Path
    open_runs: list[str] = field(default_factory=list)

    async def close_runs(self) -> None:
        """Frees the slots, however a test ended."""
        for run_id in self.open_runs:
            await self.trainer.close_run(run_id, term=1 << 40)
        self.open_runs.clear()

    async def make_run(
        self,
        policies: dict[str, dict[str, Any]],
        models: dict[str, Path],
        *,
        package: Path | None = None,
        run_id: str | None = None,
        seed: int = 7,
    ) -> Run:
        run_id = run_id or f"run-{uuid.uuid4().hex[:8]}"
        bundle = None
        if package is not None:
            archive = self.folder / f"{run_id}.tar"
            pack_folder(package, archive)
            bundle = await self.store.put_object(archive)
        config = RunConfig.model_validate(
            {
                "name": "t",
                "seed": seed,
                "versions": 3,
                "workflow": {"entry": "m:team", "reward": "m:reward"},
                "dataset": {"path": "/nowhere.jsonl"},
                "batch": {"groups": 1, "samples_per_group": 2},
                "policies": {
                    name: {"model": {"path": str(models[name]), "init": "random"}, **sections}
                    for name, sections in policies.items()
                },
                "agents": {f"agent-{name}": {"policy": name} for name in policies},
                "trainer": {"slots": 2},
            }
        )
        shards = [common_pb2.ShardAddress(name="s0", address=self.store.address)]
        await self.store.create_run(
            graph_pb2.Run(
                run_id=run_id,
                config_json=config.model_dump_json().encode(),
                content_hash="sha256:0",
                shards=shards,
                workflow_bundle=bundle,
                models={
                    name: graph_pb2.ModelRef(path=str(path), content_hash=folder_hash(path))
                    for name, path in models.items()
                },
            )
        )
        self.open_runs.append(run_id)
        run = Run(self, run_id, shards)
        run.term = await self.store.acquire_term(run_id, "orchestrator", holder="test")
        await self.trainer.open_run(run_id, term=run.term, shards=shards)
        return run


@dataclass
class Run:
    cluster: Cluster
    run_id: str
    shards: list[common_pb2.ShardAddress]
    term: int = 0
    terms: dict[str, int] = field(default_factory=dict)
    groups: int = 0
    micro_batches: int = 0
    manifest: graph_pb2.Manifest | None = None

    @property
    def version(self) -> int | None:
        return None if self.manifest is None else self.manifest.version

    async def bind(self, policy: str, slots: list[str], **more: Any):
        self.terms[policy] = await self.cluster.store.acquire_term(
            self.run_id, f"policy/{policy}", holder="test"
        )
        return await self.cluster.trainer.bind_policy(
            self.run_id,
            policy,
            term=self.terms[policy],
            slots=slots,
            version=self.version,
            **more,
        )

    async def first_commit(self, *policies: str) -> None:
        """What the orchestrator does first: set 0 of every policy, then version 0."""
        states = []
        for policy in policies:
            states.append((await self.bind(policy, ["slot0"])).state)
            await self.suspend(policy)
        await self.commit(*states)

    async def commit(self, *states: graph_pb2.StateRecord) -> None:
        version = 0 if self.manifest is None else self.manifest.version + 1
        manifest = graph_pb2.Manifest(version=version, term=self.term)
        if self.manifest is not None:
            for name, entry in self.manifest.policies.items():
                manifest.policies[name].CopyFrom(entry)
        for state in states:
            manifest.policies[state.policy].CopyFrom(
                graph_pb2.PolicyManifest(
                    weights=state.weights,
                    weights_hash=state.weights_hash,
                    master=state.master,
                    moments=state.moments,
                    num_updates=state.num_updates,
                    state_version=state.version,
                )
            )
        await self.cluster.store.commit(self.run_id, manifest, expected_version=self.version)
        self.manifest = manifest

    def vertices(self, policy: str, rows: list[Row], *, batch: int) -> list[graph_pb2.Vertex]:
        assert self.manifest is not None
        weights_hash = self.manifest.policies[policy].weights_hash
        group = GroupId(BatchId(batch), self.groups)
        self.groups += 1
        made = []
        for ordinal, row in enumerate(rows):
            sample = SampleId(group, ordinal)
            vertex_id = VertexId(sample, "0:0")
            meta = graph_pb2.VertexMeta(
                vertex_id=str(vertex_id),
                sample_id=str(sample),
                group_id=str(group),
                batch=batch,
                attempt=1,
                path="0:0",
                agent=f"agent-{policy}",
                policy=policy,
                kind=common_pb2.VERTEX_KIND_AGENT,
                status=common_pb2.VERTEX_STATUS_DONE,
                policy_version=batch,
                weights_hash=weights_hash,
                version_runs=[common_pb2.VersionRun(version=batch, num_tokens=len(row.response))],
                num_prompt_tokens=len(row.prompt),
                num_response_tokens=len(row.response),
                trainable=True,
            )
            payload = graph_pb2.VertexPayload(
                prompt_tokens=row.prompt,
                response_tokens=row.response,
                logprobs=row.logprobs,
                temperature=row.temperature,
            )
            made.append(graph_pb2.Vertex(meta=meta, payload=payload))
        return made

    async def micro_batch(
        self, policy: str, rows: list[Row], *, batch: int, edit: Any = None
    ) -> graph_pb2.MicroBatch:
        """Stores one group of finished rows, releases them, and records a micro-batch of them."""
        store = self.cluster.store
        vertices = self.vertices(policy, rows, batch=batch)
        if edit is not None:
            edit(vertices)
        group_id = vertices[0].meta.group_id
        group = graph_pb2.Group(
            group_id=group_id,
            batch=batch,
            ordinal=self.groups - 1,
            num_samples=len(rows),
            query_json=b"{}",
            status=common_pb2.GROUP_STATUS_OPEN,
        )
        samples = [
            graph_pb2.Sample(
                sample_id=vertex.meta.sample_id,
                group_id=group_id,
                batch=batch,
                ordinal=ordinal,
                status=common_pb2.SAMPLE_STATUS_DONE,
                num_vertices=1,
            )
            for ordinal, vertex in enumerate(vertices)
        ]
        await store.write_graph(
            self.run_id, term=self.term, groups=[group], samples=samples, vertices=vertices
        )
        refs = [
            common_pb2.VertexRef(
                shard="s0", vertex_id=vertex.meta.vertex_id, agent=vertex.meta.agent
            )
            for vertex in vertices
        ]
        released = [
            store_pb2.ReleasedRow(row=ref, reward=0.0, advantage=row.advantage)
            for ref, row in zip(refs, rows, strict=True)
        ]
        closure = store_pb2.GroupClosure(
            group_id=group_id, status=common_pb2.GROUP_STATUS_CLOSED, released=released
        )
        await store.close_groups(self.run_id, [closure], term=self.term)
        record = graph_pb2.MicroBatch(
            micro_batch_id=micro_batch_id(
                BatchId(batch), ordinal=self.micro_batches, policy=policy
            ),
            policy=policy,
            batch=batch,
            rows=refs,
            term=self.term,
        )
        self.micro_batches += 1
        await store.create_micro_batch(self.run_id, record)
        return record

    async def compute(self, record: graph_pb2.MicroBatch, **changes: Any):
        assert self.manifest is not None
        arguments = {
            "term": self.terms[record.policy],
            "version": record.batch,
            "weights_hash": self.manifest.policies[record.policy].weights_hash,
            **changes,
        }
        return await self.cluster.trainer.compute_gradients(self.run_id, record, **arguments)

    async def save(self, policy: str):
        return await self.cluster.trainer.save_gradients(
            self.run_id, policy, term=self.terms[policy]
        )

    async def apply(self, policy: str, batch: int, ids: list[str]):
        return await self.cluster.trainer.apply_update(
            self.run_id, policy, term=self.terms[policy], batch=batch, micro_batch_ids=ids
        )

    async def suspend(self, policy: str):
        return await self.cluster.trainer.suspend_policy(
            self.run_id, policy, term=self.terms[policy]
        )

    def weights_hash(self, policy: str) -> str:
        assert self.manifest is not None
        return self.manifest.policies[policy].weights_hash

    async def tensors(self, ref: common_pb2.ObjectRef) -> dict[str, np.ndarray]:
        """Full tensors of a segment, by name, whatever ranks wrote it."""
        async with self.cluster.store.open_segment(self.run_id, ref.key, holder="test") as reader:
            return read(rank_pb2.MappedSegment(path=reader.path, buffers=reader.view.buffers))

    async def numbers(self, ref: common_pb2.ObjectRef) -> list[float]:
        """All numbers of a float64 segment, by name."""
        async with self.cluster.store.open_segment(self.run_id, ref.key, holder="test") as reader:
            data = b"".join(bytes(buffer.data) for _, buffer in sorted(reader.buffers.items()))
        return list(array("d", data))


@asynccontextmanager
async def start_cluster(
    folder: Path,
    *,
    slots: int = 2,
    memory: Path | None = None,
    store_settings: Mapping[str, Any] | None = None,
    **trainer_settings: Any,
) -> AsyncIterator[Cluster]:
    memory = memory or Path("/dev/shm") / f"flexmarl-test-{uuid.uuid4().hex[:12]}"
    store_service = Service(
        "flexmarl.meg_store",
        folder / "store",
        **{
            "store.data_dir": folder / "store",
            "store.shm_dir": memory,
            "store.durability": "process",
            **(store_settings or {}),
        },
    )
    names = ",".join(f'"slot{index}"' for index in range(slots))
    trainer_service = Service(
        "flexmarl.trainer",
        folder / "trainer",
        data_dir=folder / "trainer",
        slots=f"[{names}]",
        **{"collective_timeout_s": 20, "verify_swaps": "true", **trainer_settings},
    )
    try:
        await asyncio.gather(store_service.start(), trainer_service.start())
        async with (
            StoreClient.connect(store_service.address) as store,
            TrainerClient.connect(trainer_service.address) as trainer,
        ):
            yield Cluster(store_service, trainer_service, store, trainer, folder)
    finally:
        for service in (trainer_service, store_service):
            if service.process is not None and service.process.poll() is None:
                await service.stop()
        shutil.rmtree(memory, ignore_errors=True)


@contextmanager
def fails(
    *reasons: ErrorReason, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[DomainError]]:
    """The call inside fails with one of these reasons, and says this."""
    with pytest.raises(DomainError, match=match) as caught:
        yield caught
    assert caught.value.reason in reasons, caught.value

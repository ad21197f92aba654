"""The trainer's own time: store and trainer as processes, the quickstart's model, real rows.

The plain loop is the same model, rows and threads in one process: forward, backward, AdamW, with no
store, no service, no ranks. It, and TRL where that is installed, take turns with the trainer: all
see the same machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import trainer_swaps, trainer_trl
from benchmarks.report import Report
from benchmarks.shared_memory import shared_folder
from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.common.v1.common_pb2 import ShardAddress, VersionRun, VertexRef
from flexmarl.api.meg_store.v1.graph_pb2 import (
    Group,
    Manifest,
    MicroBatch,
    ModelRef,
    PolicyManifest,
    Run,
    Sample,
    StateRecord,
    Vertex,
    VertexMeta,
    VertexPayload,
)
from flexmarl.api.meg_store.v1.meg_store_pb2 import GroupClosure, ReleasedRow
from flexmarl.client.bundle import folder_hash
from flexmarl.client.store import StoreClient
from flexmarl.client.trainer import TrainerClient
from flexmarl.core.ids import BatchId, GroupId, SampleId, micro_batch_id
from flexmarl.runtime.run_config import RunConfig

RUN = "bench"
ROWS = 256
PROMPT, RESPONSE = 5, 4
VERSIONS = 12
MODEL = Path(__file__).parents[1] / "examples/quickstart/model"


def run(report: Report) -> None:
    """Measures operations at 256 rows, the rate against a plain loop and TRL, and swaps."""
    measured = asyncio.run(_measure())
    for name, bound in (("bind", "<= 15"), ("gradients", "<= 45"), ("apply", "<= 25")):
        value = statistics.median(measured[name]) * 1000
        report.figure(f"trainer.{name}_p50_ms", value, "ms", bound=bound)
    tokens = ROWS * (PROMPT + RESPONSE)
    update_s = statistics.median(
        [sum(parts) for parts in zip(measured["gradients"], measured["apply"], strict=True)]
    )
    plain = statistics.median(measured["plain"])
    report.figure(
        "trainer.small_tokens_per_s",
        tokens / update_s,
        "1/s",
        against=f"plain loop in one process, {tokens / plain:,.0f}/s",
        ratio=plain / update_s,
    )
    if measured["trl"]:
        theirs = statistics.median(measured["trl"])
        report.figure(
            "trainer.tokens_vs_trl",
            theirs / update_s,
            "ratio",
            against=f"{tokens / theirs:,.0f} tokens/s; ours {tokens / update_s:,.0f}",
            ratio=theirs / update_s,
            bound=">= 1.1",  # ADR-0035
        )
    else:
        report.note("trainer.tokens_vs_trl: TRL is not installed (pip install trl datasets)")
    trainer_swaps.run(report)


async def _measure() -> dict[str, list[float]]:
    """Seconds by operation, of the plain loop, and of TRL if it is there, taken in turns."""
    step = _plain_loop()
    measured: dict[str, list[float]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="flexmarl-bench-"))
        theirs = None
        if trainer_trl.is_installed():
            theirs = stack.enter_context(
                trainer_trl.peer(
                    model=str(MODEL), steps=VERSIONS, rows=ROWS, prompt=PROMPT, response=RESPONSE
                )
            )
        async with services(Path(scratch)) as (store, trainer):
            team = Team(store, trainer)
            await team.open()
            for batch in range(VERSIONS):
                times = await team.version(batch)
                times["plain"] = _timed(step)
                if theirs is not None:
                    times["trl"] = await asyncio.to_thread(theirs.step)
                if batch >= 2:  # the first ones warm up
                    for name, value in times.items():
                        measured[name].append(value)
    return measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a version trains on.

    Attributes:
        policy: Sections of the policy's configuration.
        rows: Rows per version.
        micro_batches: Micro-batches that they are handed in.
        prompt: Prompt tokens per row.
        response: Response tokens per row.
        vocab: Tokens are drawn below it.
    """

    policy: Mapping[str, Any]
    rows: int
    micro_batches: int
    prompt: int
    response: int
    vocab: int


QUICKSTART = Work(
    policy={
        "model": {"path": str(MODEL), "init": "random"},
        "loss": {"entropy": 0.1},
        "optimizer": {"lr": 3e-3},
    },
    rows=ROWS,
    micro_batches=1,
    prompt=PROMPT,
    response=RESPONSE,
    vocab=6,
)


class Team:
    """One policy, driven as the orchestrator does."""

    def __init__(self, store: StoreClient, trainer: TrainerClient, work: Work = QUICKSTART) -> None:
        self._store, self._trainer, self._work = store, trainer, work
        self._term = 0
        self._state = StateRecord()

    async def open(self) -> None:
        config = RunConfig.model_validate(
            {
                "name": RUN,
                "versions": VERSIONS,
                "workflow": {"entry": "team:team", "reward": "team:reward"},
                "dataset": {"path": "none.jsonl"},
                "batch": {"groups": 1, "samples_per_group": self._work.rows},
                "policies": {"p": self._work.policy},
                "agents": {"a": {"policy": "p"}},
            }
        )
        shards = [ShardAddress(name="s0", address=self._store.address)]
        path = self._work.policy["model"]["path"]
        model = ModelRef(path=path, content_hash=folder_hash(Path(path)))
        await self._store.create_run(
            Run(
                run_id=RUN,
                config_json=config.model_dump_json().encode(),
                content_hash="sha256:0",
                shards=shards,
                models={"p": model},
            )
        )
        await self._store.acquire_term(RUN, "orchestrator", holder="bench")
        await self._trainer.open_run(RUN, term=1, shards=shards)
        await self._bind(None)
        await self._commit(0)

    async def version(
        self, batch: int, between: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Trains one version; returns seconds by operation.

        Args:
            batch: Its number.
            between: Called before each micro-batch and before the update; not counted.
        """
        records = await self._micro_batches(batch)
        started = time.perf_counter()
        await self._bind(batch)
        seconds = {"bind": time.perf_counter() - started, "gradients": 0.0}
        for record in records:
            between()
            started = time.perf_counter()
            await self._trainer.compute_gradients(
                RUN, record, term=self._term, version=batch, weights_hash=self._state.weights_hash
            )
            seconds["gradients"] += time.perf_counter() - started
        between()
        started = time.perf_counter()
        names = [record.micro_batch_id for record in records]
        applied = await self._trainer.apply_update(
            RUN, "p", term=self._term, batch=batch, micro_batch_ids=names
        )
        seconds["apply"] = time.perf_counter() - started
        self._state = applied.state
        await self._commit(batch + 1)
        await self._trainer.suspend_policy(RUN, "p", term=self._term)
        return seconds

    async def _bind(self, version: int | None) -> None:
        self._term = await self._store.acquire_term(RUN, "policy/p", holder="bench")
        bound = await self._trainer.bind_policy(
            RUN, "p", term=self._term, slots=["slot0"], version=version
        )
        self._state = bound.state

    async def _commit(self, version: int) -> None:
        state = self._state
        entry = PolicyManifest(
            weights=state.weights,
            weights_hash=state.weights_hash,
            master=state.master,
            moments=state.moments,
            num_updates=state.num_updates,
            state_version=state.version,
        )
        manifest = Manifest(version=version, term=1, policies={"p": entry})
        await self._store.commit(RUN, manifest, expected_version=version - 1 if version else None)
        if not version:
            await self._trainer.suspend_policy(RUN, "p", term=self._term)

    async def _micro_batches(self, batch: int) -> list[MicroBatch]:
        work = self._work
        rng = random.Random(batch)
        group = GroupId(BatchId(batch), 0)
        samples, vertices, released = [], [], []
        for ordinal in range(work.rows):
            sample = str(SampleId(group, ordinal))
            meta = VertexMeta(
                vertex_id=f"{sample}/0:0", sample_id=sample, group_id=str(group), batch=batch,
                attempt=1, path="0:0", agent="a", policy="p", policy_version=batch,
                kind=common_pb2.VERTEX_KIND_AGENT, status=common_pb2.VERTEX_STATUS_DONE,
                weights_hash=self._state.weights_hash, trainable=True,
                version_runs=[VersionRun(version=batch, num_tokens=work.response)],
                num_prompt_tokens=work.prompt, num_response_tokens=work.response,
            )  # fmt: skip
            payload = VertexPayload(
                prompt_tokens=[rng.randrange(work.vocab) for _ in range(work.prompt)],
                response_tokens=[rng.randrange(work.vocab) for _ in range(work.response)],
                logprobs=[-1.8] * work.response,
                temperature=1.0,
            )
            vertices.append(Vertex(meta=meta, payload=payload))
            samples.append(
                Sample(
                    sample_id=sample, group_id=str(group), batch=batch, ordinal=ordinal,
                    status=common_pb2.SAMPLE_STATUS_DONE, num_vertices=1,
                )
            )  # fmt: skip
            ref = VertexRef(shard="s0", vertex_id=meta.vertex_id, agent="a")
            released.append(ReleasedRow(row=ref, reward=0.0, advantage=rng.uniform(-1, 1)))
        opened = Group(
            group_id=str(group), batch=batch, num_samples=work.rows, query_json=b"{}",
            status=common_pb2.GROUP_STATUS_OPEN,
        )  # fmt: skip
        await self._store.write_graph(
            RUN, term=1, groups=[opened], samples=samples, vertices=vertices
        )
        closure = GroupClosure(
            group_id=str(group), status=common_pb2.GROUP_STATUS_CLOSED, released=released
        )
        await self._store.close_groups(RUN, [closure], term=1)
        rows = [item.row for item in released]
        count = work.rows // work.micro_batches
        records = []
        for ordinal in range(work.micro_batches):
            record = MicroBatch(
                micro_batch_id=micro_batch_id(BatchId(batch), ordinal=ordinal, policy="p"),
                policy="p", batch=batch, rows=rows[ordinal * count :][:count], term=1,
            )  # fmt: skip
            await self._store.create_micro_batch(RUN, record)
            records.append(record)
        return records


def _plain_loop() -> Callable[[], None]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        AutoConfig.from_pretrained(MODEL)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(0, 6, (ROWS, PROMPT + RESPONSE))
    advantage = torch.randn(ROWS, 1)

    def step() -> None:
        logits = model(input_ids=tokens, use_cache=False).logits[:, PROMPT - 1 : -1]
        logp = torch.log_softmax(logits, -1)
        chosen = logp.gather(-1, tokens[:, PROMPT:, None])[..., 0]
        entropy = -(logp.exp() * logp).sum(-1)
        loss = -(chosen * advantage + 0.1 * entropy).mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def _timed(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


@contextlib.asynccontextmanager
async def services(
    folder: Path, *settings: str
) -> AsyncIterator[tuple[StoreClient, TrainerClient]]:
    """Store and trainer as processes, with settings of the trainer."""
    processes: list[subprocess.Popen[bytes]] = []
    with shared_folder() as shm:
        try:
            store_at = await _start(
                processes, folder, "meg_store", f"store.data_dir={folder / 'data'}",
                f"store.shm_dir={shm}", "store.durability=fsync",
            )  # fmt: skip
            trainer_at = await _start(
                processes, folder, "trainer", f"data_dir={folder / 'trainer'}", *settings
            )
            store, trainer = StoreClient.connect(store_at), TrainerClient.connect(trainer_at)
            async with store, trainer:
                yield store, trainer
        finally:
            for process in reversed(processes):
                process.send_signal(signal.SIGTERM)
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(15)
                process.kill()


async def _start(
    processes: list[subprocess.Popen[bytes]], folder: Path, service: str, *sets: str
) -> str:
    address_file = folder / f"{service}.json"
    arguments = [f"server.address_file={address_file}", "log.level=warning", *sets]
    with (folder / f"{service}.txt").open("ab") as output:
        process = await asyncio.to_thread(
            subprocess.Popen,
            [
                sys.executable,
                "-m",
                f"flexmarl.{service}",
                *(part for item in arguments for part in ("--set", item)),
            ],
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    processes.append(process)
    async with asyncio.timeout(240):
        while not address_file.exists():
            if process.poll() is not None:
                raise RuntimeError((folder / f"{service}.txt").read_text())
            await asyncio.sleep(0.02)
    return str(json.loads(address_file.read_text())["address"])

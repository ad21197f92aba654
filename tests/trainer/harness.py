"""Real rank workers, real gloo groups, and files in place of the store's segments."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.client.buffers import lay_out
from flexmarl.core.process_groups import GroupBook
from flexmarl.runtime.children import Children
from flexmarl.runtime.policy_config import PolicyConfig
from flexmarl.trainer.state_layout import MOMENTS, full_tensors, segment_specs
from flexmarl.trainer.workers import Worker

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 7,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_theta": 10.0,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def write_model(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY, **changes}))
    return folder


def policy_config(folder: Path, **sections: Any) -> PolicyConfig:
    sections = {"model": {"path": str(folder), "init": "random"}, **sections}
    return PolicyConfig.model_validate(sections)


@dataclass
class Row:
    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    advantage: float
    temperature: float = 1.0


def make_rows(count: int, *, seed: int = 0, vocab: int = 7, longest: int = 6) -> list[Row]:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        prompt = rng.integers(0, vocab, rng.integers(1, longest + 1)).tolist()
        response = rng.integers(0, vocab, rng.integers(1, longest + 1)).tolist()
        rows.append(
            Row(
                prompt,
                response,
                logprobs=(-rng.random(len(response)) * 3).tolist(),
                advantage=float(rng.normal()),
                temperature=float(rng.choice([0.7, 1.0, 1.3])),
            )
        )
    return rows


def gradients_command(rows: list[Row], name: str = "m", num_updates: int = 0) -> dict[str, Any]:
    return {
        "micro_batch_id": name,
        "tokens": np.array([t for r in rows for t in r.prompt + r.response], "<i4").tobytes(),
        "prompt_lengths": np.array([len(r.prompt) for r in rows], "<i4").tobytes(),
        "response_lengths": np.array([len(r.response) for r in rows], "<i4").tobytes(),
        "advantages": np.array([r.advantage for r in rows], "<f8").tobytes(),
        "temperatures": np.array([r.temperature for r in rows], "<f8").tobytes(),
        "logprobs": np.array([p for r in rows for p in r.logprobs], "<f8").tobytes(),
        "num_updates": num_updates,
    }


class Ranks:
    """Workers with the rendezvous store that groups of several meet in."""

    def __init__(self, workers: list[Worker], store_port: int, folder: Path) -> None:
        self.workers = workers
        self.folder = folder
        self.store_port = store_port
        self.groups = GroupBook(max_groups=4)
        self.files = 0

    async def call(self, members: list[int], **command: Any) -> list[rank_pb2.RankReply]:
        return list(
            await asyncio.gather(
                *(
                    self.workers[member].call(rank_pb2.RankCommand(**command), timeout_s=40)
                    for member in members
                )
            )
        )


@dataclass
class Policy:
    """One policy driven by hand: what the service does, without the service."""

    ranks: Ranks
    config: PolicyConfig
    model: Path
    members: list[int]
    seed: int = 3
    parameters: list[Any] = field(default_factory=list)
    published: list[Any] = field(default_factory=list)
    package: str = ""
    model_hash: str = ""

    async def bind(self, saved: rank_pb2.RankSaved | None = None) -> rank_pb2.RankBound:
        source: dict[str, Any] = (
            {"initial": rank_pb2.RankInitial(seed=self.seed)} if saved is None else {"saved": saved}
        )
        groups = self.ranks.groups
        alone = len(self.members) == 1
        prefix = "" if alone else groups.meet([str(member) for member in self.members])
        replies = await asyncio.gather(
            *(
                self.ranks.workers[member].call(
                    rank_pb2.RankCommand(
                        bind=rank_pb2.RankBind(
                            binding="run/policy",
                            policy_json=self.config.model_dump_json().encode(),
                            model_path=str(self.model),
                            model_hash=self.model_hash,
                            rank=rank,
                            members=self.members,
                            store_host="127.0.0.1",
                            store_port=self.ranks.store_port,
                            group_prefix=prefix,
                            kept_groups=groups.kept,
                            package_path=self.package,
                            reference=rank_pb2.RankInitial(seed=self.seed),
                            **source,
                        )
                    ),
                    timeout_s=40,
                )
                for rank, member in enumerate(self.members)
            )
        )
        self.parameters = list(replies[0].bound.parameters)
        self.published = list(replies[0].bound.published) or self.parameters
        return replies[0].bound

    async def add(self, rows: list[Row], name: str = "m", **more: Any) -> list[rank_pb2.RankAdded]:
        command = rank_pb2.RankGradients(**gradients_command(rows, name, **more))
        return [reply.added for reply in await self.ranks.call(self.members, gradients=command)]

    def segment(self, kind: str) -> rank_pb2.MappedSegment:
        layout = lay_out(
            segment_specs(
                kind,
                self.published if kind == "weights" else self.parameters,
                weights_dtype=self.config.rollout.dtype,
                world_size=len(self.members),
                moments=MOMENTS[self.config.optimizer.kind],
            )
        )
        self.ranks.files += 1
        path = self.ranks.folder / f"{kind}{self.ranks.files}"
        with path.open("wb") as file:
            file.truncate(layout.size_bytes)
        return rank_pb2.MappedSegment(
            kind=kind, key=str(path), path=str(path), buffers=layout.buffers, in_memory=True
        )

    async def export(self, *kinds: str) -> dict[str, rank_pb2.MappedSegment]:
        targets = {kind: self.segment(kind) for kind in kinds}
        await self.ranks.call(
            self.members, export=rank_pb2.RankExport(targets=list(targets.values()))
        )
        return targets

    async def apply(
        self,
        denominator: float,
        num_updates: int = 0,
        sources: Sequence[rank_pb2.MappedSegment] = (),
    ) -> tuple[dict[str, rank_pb2.MappedSegment], rank_pb2.RankWritten]:
        targets = {kind: self.segment(kind) for kind in ("weights", "master", "moments")}
        replies = await self.ranks.call(
            self.members,
            apply=rank_pb2.RankApply(
                denominator=denominator,
                num_updates=num_updates,
                targets=list(targets.values()),
                sources=sources,
            ),
        )
        return targets, replies[0].written

    async def unbind(self) -> list[rank_pb2.RankUnbound]:
        replies = await self.ranks.call(self.members, unbind=rank_pb2.RankUnbind())
        return [reply.unbound for reply in replies]


def saved(*segments: rank_pb2.MappedSegment) -> rank_pb2.RankSaved:
    by_kind = {segment.kind: segment for segment in segments}
    return rank_pb2.RankSaved(
        master_key=by_kind["master"].key,
        moments_key=by_kind["moments"].key,
        segments=list(segments),
    )


def read(segment: rank_pb2.MappedSegment) -> dict[str, np.ndarray]:
    """Full tensors by name, whatever ranks wrote them."""
    data = Path(segment.path).read_bytes()
    kinds = {"F32": "<f4", "F64": "<f8"}
    return {
        name: np.concatenate(
            [
                np.frombuffer(
                    data[part.offset : part.offset + part.size_bytes], kinds[part.dtype]
                ).reshape(tuple(part.shape))
                for part in parts
            ]
        )
        for name, parts in full_tensors(segment.buffers).items()
    }


def flat(segment: rank_pb2.MappedSegment) -> np.ndarray:
    return np.concatenate([value.ravel() for _, value in sorted(read(segment).items())])


@asynccontextmanager
async def start_ranks(count: int, folder: Path, *, device: str = "cpu") -> AsyncIterator[Ranks]:
    async with Children(
        preload=["flexmarl.trainer.rank.preload"], preload_env={"OMP_NUM_THREADS": "1"}
    ) as children:

        def spawner(position: int) -> Any:
            async def spawn() -> Any:
                return await children.spawn_preloaded(
                    "flexmarl.trainer.rank.main:run_rank",
                    {
                        "position": position,
                        "device": device if device == "cpu" else f"{device}:{position}",
                        "interface": "lo",
                        "threads": 1,
                        "timeout_s": 30,
                        "arena_bytes": 1 << 20,
                        "max_arena_bytes": 0,
                        "max_modules": 4,
                        "max_reference_bytes": 1 << 30,
                        "verify": True,
                        "warm": True,
                    },
                    name=f"rank{position}",
                )

            return spawn

        workers = [
            Worker(
                slot=f"slot{position}",
                position=position,
                spawn=spawner(position),
                warm_timeout_s=250,
                on_death=lambda _: None,
            )
            for position in range(count)
        ]
        tasks = [asyncio.create_task(worker.run()) for worker in workers]
        rendezvous = await children.spawn_preloaded(
            "flexmarl.trainer.rank.main:run_rendezvous", {"timeout_s": 30}, name="rendezvous"
        )
        frames = aiter(rendezvous.link)
        await anext(frames)
        await rendezvous.link.send(
            rank_pb2.RankCommand(
                command_id=1, serve_store=rank_pb2.RankServeStore(host="127.0.0.1")
            ).SerializeToString()
        )
        port = rank_pb2.RankReply.FromString(await anext(frames)).store_served.port
        for worker in workers:
            await worker.wait_ready(timeout_s=250)
        try:
            yield Ranks(workers, port, folder)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

"""Swaps of a 135M policy on two ranks: real workers and gloo, segment files in shared memory.

No store and no service: what is measured is the ranks' own part, beside copies of the same bytes by
as many processes, and beside gloo's own send and receive.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.report import Report
from benchmarks.shared_memory import shared_folder
from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.client.buffers import lay_out
from flexmarl.runtime.children import Children
from flexmarl.runtime.policy_config import PolicyConfig
from flexmarl.trainer.rank_group import RankGroup
from flexmarl.trainer.state_layout import segment_specs
from flexmarl.trainer.workers import RankProcess, Worker

RANKS = 2
ROUNDS = 20
SMOLLM_135M = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152,
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
KINDS = ("master", "moments")
_GIB = 1 << 30


def run(report: Report) -> None:
    """Measures first binding, binding again, and bytes per second of swaps."""
    measured = asyncio.run(_measure())
    report.figure(
        "trainer.rebind_overhead_s",
        statistics.median(measured["rebind"]),
        "s",
        against="nothing: no bytes move, state is where it was",
        bound="<= 0.05",
    )
    report.figure(
        "trainer.first_bind_s",
        measured["first"][0],
        "s",
        against=f"a fresh process to a warm worker, {measured['cold'][0]:.1f} s",
        bound="<= 0.3",
    )
    swap, floor = statistics.median(measured["swap"]), statistics.median(measured["copy"])
    report.figure(
        "trainer.swap_vs_memcpy",
        swap / floor,
        "ratio",
        against=f"copies by {RANKS} processes, {floor / _GIB:.2f} GiB/s; ours {swap / _GIB:.2f}",
        ratio=swap / floor,
        bound=">= 0.85",
    )
    gloo = measured["gloo"][0]
    moved = swap / 2  # out and in
    report.figure(
        "trainer.move_vs_gloo",
        moved / gloo,
        "ratio",
        against=f"gloo send and receive, {gloo / _GIB:.2f} GiB/s; ours {moved / _GIB:.2f}",
        ratio=moved / gloo,
        bound=">= 0.7",
    )


async def _measure() -> dict[str, list[float]]:
    measured: dict[str, list[float]] = {}
    with (
        shared_folder() as shm,
        tempfile.TemporaryDirectory(prefix="flexmarl-bench-") as scratch,
    ):
        (Path(scratch) / "config.json").write_text(json.dumps(SMOLLM_135M))
        started = time.perf_counter()
        async with _ranks() as (group, port):
            measured["cold"] = [time.perf_counter() - started]
            await _swaps(_Policy(group, port, Path(scratch), shm), measured)
        measured["gloo"] = [await asyncio.to_thread(_gloo_rate)]
    return measured


async def _swaps(policy: _Policy, measured: dict[str, list[float]]) -> None:
    await policy.bind("warm", None)
    files = await policy.export()
    await policy.unbind()
    measured["first"] = [(await policy.bind("first", files)).seconds["group"]]
    await policy.unbind()
    bytes_moved = sum(buffer.size_bytes for item in files for buffer in item.buffers)
    for name in ("rebind", "swap", "copy"):
        measured[name] = []
    for number in range(ROUNDS):
        await policy.bind("first", files)
        measured["rebind"].append(await _timed(policy.unbind_and_bind, files))
        out_s = await _timed(policy.export_into, files)
        await policy.unbind()
        renamed = policy.renamed(files, number)  # not found in place, so it is loaded
        in_s = (await policy.bind("first", renamed)).seconds["load"]
        await policy.unbind()
        measured["swap"].append(2 * bytes_moved / (out_s + in_s))
        if number % 5 == 0:
            measured["copy"].append(await asyncio.to_thread(_copy_rate, bytes_moved // RANKS))


class _Policy:
    def __init__(self, group: RankGroup, port: int, model: Path, shm: Path) -> None:
        self._group, self._port, self._model, self._shm = group, port, model, shm
        self._parameters: list[Any] = []

    async def bind(
        self, prefix: str, files: list[rank_pb2.MappedSegment] | None
    ) -> rank_pb2.RankBound:
        config = PolicyConfig.model_validate({"model": {"path": self._model, "init": "random"}})
        template = rank_pb2.RankBind(
            binding="bench/p",
            policy_json=config.model_dump_json().encode(),
            model_path=str(self._model),
            members=range(RANKS),
            store_host="127.0.0.1",
            store_port=self._port,
            group_prefix=prefix,
            kept_groups=[prefix],
        )
        if files is None:
            template.initial.seed = 1
        else:
            template.saved.CopyFrom(
                rank_pb2.RankSaved(
                    master_key=files[0].key, moments_key=files[1].key, segments=files
                )
            )
        commands = []
        for rank in range(RANKS):
            commands.append(rank_pb2.RankCommand(bind=template))
            commands[-1].bind.rank = rank
        replies = await self._group.each(commands)
        self._parameters = list(replies[0].bound.parameters)
        slowest = max(replies, key=lambda reply: sum(reply.bound.seconds.values()))
        return slowest.bound

    async def unbind(self) -> None:
        await self._group.command(rank_pb2.RankCommand(unbind=rank_pb2.RankUnbind()))

    async def unbind_and_bind(self, files: list[rank_pb2.MappedSegment]) -> None:
        await self.unbind()
        await self.bind("first", files)

    async def export(self) -> list[rank_pb2.MappedSegment]:
        files = []
        for kind in KINDS:
            layout = lay_out(
                segment_specs(kind, self._parameters, weights_dtype="float32", world_size=RANKS)
            )
            path = self._shm / kind
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, layout.size_bytes)  # as the store makes it
            files.append(
                rank_pb2.MappedSegment(
                    kind=kind,
                    key=kind,
                    path=str(path),
                    buffers=layout.buffers,
                    in_memory=True,
                )
            )
        await self.export_into(files)
        return files

    async def export_into(self, files: list[rank_pb2.MappedSegment]) -> None:
        await self._group.command(rank_pb2.RankCommand(export=rank_pb2.RankExport(targets=files)))

    def renamed(
        self, files: list[rank_pb2.MappedSegment], number: int
    ) -> list[rank_pb2.MappedSegment]:
        return [
            rank_pb2.MappedSegment(
                kind=item.kind,
                key=f"{item.key}{number}",
                path=item.path,
                buffers=item.buffers,
                in_memory=True,
            )
            for item in files
        ]


@contextlib.asynccontextmanager
async def _ranks() -> AsyncIterator[tuple[RankGroup, int]]:
    preload = ("flexmarl.trainer.rank.preload",)
    async with Children(preload=preload, preload_env={"OMP_NUM_THREADS": "1"}) as children:

        def spawner(position: int) -> Callable[[], Awaitable[RankProcess]]:
            async def spawn() -> RankProcess:
                return await children.spawn_preloaded(
                    "flexmarl.trainer.rank.main:run_rank",
                    {
                        "position": position, "device": "cpu", "interface": "lo", "threads": 1,
                        "timeout_s": 60, "arena_bytes": 1200 << 20, "max_arena_bytes": 0,
                        "max_modules": 4, "max_reference_bytes": 0, "verify": False, "warm": True,
                    },
                    name=f"rank{position}",
                )  # fmt: skip

            return spawn

        workers = [
            Worker(
                slot=f"slot{position}", position=position, spawn=spawner(position),
                warm_timeout_s=250, on_death=lambda _: None,
            )
            for position in range(RANKS)
        ]  # fmt: skip
        tasks = [asyncio.create_task(worker.run()) for worker in workers]
        try:
            for worker in workers:
                await worker.wait_ready(timeout_s=250)
            child = await children.spawn_preloaded(
                "flexmarl.trainer.rank.main:run_rendezvous", {"timeout_s": 60}, name="rendezvous"
            )
            frames = aiter(child.link)
            await anext(frames)
            serve = rank_pb2.RankServeStore(host="127.0.0.1")
            await child.link.send(
                rank_pb2.RankCommand(command_id=1, serve_store=serve).SerializeToString()
            )
            reply = rank_pb2.RankReply.FromString(await anext(frames))
            yield RankGroup(workers, command_timeout_s=120), reply.store_served.port
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _timed(work: Callable[[Any], Awaitable[None]], argument: Any) -> float:
    started = time.perf_counter()
    await work(argument)
    return time.perf_counter() - started


_COPY = """
import sys, time, numpy
a = numpy.ones(int(sys.argv[1]), dtype=numpy.uint8); b = numpy.ones_like(a)
sys.stdin.readline()
started = time.perf_counter()
for _ in range(2): numpy.copyto(b, a); numpy.copyto(a, b)
print(4 * len(a) / (time.perf_counter() - started))
"""

_GLOO = """
import datetime, os, sys, time, torch
import torch.distributed as dist
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
torch.set_num_threads(1)
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=60))
data = torch.ones(64 << 20, dtype=torch.uint8)
for number in range(9):
    if number == 1: started = time.perf_counter()
    dist.send(data, 1) if rank == 0 else dist.recv(data, 0)
dist.barrier()
print(8 * len(data) / (time.perf_counter() - started))
"""


def _copy_rate(size_bytes: int) -> float:
    """Bytes per second of warm copies by as many processes as ranks, side by side."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _COPY, str(size_bytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(RANKS)
    ]  # fmt: skip
    time.sleep(1.5)  # both have touched their memory
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return sum(float(process.communicate(timeout=60)[0]) for process in processes)


def _gloo_rate() -> float:
    with tempfile.TemporaryDirectory(prefix="flexmarl-bench-") as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", _GLOO, str(rank), f"{folder}/meeting"],
                stdout=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        rates = [float(process.communicate(timeout=120)[0]) for process in processes]
    return min(rates)

"""Training tokens per second on a real model, SmolLM2-135M in float32, against a plain loop.

Both train the same number of rows of 256 tokens in micro-batches of 16, in turns, with one thread
each: the trainer from the first ComputeGradients to the end of ApplyUpdate, its rows in the store;
the loop in one process, with forward, backward, clip and AdamW. The loop computes logits of the
responses only, too.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.report import Report
from benchmarks.trainer import Team, Work, services
from scripts.peak_memory import PeakMemory, own_bytes

MODEL = Path(__file__).parents[1] / "models/cache/smollm2-135m-instruct"
MICRO_BATCHES, ROWS = 4, 16
WORK = Work(
    policy={
        "model": {"path": str(MODEL)},
        "trainer": {"max_tokens_per_pass": 4096},
        "optimizer": {"lr": 1e-5},
    },
    rows=MICRO_BATCHES * ROWS,
    micro_batches=MICRO_BATCHES,
    prompt=128,
    response=128,
    vocab=49152,
)


SMALL = replace(WORK, policy={**WORK.policy, "trainer": {}}, rows=8, micro_batches=1)


def run(report: Report) -> None:
    """Measures one version of 64 rows, and the memory that one of 8 rows takes."""
    if not MODEL.is_dir():
        report.note(f"trainer.tokens_vs_plain_loop: {MODEL} is not there; see docs/gsm8k.md")
        return
    peak = asyncio.run(_peak_bytes())
    report.figure(
        "trainer.micro_batch_8x256_gib",
        peak / (1 << 30),
        "GiB",
        against="largest size of the rank's process without what it maps, first bind and update "
        "included; no setting changed",
        bound="<= 4",
    )
    ours_s, plain_s = asyncio.run(_measure())
    tokens = WORK.rows * (WORK.prompt + WORK.response)
    report.figure(
        "trainer.tokens_vs_plain_loop",
        plain_s / ours_s,
        "ratio",
        against=f"{tokens / plain_s:,.0f} tokens/s; ours {tokens / ours_s:,.0f}",
        ratio=plain_s / ours_s,
        bound=">= 0.95",
    )


async def _measure() -> tuple[float, float]:
    loop = _PlainLoop()
    loop.part(rows=1)  # both have warmed up when it counts
    loop.spent = 0.0
    with tempfile.TemporaryDirectory(prefix="flexmarl-bench-") as scratch:
        async with services(Path(scratch), "threads_per_rank=1") as (store, trainer):
            team = Team(store, trainer, WORK)
            await team.open()
            parts: list[Callable[[], None]] = [loop.part] * MICRO_BATCHES + [loop.step]
            # In turns: the loop's part comes right before ours, on the same machine.
            seconds = await team.version(0, lambda: parts.pop(0)())
    return seconds["gradients"] + seconds["apply"], loop.spent


async def _peak_bytes() -> int:
    with tempfile.TemporaryDirectory(prefix="flexmarl-bench-") as scratch:
        async with services(Path(scratch), "threads_per_rank=1") as (store, trainer):
            team = Team(store, trainer, SMALL)
            (slot,) = (await trainer.get_status()).slots
            with PeakMemory(slot.pid, size=own_bytes, interval_s=0.02) as memory:
                await team.open()
                await team.version(0)
            return memory.peak_bytes


class _PlainLoop:
    """What one would write without all this."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(
            MODEL, dtype=torch.float32, local_files_only=True
        )
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5, fused=True)
        self.spent = 0.0

    def part(self, rows: int = ROWS) -> None:
        """Forward and backward of a micro-batch."""
        torch, response = self._torch, WORK.response
        tokens = torch.randint(0, WORK.vocab, (rows, WORK.prompt + response))
        advantage = torch.rand(rows, 1)
        started = time.perf_counter()
        logits = self._model(input_ids=tokens, use_cache=False, logits_to_keep=response + 1).logits
        logs = torch.log_softmax(logits[:, :-1], -1)
        chosen = logs.gather(-1, tokens[:, -response:, None])[..., 0]
        ratio = (chosen - chosen.detach()).exp()
        torch.autograd.backward(-(ratio * advantage).sum() / (WORK.rows * response))
        self.spent += time.perf_counter() - started

    def step(self) -> None:
        """The update."""
        started = time.perf_counter()
        self._torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.spent += time.perf_counter() - started

"""TRL's GRPO step on the quickstart's policy, less its generation: a peer to compare with.

TRL is no dependency of this project. Where it is installed (`pip install trl datasets`), its
trainer makes steps of as many rows as ours, on one thread, without a divergence, its rewards drawn;
what its generation takes is measured inside and taken off. What is left is scoring, loss, backward,
clip and AdamW in one process. It is a process of its own that makes a step when it is told to, so
that its steps and ours come in turns on the same machine.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

GENERATIONS = 8


def is_installed() -> bool:
    """Whether TRL and what its trainer needs are there."""
    return all(importlib.util.find_spec(name) for name in ("trl", "datasets", "accelerate"))


@contextlib.contextmanager
def peer(*, model: str, steps: int, rows: int, prompt: int, response: int) -> Iterator[Peer]:
    """Starts TRL; it makes as many steps as were said, each when it is asked for.

    Args:
        model: Folder of the model and its tokenizer.
        steps: Steps.
        rows: Completions per step.
        prompt: Letters per prompt; each prompt is completed eight times.
        response: Tokens per completion.
    """
    arguments = [model, *(str(number) for number in (steps, rows, prompt, response))]
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.trainer_trl", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        try:
            yield Peer(process)
        finally:
            process.kill()


class Peer:
    """The process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        self._asked, self._told = process.stdin, process.stdout

    def step(self) -> float:
        """Has it make a step; returns the seconds of it, less its generation."""
        self._asked.write("step\n")
        self._asked.flush()
        return float(self._told.readline())


def train(model: str, *, steps: int, rows: int, prompt: int, response: int, out: TextIO) -> None:
    """What the process does: a step per line that comes in, its seconds to `out`."""
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports] - optional
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports] - optional

    torch.set_num_threads(1)
    rng = random.Random(0)
    clock = _Clock()

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            sys.stdin.readline()
            clock.restart()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            print(clock.rest(), file=out, flush=True)

    tokenizer = AutoTokenizer.from_pretrained(model)
    config = AutoConfig.from_pretrained(model)
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    prompts = ["".join(rng.choice("0123") for _ in range(prompt)) for _ in range(rows)]
    with tempfile.TemporaryDirectory(prefix="flexmarl-bench-") as scratch:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_config(config),  # type: ignore[no-untyped-call]
            processing_class=tokenizer,
            reward_funcs=lambda completions, **_: [rng.random() for _ in completions],
            train_dataset=Dataset.from_list([{"prompt": text} for text in prompts]),
            callbacks=[Steps()],
            args=GRPOConfig(
                output_dir=scratch,
                per_device_train_batch_size=rows,
                num_generations=GENERATIONS,
                max_completion_length=response,
                learning_rate=3e-3,
                max_steps=steps,
                beta=0.0,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
            ),
        )
        trainer._generate = clock.aside(trainer._generate)
        trainer.train()


class _Clock:
    """Time since a start, less what was set aside."""

    def __init__(self) -> None:
        self._started = self._aside = 0.0

    def restart(self) -> None:
        self._started, self._aside = time.perf_counter(), 0.0

    def rest(self) -> float:
        return time.perf_counter() - self._started - self._aside

    def aside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Has the time of this function set aside."""

        def timed(*args: Any, **more: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **more)
            finally:
                self._aside += time.perf_counter() - started

        return timed


if __name__ == "__main__":
    folder, *numbers = sys.argv[1:]
    told = sys.stdout
    # The libraries print, too.
    with contextlib.redirect_stdout(sys.stderr):
        train(
            folder,
            **dict(zip(("steps", "rows", "prompt", "response"), map(int, numbers), strict=True)),
            out=told,
        )

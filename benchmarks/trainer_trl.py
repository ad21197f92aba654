"""TRL's GRPO step on the quickstart's policy, less its generation: a peer to compare with.

TRL is no dependency of this project. Where it is installed (`pip install trl datasets`), its
trainer makes steps of as many rows as ours, on one thread, without a divergence, its rewards drawn;
what its generation takes is measured inside and taken off. What is left is scoring, loss, backward,
clip and AdamW in one process.
"""

from __future__ import annotations

import importlib.util
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

STEPS = 10
GENERATIONS = 8


def is_installed() -> bool:
    """Whether TRL and what its trainer needs are there."""
    return all(importlib.util.find_spec(name) for name in ("trl", "datasets", "accelerate"))


def step_seconds(model: str, *, rows: int, prompts: list[str], response: int) -> float:
    """Returns the median of a step less its generation.

    Args:
        model: Folder of the model and its tokenizer.
        rows: Completions per step.
        prompts: Prompts; each is completed eight times.
        response: Tokens per completion.
    """
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports] - optional
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports] - optional

    torch.set_num_threads(1)
    rng = random.Random(0)
    seconds: list[float] = []
    clock = _Clock()

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.restart()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(clock.rest())

    tokenizer = AutoTokenizer.from_pretrained(model)
    config = AutoConfig.from_pretrained(model)
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
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
                max_steps=STEPS,
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
    return statistics.median(seconds[2:])  # the first ones warm up


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

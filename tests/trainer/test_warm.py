"""A worker is warmed by what it will do, not by something like it."""

from __future__ import annotations

import subprocess
import sys

WARM_AND_SAY = """
import torch
from flexmarl.trainer.rank import gradients, warm
from flexmarl.trainer.rank.groups import join_numbering
from flexmarl.trainer.rank.memory import DeviceMemory

add, added = gradients.add_micro_batch, []

def add_and_note(*args, **named):
    added.append(add(*args, **named))
    return added[-1]

warm.add_micro_batch = add_and_note
cpu = torch.device("cpu")
join_numbering(0, interface="lo")
memory = DeviceMemory(size_bytes=1 << 20, max_bytes=0, device=cpu)
warm.warm(position=0, device=cpu, memory=memory, timeout_s=20)
for stats in added:
    print(stats.finite, stats.num_tokens, stats.sums["loss"] != 0.0)
print(memory.used_bytes)
"""
"""A process numbers itself once, so this has one of its own."""


def test_a_worker_adds_micro_batches_as_work_does_and_leaves_nothing_in_use() -> None:
    said = subprocess.run(
        [sys.executable, "-c", WARM_AND_SAY], capture_output=True, text=True, check=True, timeout=50
    )
    assert said.stdout.splitlines() == ["True 5 True", "True 5 True", "0"]

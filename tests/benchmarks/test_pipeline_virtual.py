"""The pipeline's decisions over devices that take modelled time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.pipeline_modes import Emulation
from benchmarks.pipeline_parts import Span, parts
from benchmarks.pipeline_virtual import VirtualRun
from flexmarl.core.ideal_schedule import Mode, ideal_steps, mean_step_s
from flexmarl.core.workload import parse_workload

SECOND_S = 0.05
GROUPS, SAMPLES, BATCHES = 3, 3, 2


def call(number: int, agent: str, *after: int, output: int) -> dict[str, Any]:
    return {
        "id": number,
        "agent": agent,
        "after": list(after),
        "prompt_tokens": 80,
        "output_tokens": output,
        "tool_s": 0.5,
    }


def document() -> dict[str, Any]:
    """A planner, then two solvers side by side, which get most of the work."""

    def sample(length: int) -> list[dict[str, Any]]:
        return [
            call(0, "planner", output=20),
            call(1, "solver", 0, output=100 + length),
            call(2, "solver", 0, output=200 + length),
        ]

    batches = [
        [[sample(20 * g + 5 * s + b) for s in range(SAMPLES)] for g in range(GROUPS)]
        for b in range(BATCHES)
    ]
    return {
        "name": "small",
        "micro_batch_rows": 4,
        "policies": {"planner": {"params_b": 1}, "solver": {"params_b": 1}},
        "agents": {"planner": "planner", "solver": "solver"},
        "pools": {"rollout_instances": 4, "trainer_units": 2, "colocated_groups": 4},
        "engine": {
            "max_concurrency": 2,
            "prefill_tokens_per_s": 8000,
            "decode_tokens_per_s": {"planner": 40, "solver": 40},
        },
        "trainer": {
            "tokens_per_s_per_unit": {"planner": 300, "solver": 300},
            "scaling_efficiency": 0.9,
            "apply_s_per_b": 0.07,
            "publish_and_load_s_per_b": 0.14,
            "swap_out_s_per_b": 0.12,
            "swap_in_s_per_b": 0.22,
            "colocated_switch_s_per_b": 0.34,
        },
        "moving_an_instance_s_per_b": 0.14,
        "batches": batches,
    }


def run(tmp_path: Path, mode: Mode) -> tuple[VirtualRun, float]:
    """A finished run, and how many times its bound it took."""
    workload = parse_workload(document())
    emulation = Emulation(document=document(), workload=workload, second_s=SECOND_S)
    virtual = VirtualRun(emulation, mode, tmp_path)
    return virtual, virtual.run() / mean_step_s(ideal_steps(workload, mode))


@pytest.mark.parametrize("mode", [Mode.FULL, Mode.NO_BALANCE, Mode.NO_ASYNC, Mode.NO_ALLOC])
def test_no_run_is_faster_than_its_bound(tmp_path, mode: Mode):
    virtual, ratio = run(tmp_path, mode)
    assert 1.0 <= ratio < 2.0
    served = [span for span in virtual.spans if span.kind == "request"]
    assert len(served) >= BATCHES * GROUPS * SAMPLES * 3
    moved = any(span.kind == "move" for span in virtual.spans)
    assert moved == (mode is not Mode.NO_BALANCE)


def test_the_same_run_decides_the_same(tmp_path):
    (tmp_path / "again").mkdir()
    assert run(tmp_path, Mode.FULL)[0].spans == run(tmp_path / "again", Mode.FULL)[0].spans


def test_parts_say_what_a_step_went_to():
    spans = [
        Span("request", "solver", 0.0, 4.0),
        Span("request", "solver", 3.0, 12.0),  # 7 s of it in the first batch
        Span("wait", "solver", 1.0, 3.0),
        Span("load", "solver", 8.0, 10.0),
        Span("move", "planner to solver", 5.0, 6.0),
        Span("close", "", 6.0, 6.5),
        Span("train", "solver gradients", 5.0, 10.0),
    ]
    lines = list(parts(spans, [0.0, 10.0], num_instances=2, max_concurrency=1, num_slots=1))
    assert lines == [
        "batch 0: 10.0 s; groups close at 6",
        "  instances: 55% of 2 places serve (solver 11 s), last at 10 s; 10% load",
        "  calls wait: solver 2.0 s",
        "  moves: planner to solver 1",
        "  slots: 50% of 1 busy (solver gradients 5 s)",
    ]

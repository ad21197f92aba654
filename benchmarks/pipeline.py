"""The pipeline's step time, part by part: the real four services, emulated devices.

Two workloads, seven modes of the same system (`core.ideal_schedule.Mode`); engines and trainer
units take modelled time, everything else is real. Each step stands beside the bound of its mode, an
ideal schedule of the same work under the same rules.

FLEXMARL_WORKLOADS   folder of ma.json and ca.json
FLEXMARL_MODES       modes to run, by default all; `full` is needed for speed-ups
FLEXMARL_SECOND_MS   wall milliseconds of an emulated second, by default 100
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from benchmarks.pipeline_modes import Emulation, num_slots
from benchmarks.pipeline_parts import parts
from benchmarks.pipeline_run import Measured, measure
from benchmarks.report import Report
from flexmarl.core.ideal_schedule import MODES, Mode, StepBound, ideal_steps, mean_step_s
from flexmarl.core.workload import calls_of

WORKLOADS: Final = Path(__file__).parents[2] / "shared/workloads"
NAMES: Final = ("ma", "ca")
PAPER: Final[Mapping[str, Mapping[Mode, float]]] = {
    "ma": {Mode.MAS_RL: 7.3, Mode.DISTRL: 2.3, Mode.MARTI: 1.4, Mode.NO_ASYNC: 2.03},
    "ca": {Mode.MAS_RL: 5.6, Mode.DISTRL: 1.6, Mode.MARTI: 1.4, Mode.NO_ASYNC: 1.58},
}
"""Speed-ups that arXiv 2602.09578 reports on its own devices and workloads."""

WITHIN: Final = 1.25
"""A step may be so many times its bound."""
OF_BOUNDS: Final = 0.85
"""A speed-up shall be at least this part of the ratio of the modes' bounds."""


def run(report: Report) -> None:
    """Measures the chosen modes on the chosen workloads."""
    folder = Path(os.environ.get("FLEXMARL_WORKLOADS", WORKLOADS))
    modes = [Mode(name) for name in os.environ.get("FLEXMARL_MODES", "").split(",") if name]
    second_s = float(os.environ.get("FLEXMARL_SECOND_MS", "100")) / 1e3
    load = os.getloadavg()[0]
    report.note(
        f"an emulated second is {second_s * 1e3:g} ms; load average {load:.1f} at the start"
    )
    for name in NAMES:
        path = folder / f"{name}.json"
        if not path.is_file():
            report.note(f"pipeline.{name}: no {path}; set FLEXMARL_WORKLOADS")
            continue
        _measure(report, Emulation.read(path, second_s=second_s), modes or list(Mode))


def _measure(report: Report, emulation: Emulation, modes: list[Mode]) -> None:
    name = emulation.workload.name
    bounds = {mode: ideal_steps(emulation.workload, mode) for mode in modes}
    steps: dict[Mode, float] = {}
    for mode in modes:
        report.progress(f"pipeline: {name}, {mode.value}")
        measured = asyncio.run(measure(emulation, mode))
        steps[mode] = measured.step_s
        bound = mean_step_s(bounds[mode])
        report.figure(
            f"pipeline.{name}.step_s.{mode.value}",
            steps[mode],
            "emulated s",
            against=f"bound of {mode.value} {bound:.1f} s",
            ratio=steps[mode] / bound,
            bound=f"<= {WITHIN} x" if mode is Mode.FULL else "",
        )
        _explain(report, emulation, mode, measured)
    if Mode.FULL in steps:
        _compare(report, emulation, steps, bounds)


def _explain(report: Report, emulation: Emulation, mode: Mode, measured: Measured) -> None:
    """Says where the time went, and what the services themselves took of the machine."""
    pools, colocated = emulation.workload.pools, MODES[mode].colocated
    lines = parts(
        measured.spans,
        measured.edges,
        num_instances=pools.colocated_groups if colocated else pools.rollout_instances,
        max_concurrency=pools.max_concurrency,
        num_slots=num_slots(emulation, mode),
    )
    report.note(
        f"{emulation.workload.name} {mode.value}: the services took {measured.cores:.2f} cores"
    )
    for line in lines:
        report.note(line)


def _compare(
    report: Report,
    emulation: Emulation,
    steps: Mapping[Mode, float],
    bounds: Mapping[Mode, tuple[StepBound, ...]],
) -> None:
    name, full = emulation.workload.name, steps[Mode.FULL]
    ideal = mean_step_s(bounds[Mode.FULL])
    report.figure(f"pipeline.{name}.step_vs_bound", full / ideal, "ratio", bound=f"<= {WITHIN}")
    for number, bound in enumerate(bounds[Mode.FULL]):
        report.note(
            f"{name} batch {number}: bound {bound.step_s:.0f} s, longest chain "
            f"{bound.longest_chain_s:.0f} s, work / capacity {bound.work_over_capacity_s:.0f} s"
        )
    for mode, step in steps.items():
        if mode is Mode.FULL:
            continue
        of_bounds = mean_step_s(bounds[mode]) / ideal
        paper = PAPER[name].get(mode)
        beside = "" if paper is None else f", paper {paper}"
        report.figure(
            f"pipeline.{name}.speedup_vs_{mode.value}",
            step / full,
            "ratio",
            against=f"ratio of the bounds {of_bounds:.2f}{beside}",
            ratio=step / full / of_bounds,
            bound=f">= {OF_BOUNDS} of it",
        )
    for mode, step in steps.items():
        share = _work_s(emulation) / (emulation.workload.pools.colocated_groups * step)
        report.figure(f"pipeline.{name}.utilisation.{mode.value}", share, "ratio")


def _work_s(emulation: Emulation) -> float:
    """Device time of a mean batch: calls by their part of an instance, and gradients."""
    workload = emulation.workload
    calls = [call for batch in workload.batches for call in calls_of(batch)]
    concurrency = workload.pools.max_concurrency
    total = sum(call.engine_s / concurrency + call.unit_s for call in calls)
    return total / len(workload.batches)

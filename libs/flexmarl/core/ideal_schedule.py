"""The time that a step cannot well fall below: an ideal schedule of a workload, per mode.

    rollout    slots serve calls without a moment's loss: oldest group first, then longest
               remaining path, with the true lengths known
    training   a group's rows come free at its close and are trained in that order, as if work
               could be divided at will: no swaps, no scaling loss, no micro-batches
    update     apply, publish, load

Batch follows batch. A mode changes the rules: which slots serve which policy, whether training
waits for the whole batch, who has which units, and whether both share their devices. The ratio of
two modes' bounds says what a rule is worth on the workload at the most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heappop, heappush

from flexmarl.core.workload import Batch, Sample, Workload, calls_of, levels, remaining_paths


class Mode(Enum):
    """A system on the workload: ours, ours without one part, or a simpler kind of system."""

    FULL = "full"
    NO_BALANCE = "no_balance"
    NO_ASYNC = "no_async"
    NO_ALLOC = "no_alloc"
    MAS_RL = "mas_rl"
    DISTRL = "distrl"
    MARTI = "marti"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeRules:
    """What a mode may do.

    Attributes:
        balances: Instances serve whatever policy has work; else each policy has its share.
        overlaps: Groups are trained as they close; else when the whole batch is there.
        allocates: Units train whatever policy has rows; else each policy has its share.
        colocated: Rollout and training have the same devices in turn.
        serial: One query after another, level by level, one policy at a time on all devices.
    """

    balances: bool = True
    overlaps: bool = True
    allocates: bool = True
    colocated: bool = False
    serial: bool = False


MODES: Mapping[Mode, ModeRules] = {
    Mode.FULL: ModeRules(),
    Mode.NO_BALANCE: ModeRules(balances=False),
    Mode.NO_ASYNC: ModeRules(overlaps=False),
    Mode.NO_ALLOC: ModeRules(allocates=False),
    Mode.MAS_RL: ModeRules(
        balances=False, overlaps=False, allocates=False, colocated=True, serial=True
    ),
    Mode.DISTRL: ModeRules(balances=False, overlaps=False, allocates=False),
    Mode.MARTI: ModeRules(balances=False, overlaps=False, allocates=False, colocated=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBound:
    """The ideal schedule of one batch, in seconds.

    Attributes:
        rollout_s: Until the last group closes.
        step_s: Until the next version is loaded.
        longest_chain_s: Longest chain of calls: no rollout is shorter on any number of devices.
        work_over_capacity_s: Time of all calls over all slots: none is shorter on these.
    """

    rollout_s: float
    step_s: float
    longest_chain_s: float
    work_over_capacity_s: float


def ideal_steps(workload: Workload, mode: Mode) -> tuple[StepBound, ...]:
    """The bound of each batch under a mode's rules."""
    return tuple(_step(workload, batch, MODES[mode]) for batch in workload.batches)


def mean_step_s(steps: Sequence[StepBound]) -> float:
    """Mean time of a step, in seconds."""
    return sum(step.step_s for step in steps) / len(steps)


def _step(workload: Workload, batch: Batch, rules: ModeRules) -> StepBound:
    pools = workload.pools
    instances = pools.colocated_groups if rules.colocated else pools.rollout_instances
    slots = instances * pools.max_concurrency
    if rules.serial:
        rollout_s = _serial_rollout_s(workload, batch, slots=slots)
        closes = [rollout_s] * len(batch)
    elif rules.balances:
        closes = _closes(batch, {"": slots}, dict.fromkeys(workload.policies, ""))
    else:
        share = instances // len(workload.policies) * pools.max_concurrency
        own = {policy: policy for policy in workload.policies}
        closes = _closes(batch, dict.fromkeys(workload.policies, share), own)
    rollout_s = max(closes)
    begin_s = rollout_s
    if rules.colocated:
        begin_s += sum(costs.switch_s for costs in workload.policies.values()) / 2
    released = closes if rules.overlaps else [begin_s] * len(batch)
    end_s = _trained_s(workload, batch, released, rules)
    return StepBound(
        rollout_s=rollout_s,
        step_s=end_s + (begin_s - rollout_s),
        longest_chain_s=max(max(remaining_paths(sample)) for group in batch for sample in group),
        work_over_capacity_s=sum(call.engine_s for call in calls_of(batch)) / slots,
    )


# Rollout


@dataclass(slots=True)
class _Running:
    """A sample in progress: how many calls each call still waits for, and the way behind it."""

    sample: Sample
    group: int
    missing: list[int]
    paths: list[float]


def _closes(batch: Batch, slots: Mapping[str, int], pool_of: Mapping[str, str]) -> list[float]:
    """When each group closes, if calls are served by the slots of their policy's pool."""
    samples = [
        _Running(sample, number, [len(call.after) for call in sample], remaining_paths(sample))
        for number, group in enumerate(batch)
        for sample in group
    ]
    ready: dict[str, list[tuple[int, float, int, int]]] = {pool: [] for pool in slots}
    free = dict(slots)
    running: list[tuple[float, int, int, str]] = []
    closes = [0.0] * len(batch)

    def add(number: int, places: Iterable[int]) -> None:
        state = samples[number]
        for place in places:
            pool = pool_of[state.sample[place].policy]
            heappush(ready[pool], (state.group, -state.paths[place], number, place))

    for number, state in enumerate(samples):
        add(number, (place for place, count in enumerate(state.missing) if count == 0))
    now = 0.0
    while True:
        for pool, waiting in ready.items():
            while waiting and free[pool]:
                _, _, number, place = heappop(waiting)
                free[pool] -= 1
                end = now + samples[number].sample[place].engine_s
                heappush(running, (end, number, place, pool))
        if not running:
            return closes
        now, number, place, pool = heappop(running)
        free[pool] += 1
        state = samples[number]
        closes[state.group] = now
        add(number, _unblocked(state, place))


def _unblocked(state: _Running, place: int) -> Iterator[int]:
    for later, call in enumerate(state.sample):
        if place in call.after:
            state.missing[later] -= 1
            if not state.missing[later]:
                yield later


def _serial_rollout_s(workload: Workload, batch: Batch, *, slots: int) -> float:
    """Query after query, level by level; each change of policy costs half of its switch."""
    now, bound = 0.0, ""
    for group in batch:
        by_level: dict[tuple[int, str], list[float]] = {}
        for sample in group:
            for level, call in zip(levels(sample), sample, strict=True):
                by_level.setdefault((level, call.policy), []).append(call.engine_s)
        for level in range(1 + max(level for level, _ in by_level)):
            # Who is bound goes first: that saves a change.
            names = sorted(
                (name for at, name in by_level if at == level),
                key=lambda name: (name != bound, name),
            )
            for name in names:
                if bound not in ("", name):
                    now += workload.policies[name].switch_s / 2
                bound = name
                now += _makespan_s(by_level[level, name], slots=slots)
    return now


def _makespan_s(times: list[float], *, slots: int) -> float:
    ends = [0.0] * slots
    for time in sorted(times, reverse=True):
        heappush(ends, heappop(ends) + time)
    return max(ends)


# Training


def _trained_s(
    workload: Workload, batch: Batch, released: Sequence[float], rules: ModeRules
) -> float:
    """When the next version is loaded, if the groups' rows come free at these times."""
    pools, costs = workload.pools, workload.policies
    units = pools.colocated_groups if rules.colocated else pools.trainer_units
    work = {
        name: [
            sum(call.unit_s for sample in group for call in sample if call.policy == name)
            for group in batch
        ]
        for name in costs
    }
    if rules.allocates:
        total = [sum(of_group) for of_group in zip(*work.values(), strict=True)]
        return _fluid_s(released, total, units=units) + max(c.update_s for c in costs.values())
    # A share that is no whole number of units does not occur: the pools are multiples.
    share = units // len(costs) if rules.colocated else 1
    return max(
        _fluid_s(released, work[name], units=share) + costs[name].update_s
        for name in costs
        if any(work[name])
    )


def _fluid_s(released: Sequence[float], work: Sequence[float], *, units: int) -> float:
    now = 0.0
    for at, unit_s in sorted(zip(released, work, strict=True)):
        now = max(now, at) + unit_s / units
    return now

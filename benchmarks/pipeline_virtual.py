"""A workload's run in virtual time: the core's own decisions, and nothing that services cost.

The same `RunCore`, `Dispatcher`, `Balancer` and allocation that the services drive, over devices
that take modelled time. What it takes beyond the bound is the price of the decisions; what the
services take beyond it is their own.

    python -m benchmarks.pipeline_virtual ma full
"""

from __future__ import annotations

import itertools
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from typing import Any, Final

from benchmarks.pipeline_modes import Emulation, num_slots, run_config
from benchmarks.pipeline_parts import Kind, Span, parts
from flexmarl.core.balance import Balancer, Move
from flexmarl.core.balance_monitor import Monitor, MoveCosts
from flexmarl.core.dataset_order import DatasetOrder
from flexmarl.core.dispatch import Dispatcher
from flexmarl.core.dispatch_events import (
    Abort,
    Accept,
    AttemptAborted,
    AttemptSucceeded,
    DispatchConfig,
    InstanceChanged,
    InstanceUse,
    InstanceVacating,
    Keep,
    SampleEnded,
    Send,
    Vacated,
    VertexReady,
    WeightsKnown,
)
from flexmarl.core.dispatch_events import Event as DispatchEvent
from flexmarl.core.forecast import forecast_moves
from flexmarl.core.ideal_schedule import MODES, Mode, ideal_steps, mean_step_s
from flexmarl.core.ids import SampleId
from flexmarl.core.run import RunCore
from flexmarl.core.run_effects import (
    ActivateVersion,
    AdmitGroups,
    Apply,
    Bind,
    CloseGroup,
    Commit,
    Compute,
    CountVertices,
    CreateMicroBatch,
    EndRun,
    OpenTrainer,
    PrepareWeights,
    ReadRows,
    SaveGradients,
    SetTimer,
    StartSamples,
    Suspend,
    Work,
)
from flexmarl.core.run_events import (
    Computed,
    Counted,
    EffectDone,
    Event,
    Result,
    RowsRead,
    SampleChanged,
    StateFact,
    StateSaved,
    StoredRun,
    TimerFired,
    TrainerOpened,
)
from flexmarl.core.states import SampleStatus
from flexmarl.core.training_rows import Rewards, Row, SampleFact
from flexmarl.core.weight_loads import InstanceWeights, decide_loads
from flexmarl.orchestrator.rules import rules_of
from flexmarl.rollout.dispatcher.mover import FORECAST_GAIN
from flexmarl.runtime.run_config import RunConfig

_TRAINER: Final = "trainer"


@dataclass(slots=True)
class _Request:
    vertex_id: str
    attempt_id: str
    since: float
    first_at: float
    token_s: float
    num_tokens: int

    @property
    def ends_at(self) -> float:
        return self.first_at + self.num_tokens * self.token_s


@dataclass(slots=True)
class _Instance:
    name: str
    policy: str
    capacity: int
    version: int | None = None
    held_policy: str = ""
    weights_hash: str = ""
    requested: tuple[int, str] | None = None
    running: dict[str, _Request] = field(default_factory=dict)


@dataclass(slots=True)
class _Vertex:
    sample: str
    call: Mapping[str, Any]
    since: float


@dataclass(slots=True)
class _Sample:
    sample_id: SampleId
    calls: list[Mapping[str, Any]]
    missing: dict[int, int]
    left: int
    rows: list[Row] = field(default_factory=list)


class VirtualRun:
    """See the module.

    Args:
        emulation: Workload and length of its second.
        mode: Rules.
        folder: Where the run's files may be written.
    """

    def __init__(self, emulation: Emulation, mode: Mode, folder: Path) -> None:
        self.now = 0.0
        self.spans: list[Span] = []
        self.commits: list[float] = []
        self._emulation = emulation
        self._scale = emulation.second_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._config: RunConfig = run_config(emulation, mode, folder)
        self._sim = self._config.policies
        rules = rules_of(self._config, trainers=(_TRAINER,))
        batches = emulation.document["batches"]
        num_queries = sum(map(len, batches)) + len(batches[0])
        self._core = RunCore(rules, DatasetOrder(num_queries, seed=0, shuffle=False), StoredRun())
        self._slots: dict[str, str] = {f"slot{i}": "" for i in range(num_slots(emulation, mode))}
        self._held: dict[int, tuple[str, ...]] = {}
        self._states = {name: StateFact(version=0) for name in self._config.policies}
        self._ledgers: dict[str, set[str]] = {name: set() for name in self._config.policies}
        self._records: dict[str, CreateMicroBatch] = {}
        self._group_query: dict[str, int] = {}
        self._taken: Counter[str] = Counter()
        self._samples: dict[str, _Sample] = {}
        self._ended: dict[str, _Sample] = {}
        self._vertices: dict[str, _Vertex] = {}
        self._open: Counter[int] = Counter()
        self._weights: dict[tuple[str, int], str] = {}
        self._version = -1
        self._set_up_rollout()

    def _set_up_rollout(self) -> None:
        config = self._config
        self._dispatcher = Dispatcher(DispatchConfig(), Random(0))
        self._instances = {
            f"{name}-{ordinal}": _Instance(
                f"{name}-{ordinal}", name, policy.rollout.max_concurrency
            )
            for name, policy in config.policies.items()
            for ordinal in range(policy.rollout.instances)
        }
        self._balancer = Balancer(config.rollout.balance.decisions())
        self._costs = MoveCosts()
        self._monitor = Monitor(
            dict.fromkeys(config.policies, "base"), book=self._dispatcher.book, costs=self._costs
        )
        self._moving: dict[str, tuple[Move, float]] = {}
        for instance in self._instances.values():
            self._tell_instance(instance)

    # Time.

    def run(self) -> float:
        """Runs to the end.

        Returns:
            Emulated seconds per step, as `pipeline_run.step_s` measures them.
        """
        num_batches = len(self._emulation.workload.batches)
        self._begun = math.inf
        self._at(0.0, self._feed)
        if self._config.rollout.balance.rule != "off":
            self._at(0.0, self._look)
        while True:
            self.now, _, act = heappop(self._events)
            act()
            if self._serves(num_batches):
                break
        return (self.now - self._begun) / num_batches / self._scale

    def _at(self, delay_s: float, act: Callable[[], None]) -> None:
        heappush(self._events, (self.now + delay_s, next(self._number), act))

    def _serves(self, version: int) -> bool:
        serving = {i.policy for i in self._instances.values() if (i.version or -1) >= version}
        return serving == set(self._config.policies) and self._version >= version

    def _span(self, kind: Kind, name: str, since: float) -> None:
        self.spans.append(Span(kind, name, since / self._scale, self.now / self._scale))

    # The orchestrator.

    def _feed(self, *events: Event) -> None:
        for effect in self._core.handle(events, now=self.now):
            if isinstance(effect, SetTimer):
                self._at(
                    max(effect.at - self.now, 0.0), partial(self._feed, TimerFired(effect.name))
                )
            elif not isinstance(effect, EndRun):
                self._at(self._begin(effect), partial(self._end, effect, self.now))

    def _begin(self, effect: Work) -> float:
        """Seconds that an effect takes."""
        scale = self._scale
        document = self._emulation.document
        costs = document["trainer"]
        match effect:
            case Bind(policy=policy, slots=slots):
                taken_s = 0.0
                for slot in slots:
                    held = self._slots[slot]
                    if held != policy:
                        taken_s = max(taken_s, self._swap_s(held, policy))
                    self._slots[slot] = policy
                self._held[effect.binding] = slots
                return taken_s * scale
            case Compute(policy=policy):
                tokens = sum(row.num_tokens for row in self._records[effect.micro_batch_id].rows)
                units = len(self._held[effect.binding])
                speed = units * costs["scaling_efficiency"] ** (units - 1)
                return float(tokens / (costs["tokens_per_s_per_unit"][policy] * speed) * scale)
            case Apply(policy=policy):
                return float(costs["apply_s_per_b"] * self._params_b(policy) * scale)
            case _:
                return 0.0

    def _swap_s(self, held: str, policy: str) -> float:
        costs = self._emulation.document["trainer"]
        out_s = costs["swap_out_s_per_b"] * self._params_b(held) if held else 0.0
        return float(out_s + costs["swap_in_s_per_b"] * self._params_b(policy))

    def _params_b(self, policy: str) -> float:
        return float(self._emulation.document["policies"][policy]["params_b"])

    def _end(self, effect: Work, since: float) -> None:
        if isinstance(effect, Bind | Compute | Apply):
            for _ in self._held[effect.binding]:
                self._span("train", f"{effect.policy} {type(effect).__name__.lower()}", since)
        self._feed(EffectDone(effect, self._result(effect)))

    def _result(self, effect: Work) -> Result:
        match effect:
            case OpenTrainer():
                return TrainerOpened(tuple(self._slots))
            case Bind(policy=policy) | SaveGradients(policy=policy) | Suspend(policy=policy):
                return StateSaved(self._saved(policy))
            case Compute(policy=policy):
                self._ledgers[policy].add(effect.micro_batch_id)
                return Computed()
            case Apply(policy=policy):
                self._states[policy] = StateFact(
                    version=effect.batch + 1, ledger=frozenset(self._ledgers[policy]), applied=True
                )
                self._ledgers[policy].clear()
                return StateSaved(self._states[policy])
            case CreateMicroBatch():
                self._records[effect.micro_batch_id] = effect
            case CountVertices():
                return Counted(())
            case ReadRows(group_id=group_id):
                rows = [
                    row
                    for sample in self._ended.values()
                    if str(sample.sample_id.group) == group_id
                    for row in sample.rows
                ]
                return RowsRead(tuple(rows))
            case StartSamples(samples=samples):
                self._start(samples)
            case PrepareWeights(version=version, policy=policy):
                self._announce(version, policy)
            case ActivateVersion(version=version):
                self._version = version
                for policy in self._config.policies:
                    self._announce(version, policy)
            case CloseGroup():
                self._span("close", effect.group_id, self.now)
            case Commit():
                self.commits.append(self.now / self._scale)
            case AdmitGroups(groups=groups):
                self._group_query.update((spec.group_id, spec.query_index) for spec in groups)
            case _:
                pass
        return None

    def _saved(self, policy: str) -> StateFact:
        state = self._states[policy]
        if self._ledgers[policy]:
            state = StateFact(version=state.version, ledger=frozenset(self._ledgers[policy]))
            self._states[policy] = state
        return state

    # Samples.

    def _start(self, samples: tuple[SampleId, ...]) -> None:
        self._begun = min(self._begun, self.now)
        for sample_id in samples:
            name = str(sample_id)
            group = str(sample_id.group)
            batches = self._emulation.document["batches"]
            number, place = divmod(self._group_query[group], len(batches[0]))
            graphs = batches[number % len(batches)][place]
            calls = graphs[self._taken[group]]
            self._taken[group] += 1
            ready_calls = {call["id"]: len(call["after"]) for call in calls}
            self._samples[name] = _Sample(sample_id, calls, ready_calls, len(calls))
            self._open[sample_id.group.batch.batch] += 1
        for sample_id in samples:
            sample = self._samples[str(sample_id)]
            for call in sample.calls:
                if not sample.missing[call["id"]]:
                    self._ready(sample, call)

    def _ready(self, sample: _Sample, call: Mapping[str, Any]) -> None:
        name = str(sample.sample_id)
        vertex_id = f"{name}/0:{call['id']}"
        policy = self._emulation.document["agents"][call["agent"]]
        self._vertices[vertex_id] = _Vertex(name, call, self.now)
        agent = self._config.agents[call["agent"]]
        group = sample.sample_id.group
        self._post(
            VertexReady(
                vertex_id,
                call["agent"],
                policy,
                group.batch.batch,
                (group.batch.batch, group.ordinal),
                call["prompt_tokens"],
                agent.max_tokens,
                agent.timeout_s,
                3,
                20,
                name,
                tuple(f"{name}/0:{before}" for before in call["after"]),
            )
        )

    def _answered(self, vertex_id: str) -> None:
        vertex = self._vertices.pop(vertex_id)
        sample, call = self._samples[vertex.sample], vertex.call
        sample.rows.append(
            Row(
                vertex_id=vertex_id,
                sample_id=vertex.sample,
                agent=call["agent"],
                policy=self._emulation.document["agents"][call["agent"]],
                path=f"0:{call['id']}",
                num_prompt_tokens=call["prompt_tokens"],
                num_response_tokens=call["output_tokens"],
            )
        )
        sample.left -= 1
        for later in sample.calls:
            if call["id"] in later["after"]:
                sample.missing[later["id"]] -= 1
                if not sample.missing[later["id"]]:
                    self._ready(sample, later)
        if not sample.left:
            self._sample_ended(sample)

    def _sample_ended(self, sample: _Sample) -> None:
        name, version = str(sample.sample_id), sample.sample_id.group.batch.batch
        self._ended[name] = self._samples.pop(name)
        self._open[version] -= 1
        self._open += Counter()
        self._post(SampleEnded(name, True))
        fact = SampleFact(
            sample_id=sample.sample_id,
            status=SampleStatus.DONE,
            rewards=Rewards(team=float(len(sample.calls) % 3)),
        )
        self._feed(SampleChanged(fact))
        if not self._open:
            self._between_batches()
        self._order_loads()

    # The dispatcher.

    def _post(self, event: DispatchEvent) -> None:
        for effect in self._dispatcher.handle(event, self.now):
            match effect:
                case Send():
                    self._send(effect)
                case Accept(vertex_id=vertex_id):
                    self._at(0.0, partial(self._answered, vertex_id))
                case Abort():
                    self._at(0.0, partial(self._aborted, effect))
                case Vacated(instance_id=name):
                    self._at(0.0, partial(self._vacated, name))
                case Keep() | _:
                    pass

    def _send(self, effect: Send) -> None:
        instance, vertex = self._instances[effect.instance_id], self._vertices[effect.vertex_id]
        call = vertex.call
        self._span("wait", instance.policy, vertex.since)
        engine = self._sim[instance.policy].rollout.simulated
        assert engine is not None
        tool_s = 0.0 if effect.num_kept else call["tool_s"]
        prompt = call["prompt_tokens"] + effect.num_kept
        first_s = (tool_s + prompt / engine.prefill_tokens_per_s) * self._scale
        request = _Request(
            effect.vertex_id,
            effect.attempt_id,
            self.now,
            self.now + first_s,
            self._scale / engine.decode_tokens_per_s,
            max(call["output_tokens"] - effect.num_kept, 1),
        )
        instance.running[effect.attempt_id] = request
        self._at(request.ends_at - self.now, partial(self._done, instance, request))

    def _done(self, instance: _Instance, request: _Request) -> None:
        if instance.running.pop(request.attempt_id, None) is None:
            return
        self._span("request", instance.policy, request.since)
        self._post(
            AttemptSucceeded(
                request.attempt_id,
                instance.version or 0,
                instance.weights_hash,
                request.num_tokens,
            )
        )

    def _aborted(self, effect: Abort) -> None:
        instance = self._instances[effect.instance_id]
        request = instance.running.pop(effect.attempt_id)
        self._span("request", instance.policy, request.since)
        made = min(max(int((self.now - request.first_at) / request.token_s), 0), request.num_tokens)
        self._post(
            AttemptAborted(effect.attempt_id, instance.version or 0, instance.weights_hash, made)
        )

    def _tell_instance(self, instance: _Instance) -> None:
        serves = instance.version is not None and instance.requested is None
        self._post(
            InstanceChanged(
                instance_id=instance.name,
                policies=(instance.policy,),
                use=InstanceUse.SERVING if serves else InstanceUse.PAUSED,
                capacity=instance.capacity,
                version=instance.version or 0,
                weights_hash=instance.weights_hash,
            )
        )

    # Weights and moves.

    def _announce(self, version: int, policy: str) -> None:
        if (policy, version) not in self._weights:
            self._weights[policy, version] = f"{policy}-{version}"
            keep = min((v for v, count in self._open.items() if count), default=version)
            below = max(min(keep, self._version, version - 1), 0)
            for key in [k for k in self._weights if k[0] == policy and k[1] < below]:
                del self._weights[key]
            self._post(WeightsKnown(policy, version, f"{policy}-{version}", below))
        self._order_loads()

    def _order_loads(self) -> None:
        weights = [
            InstanceWeights(i.name, i.policy, i.version, i.weights_hash, i.requested, -math.inf)
            for i in self._instances.values()
        ]
        for load in decide_loads(
            weights, open_versions=self._open, weights=self._weights, now=self.now
        ):
            for name in load.instance_ids:
                self._load(self._instances[name], load.version, load.weights_hash)

    def _load(self, instance: _Instance, version: int, weights_hash: str) -> None:
        instance.requested = (version, weights_hash)
        engine = self._sim[instance.policy].rollout.simulated
        assert engine is not None
        moves = instance.held_policy not in ("", instance.policy)
        took_s = (engine.move_s if moves else engine.load_s) * self._scale
        self._tell_instance(instance)
        self._at(took_s, partial(self._loaded, instance, version, weights_hash, self.now))

    def _loaded(self, instance: _Instance, version: int, weights_hash: str, since: float) -> None:
        if instance.requested != (version, weights_hash):
            return
        instance.requested = None
        instance.version, instance.weights_hash = version, weights_hash
        instance.held_policy = instance.policy
        self._costs.loaded(instance.policy, self.now - since)
        self._span("load", instance.policy, since)
        self._tell_instance(instance)

    def _look(self) -> None:
        self._at(self._config.rollout.balance.interval_s, self._look)
        if self._moving or not self._open:
            return
        loads = self._monitor.observe(self.now)
        learning = self._dispatcher.learning
        coming = learning.coming if learning.demands else None
        move = self._balancer.decide(loads, self.now, coming=coming)
        if move is not None and self._begin_move(move):
            self._balancer.moved(move.giver, move.receiver, self.now)

    def _between_batches(self) -> None:
        section = self._config.rollout.balance
        if section.rule == "off" or not section.forecast or self._moving:
            return
        loads = self._monitor.observe(self.now)
        demands = self._dispatcher.learning.demands
        for move in forecast_moves(loads, demands=demands, min_gain=FORECAST_GAIN):
            self._begin_move(move)

    def _begin_move(self, move: Move) -> bool:
        able = [
            i
            for i in self._instances.values()
            if i.policy == move.giver
            and i.version is not None
            and i.requested is None
            and i.name not in self._moving
        ]
        if len(able) < 2:
            return False
        chosen = min(able, key=lambda i: (self._dispatcher.load_at(i.name), i.name))
        self._moving[chosen.name] = (move, self.now)
        self._span("move", f"{move.giver} to {move.receiver}", self.now)
        self._post(InstanceVacating(chosen.name))
        return True

    def _vacated(self, name: str) -> None:
        if name not in self._moving:
            return
        move, _ = self._moving.pop(name)
        instance = self._instances[name]
        instance.policy = move.receiver
        instance.version, instance.weights_hash = None, ""
        self._tell_instance(instance)
        self._order_loads()


def main() -> None:
    name, mode = sys.argv[1], Mode(sys.argv[2])
    if MODES[mode].serial:
        sys.exit(f"{mode.value}: its workflow goes level by level, which only services do")
    second_s = float(sys.argv[3]) / 1e3 if len(sys.argv) > 3 else 0.05
    path = Path(__file__).parents[2] / f"shared/workloads/{name}.json"
    emulation = Emulation.read(path, second_s=second_s)
    with tempfile.TemporaryDirectory() as scratch:
        run = VirtualRun(emulation, mode, Path(scratch))
        step = run.run()
    bounds = ideal_steps(emulation.workload, mode)
    print(
        f"{name} {mode.value}: {step:.1f} s, bound {mean_step_s(bounds):.1f} s",
        step / mean_step_s(bounds),
    )
    print([f"{b.rollout_s:.0f} -> {b.step_s:.0f}" for b in bounds])
    pools = emulation.workload.pools
    edges = [*run.commits, run.now / second_s][: len(bounds) + 1]
    lines = parts(
        run.spans,
        edges,
        num_instances=pools.rollout_instances,
        max_concurrency=pools.max_concurrency,
        num_slots=pools.trainer_units,
    )
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()

"""A world for the run's core: a store that keeps, services that forget, and chance.

The world executes effects as the services would, in any order, and may lose a trainer, the
dispatcher or the orchestrator between any two steps. The store alone remembers.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from flexmarl.core.dataset_order import Cursor, DatasetOrder
from flexmarl.core.demands import Place
from flexmarl.core.ids import BatchId, GroupId, SampleId, is_evaluation
from flexmarl.core.recovery import comes_again
from flexmarl.core.run import RunCore, RunRules
from flexmarl.core.run_effects import (
    ActivateVersion,
    AdmitGroups,
    Apply,
    Bind,
    CancelSamples,
    CloseGroup,
    CloseSubgraphs,
    Commit,
    Compute,
    ComputeAdvantages,
    CountVertices,
    CreateMicroBatch,
    Effect,
    EndRun,
    GroupSpec,
    MarkRows,
    OpenRollout,
    OpenTrainer,
    Prefetch,
    PrepareWeights,
    ReadRows,
    SaveGradients,
    SetTimer,
    StartSamples,
    Suspend,
    TrainerWork,
    VoidRows,
    Work,
)
from flexmarl.core.run_events import (
    AdvantagesMade,
    Computed,
    Counted,
    EffectDone,
    EffectFailed,
    Event,
    Result,
    RolloutLost,
    RowsRead,
    SampleChanged,
    StateFact,
    StateSaved,
    StoredGroup,
    StoredRecord,
    StoredRun,
    TimerFired,
    TrainerLost,
    TrainerOpened,
)
from flexmarl.core.states import GroupStatus, SampleStatus, VoidReason
from flexmarl.core.training_rows import Rewards, Row, RunFailure, SampleFact

LOST = RunFailure(reason="CHILD_DIED", message="a rank died")


@dataclass
class Store:
    """What survives."""

    groups: dict[str, GroupSpec] = field(default_factory=dict)
    status: dict[str, GroupStatus] = field(default_factory=dict)
    samples: dict[str, SampleFact] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)
    void: dict[str, VoidReason] = field(default_factory=dict)
    records: dict[str, CreateMicroBatch] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)
    leaving: dict[str, SampleFact] = field(default_factory=dict)
    closed: set[tuple[int, str]] = field(default_factory=set)
    early: set[tuple[int, str]] = field(default_factory=set)
    states: dict[str, StateFact] = field(default_factory=dict)
    version: int | None = None
    cursor: Cursor = field(default_factory=Cursor)
    applied: dict[str, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    queries: list[tuple[int, int]] = field(default_factory=list)

    def batch_of(self, vertex_id: str) -> int:
        return SampleId.parse(vertex_id.partition("/")[0]).group.batch.batch

    def stored(self) -> StoredRun:
        batch = -1 if self.version is None else self.version
        names = [g for g in self.groups if GroupId.parse(g).batch == BatchId(batch)]
        groups = []
        for name in names:
            rows = tuple(r for r in self.rows.values() if r.sample_id.startswith(name + "-"))
            ended = self.status[name] is not GroupStatus.OPEN
            claimable = frozenset(
                r.vertex_id for r in rows if r.vertex_id in self.released - self.void.keys()
            )
            groups.append(
                StoredGroup(
                    spec=self.groups[name],
                    status=self.status[name],
                    rows=rows if ended else (),
                    claimable=claimable,
                    lost=name in self.lost,
                )
            )
        return StoredRun(
            version=self.version,
            cursor=self.cursor,
            groups=tuple(groups),
            samples=tuple(
                fact
                for fact in (*self.leaving.values(), *self.samples.values())
                if fact.sample_id.group.batch == BatchId(batch)
            ),
            evaluated=tuple(
                fact
                for fact in self.samples.values()
                if fact.sample_id.group.batch == BatchId(batch, evaluation=True)
            ),
            records=tuple(
                StoredRecord(
                    micro_batch_id=name,
                    policy=record.policy,
                    vertex_ids=tuple(row.vertex_id for row in record.rows),
                    voided=record.rows[0].vertex_id in self.void,
                )
                for name, record in self.records.items()
                if record.batch == batch
            ),
            states=dict(self.states),
        )

    def lose_shard(self, trained: list[str]) -> None:
        """Half of the open batch's groups go with a store shard; the home shard ends them."""
        batch = BatchId(self.version or 0)
        ids = [GroupId.parse(name) for name in self.groups]
        gone = {str(g) for g in ids if g.batch == batch and g.ordinal % 2} - self.lost
        again = comes_again(trained, self.states, batch=batch.batch)
        self.lost |= gone
        ended = GroupStatus.DROPPED if again else GroupStatus.CLOSED
        self.status.update(dict.fromkeys(gone, ended))
        saved = {name for state in self.states.values() for name in state.ledger}
        for name, record in self.records.items():
            if name not in saved and any(_group_of(row) in gone for row in record.rows):
                for row in record.rows:
                    self.void.setdefault(row.vertex_id, VoidReason.GROUP_DROPPED)
        for facts in (self.samples, self.leaving):
            for name in [name for name in facts if name.rpartition("-")[0] in gone]:
                del facts[name]
        for name in [name for name, row in self.rows.items() if _group_of(row) in gone]:
            del self.rows[name]


def _group_of(row: Row) -> str:
    return row.sample_id.rpartition("-")[0]


@dataclass
class Sum:
    """What a bound process group holds in memory."""

    binding: int
    ledger: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)


class HeldError(Exception):
    """A slot is another policy's at its trainer."""


class World:
    """Executes a run's effects under chance.

    Args:
        rules: Rules of the run.
        rng: Source of all chance.
        trouble: Chance per step that something is lost or fails.
        agents: Agents called per sample, with the policy of each.
        choosy: Samples call some agents only, and say so while they run.
    """

    def __init__(
        self,
        rules: RunRules,
        rng: Random,
        *,
        trouble: float,
        num_slots: int,
        agents: dict[str, str],
        num_queries: int = 17,
        epochs: int | None = None,
        choosy: bool = False,
    ) -> None:
        self.rules = rules
        self.rng = rng
        self.trouble = trouble
        self.num_slots = num_slots
        self.agents = agents
        self.choosy = choosy
        self.order = DatasetOrder(num_queries, seed=1, shuffle=True, epochs=epochs)
        self.store = Store()
        self.now = 0.0
        self.pending: list[Work] = []
        self.timers: dict[str, float] = {}
        self.timers_set: set[str] = set()
        self.running: set[str] = set()
        self.sums: dict[str, Sum] = {}
        self.claims: dict[tuple[str, str], tuple[str, int]] = {}
        self.num_refused = 0
        self.active: int | None = None
        self.ended: EndRun | None = None
        self.most_trainers = 0
        self.steps = 0
        self.without_rewards = False
        self.num_wide = 0
        self.core = RunCore(rules, self.order, self.store.stored())
        self.take(self.core.handle((), now=self.now))

    def run(self, max_steps: int = 20_000) -> EndRun:
        while self.ended is None:
            self.steps += 1
            assert self.steps < max_steps, f"no end: {self.core.waits()}"
            self.step()
        return self.ended

    def step(self) -> None:
        self.now += self.rng.random() * 0.1
        if self.rng.random() < self.trouble:
            self.misfortune()
            return
        choices: list[str] = []
        if self.pending:
            choices += ["effect"] * 3
        if self.running:
            choices.append("sample")
            choices += ["leave"] * 2 * self.choosy
        due = [name for name, at in self.timers.items() if at <= self.now]
        if due:
            choices.append("timer")
        if not choices:
            assert self.timers, f"nothing can happen any more: {self.core.waits()}"
            self.now = min(self.timers.values())
            return
        match self.rng.choice(choices):
            case "effect":
                effect = self.pending.pop(self.rng.randrange(len(self.pending)))
                self.answer(effect)
            case "sample":
                self.end_sample(self.rng.choice(sorted(self.running)))
            case "leave":
                self.leave(self.rng.choice(sorted(self.running)))
            case _:
                self.timers.pop(due[0])
                self.feed(TimerFired(due[0]))

    def answer(self, effect: Work) -> None:
        try:
            result = self.execute(effect)
        except HeldError as error:
            self.num_refused += 1
            refused = RunFailure(reason="STATE_TRANSITION_REFUSED", message=str(error))
            self.feed(EffectFailed(effect, refused))
        else:
            self.feed(EffectDone(effect, result))

    def feed(self, event: Event) -> None:
        self.take(self.core.handle([event], now=self.now))
        self.check_devices()

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SetTimer):
                self.timers[effect.name] = effect.at
                self.timers_set.add(effect.name)
            elif isinstance(effect, EndRun):
                self.ended = effect
            else:
                assert effect.waits
                assert effect.reason
                self.pending.append(effect)

    def check_devices(self) -> None:
        bindings = [policy.binding for policy in self.core.training.policies.values()]
        places = [place for binding in bindings if binding for place in binding.places]
        held = [(place.trainer, slot) for place in places for slot in place.slots]
        assert len(held) == len(set(held)), "a device has one holder"
        known = {
            (name, p.binding.number) for name, p in self.core.training.policies.items() if p.binding
        }
        under_way = {(e.policy, e.binding) for e in self.pending if isinstance(e, TrainerWork)}
        opening = {e.trainer for e in self.pending if isinstance(e, OpenTrainer)}
        for (trainer, slot), binding in self.claims.items():
            freed = binding in known | under_way or trainer in opening
            assert freed, f"{slot} of {trainer} is held for good by {binding}"
        self.most_trainers = max([self.most_trainers, *(len(b.places) for b in bindings if b)])

    def misfortune(self) -> None:
        kind = self.rng.choice(["rank", "trainer", "rollout", "orchestrator"])
        if kind == "rank":
            on_policy = [e for e in self.pending if isinstance(e, Bind | Compute | Apply | Suspend)]
            if on_policy:
                effect = self.rng.choice(on_policy)
                self.pending = [e for e in self.pending if e is not effect]
                if self.rng.random() < 0.5:
                    self.attempt(effect)  # it took effect, the answer was lost
                self.drop(effect.policy, effect.binding)
                self.feed(EffectFailed(effect, LOST))
        elif kind == "trainer":
            trainers = self.rules.trainers
            lost = self.rng.choice(trainers) if len(trainers) > 1 else trainers[0]
            self.lose_sums(lost)
            self.feed(TrainerLost(lost, "another incarnation"))
        elif kind == "rollout":
            self.lose_rollout()
        else:
            for effect in self.pending:
                if self.rng.random() < 0.5:
                    self.attempt(effect)
            self._begin_anew()

    def attempt(self, effect: Work) -> None:
        """An effect whose answer nobody hears."""
        with suppress(HeldError):
            self.execute(effect)

    def drop(self, policy: str, binding: int) -> None:
        """Trainers end a binding."""
        held = self.sums.get(policy)
        if held is not None and held.binding == binding:
            del self.sums[policy]
        self.claims = {k: v for k, v in self.claims.items() if v != (policy, binding)}

    def lose_rollout(self) -> None:
        """The dispatcher is another process: it knows no sample, and answers nothing."""
        self.running.clear()
        self.active = None
        asked = [e for e in self.pending if isinstance(e, ComputeAdvantages)]
        self.pending = [e for e in self.pending if e not in asked]
        self.feed(RolloutLost("another incarnation"))
        for effect in asked:
            self.feed(EffectFailed(effect, LOST))

    def lose_sums(self, trainer: str) -> None:
        """A trainer ends what is bound there."""
        for policy, binding in {v for (name, _), v in self.claims.items() if name == trainer}:
            self.drop(policy, binding)

    def lose_shard(self) -> None:
        """A store shard is lost: all services begin anew, over the others."""
        for effect in self.pending:
            if self.rng.random() < 0.5:
                self.attempt(effect)
        self.running.clear()
        self.active = None
        self.sums.clear()
        self.claims.clear()
        policies = self.rules.training.policies.items()
        self.store.lose_shard([name for name, policy in policies if policy.trained])
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.pending.clear()
        self.timers.clear()
        self.core = RunCore(self.rules, self.order, self.store.stored())
        self.take(self.core.handle((), now=self.now))

    def called(self, name: str) -> dict[str, str]:
        """Agents that a sample calls: the same ones in each attempt."""
        if not self.choosy:
            return self.agents
        ordinals = Random(name.rpartition("a")[0])
        return {agent: p for agent, p in self.agents.items() if ordinals.random() < 0.6}

    def leave(self, name: str) -> None:
        called = set(self.called(name).values())
        fact = SampleFact(
            sample_id=SampleId.parse(name),
            status=SampleStatus.OPEN,
            left=frozenset(self.agents.values()) - called,
        )
        self.store.leaving[name] = fact
        self.feed(SampleChanged(fact))

    def end_sample(self, name: str) -> None:
        self.running.discard(name)
        sample_id = SampleId.parse(name)
        chance = self.rng.random()
        status = SampleStatus.DONE
        if chance < 0.08:
            status = SampleStatus.FAILED
        elif chance < 0.12 and sample_id.attempt < 2:
            status = SampleStatus.SUPERSEDED
        self.write_rows(name)
        rewards = {agent: float(self.rng.randrange(3)) for agent in self.agents}
        if self.rng.random() < 0.1:
            rewards.popitem()
        fact = SampleFact(
            sample_id=sample_id,
            status=status,
            rewards=self.rewards(rewards) if status is SampleStatus.DONE else None,
            failure=RunFailure(reason="WORKFLOW_RAISED", message="it raised")
            if status is SampleStatus.FAILED
            else None,
            used=frozenset(self.called(name).values()),
        )
        if name in self.store.samples:
            return
        self.store.samples[name] = fact
        self.feed(SampleChanged(fact))

    def rewards(self, agents: dict[str, float]) -> Rewards:
        return Rewards() if self.without_rewards else Rewards(team=1.0, agents=agents)

    def write_rows(self, name: str) -> None:
        batch = SampleId.parse(name).group.batch
        for place, (agent, policy) in enumerate(self.called(name).items()):
            if (batch.batch, policy) in self.store.closed and not batch.evaluation:
                continue
            vertex_id = f"{name}/0:{place}"
            self.store.rows[vertex_id] = Row(
                vertex_id=vertex_id,
                sample_id=name,
                agent=agent,
                policy=policy,
                path=f"0:{place}",
                num_response_tokens=3,
                trainable=self.rules.training.policies[policy].trained and not batch.evaluation,
            )

    def state_of(self, policy: str) -> StateFact:
        return self.store.states.get(policy, StateFact(version=0))

    def save(self, policy: str, held: Sum) -> StateFact:
        old = self.state_of(policy)
        if held.ledger or held.dropped:
            batch = self.store.version or 0
            assert old.version <= batch, "gradients are saved before the update only"
            self.store.states[policy] = StateFact(
                version=old.version,
                ledger=frozenset(held.ledger),
                dropped=frozenset(held.dropped),
            )
        return self.state_of(policy)

    def execute(self, effect: Work) -> Result:
        store = self.store
        match effect:
            case OpenRollout() | Prefetch() | PrepareWeights():
                return None
            case OpenTrainer(trainer=trainer):
                self.lose_sums(trainer)
                return TrainerOpened(tuple(f"slot{i}" for i in range(self.num_slots)))
            case AdmitGroups(groups=groups):
                if not (is_evaluation(groups[0].group_id) or groups[0].group_id in store.groups):
                    store.closed = {mark for mark in store.closed if mark[0] != effect.batch}
                for spec in groups:
                    known = store.groups.setdefault(spec.group_id, spec)
                    assert known == spec, "a group is admitted twice alike or not at all"
                    store.status.setdefault(spec.group_id, GroupStatus.OPEN)
            case StartSamples(samples=samples):
                assert self.core.training.off_devices, "the devices are the trainers'"
                for sample_id in samples:
                    assert self.active is None or sample_id.group.batch.batch == self.active
                    if str(sample_id) not in store.samples:
                        self.running.add(str(sample_id))
            case CancelSamples(samples=samples):
                for sample_id in samples:
                    if str(sample_id) in self.running:
                        self.running.discard(str(sample_id))
                        if self.rng.random() < 0.5:
                            self.write_rows(str(sample_id))  # late, after the group's end
            case ReadRows(group_id=group_id):
                prefix = group_id + "-"
                return RowsRead(
                    tuple(r for r in store.rows.values() if r.sample_id.startswith(prefix))
                )
            case ComputeAdvantages(scopes=scopes):
                return AdvantagesMade(tuple(tuple(v - min(s) for v in s) for s in scopes))
            case CloseGroup():
                self.close(effect)
            case CloseSubgraphs(batch=batch, policies=policies):
                marks = {(batch, policy) for policy in policies}
                store.closed |= marks
                if GroupStatus.OPEN in store.status.values():
                    store.early |= marks
            case CreateMicroBatch():
                if not self.rules.training.overlaps:
                    closed = (effect.batch, effect.policy) in store.closed
                    assert closed, "the whole batch comes first"
                known_record = store.records.setdefault(effect.micro_batch_id, effect)
                assert known_record.rows == effect.rows, "a record is never another one"
            case MarkRows(micro_batch_id=name, rows=rows):
                for row in rows:
                    assert store.marks.setdefault(row.vertex_id, name) == name, "marked twice"
            case Bind(policy=policy, binding=number):
                self.check_slots(effect)
                self.claim(effect)
                state = store.states.setdefault(policy, StateFact(version=0))
                held = Sum(number)
                if not state.applied or state.version <= (store.version or 0):
                    held.ledger, held.dropped = set(state.ledger), set(state.dropped)
                if state.applied:
                    held = Sum(number)
                newer = self.sums.get(policy)
                if newer is None or newer.binding < number:
                    self.sums[policy] = held
                return StateSaved(state)
            case Compute():
                return self.compute(effect)
            case SaveGradients() | Suspend():
                held_now = self.sums.get(effect.policy)
                if held_now is None or held_now.binding != effect.binding:
                    state = self.state_of(effect.policy)
                else:
                    state = self.save(effect.policy, held_now)
                if isinstance(effect, Suspend):
                    self.drop(effect.policy, effect.binding)
                return StateSaved(state)
            case Apply():
                return self.apply(effect)
            case VoidRows(rows=voided):
                for item in voided:
                    assert item.row.vertex_id not in self.consumed(), "void and consumed"
                    store.void.setdefault(item.row.vertex_id, item.reason)
            case CountVertices(batch=batch, consumed=consumed):
                return Counted(
                    tuple(
                        row
                        for row in store.rows.values()
                        if row.trainable
                        and store.batch_of(row.vertex_id) == batch
                        and row.vertex_id not in store.void
                        and store.marks.get(row.vertex_id) not in consumed
                    ),
                    Counter(
                        reason for row, reason in store.void.items() if store.batch_of(row) == batch
                    ),
                )
            case Commit():
                if store.version == effect.version:
                    return None  # repeated after a lost answer
                assert store.version == effect.expected_version, "one compare-and-set write"
                store.version = effect.version
                store.cursor = effect.cursor
            case ActivateVersion(version=version):
                self.active = max(version, self.active or 0)  # an older order may come late
        return None

    def claim(self, effect: Bind) -> None:
        """The trainers' part of a binding: what the policy had there before ends."""
        own = Place(effect.trainer, effect.slots)
        slots = [(place.trainer, slot) for place in (own, *effect.beyond) for slot in place.slots]
        for slot in slots:
            holder = self.claims.get(slot)
            if holder is not None and holder[0] != effect.policy:
                raise HeldError(f"slot {slot} is held by {holder[0]}")
        trainers = {trainer for trainer, _ in slots}
        before = {
            number
            for (trainer, _), (policy, number) in self.claims.items()
            if policy == effect.policy and trainer in trainers
        }
        for number in before:
            self.drop(effect.policy, number)
        self.claims.update(dict.fromkeys(slots, (effect.policy, effect.binding)))

    def check_slots(self, effect: Bind) -> None:
        """No two bindings that the core believes in share a slot."""
        bindings = {name: p.binding for name, p in self.core.training.policies.items()}
        own = bindings.pop(effect.policy)
        if own is None or own.number != effect.binding:
            return  # it was given up meanwhile
        self.num_wide += len(own.slots) > 1
        for other in bindings.values():
            if other is not None and other.trainer == own.trainer:
                assert set(own.slots).isdisjoint(other.slots), "a slot is held twice"

    def close(self, effect: CloseGroup) -> None:
        store = self.store
        if store.status[effect.group_id] is not GroupStatus.OPEN:
            return
        store.status[effect.group_id] = effect.status
        for item in effect.released:
            assert store.samples[item.row.sample_id].status is SampleStatus.DONE
            store.released.add(item.row.vertex_id)
        for voided in effect.voided:
            store.void.setdefault(voided.row.vertex_id, voided.reason)
        both = store.released & store.void.keys()
        assert not {v for v in both if v.startswith(effect.group_id)}

    def compute(self, effect: Compute) -> Result:
        held = self.sums.get(effect.policy)
        if held is None or held.binding != effect.binding:
            return Computed()  # the core has heard of the loss and leaves the answer aside
        assert effect.micro_batch_id in self.store.records, "the record comes first"
        assert effect.micro_batch_id not in held.ledger, "a micro-batch is handed over once"
        assert not self.state_of(effect.policy).has_updated(effect.batch), "its update is made"
        if self.rng.random() < 0.05:
            held.dropped.add(effect.micro_batch_id)
            return Computed(non_finite=True)
        held.ledger.add(effect.micro_batch_id)
        return Computed()

    def apply(self, effect: Apply) -> Result:
        state = self.state_of(effect.policy)
        if state.applied and state.version == effect.batch + 1:
            return StateSaved(state)
        held = self.sums.get(effect.policy)
        if held is None or held.binding != effect.binding:
            return StateSaved(state)
        closed = (effect.batch, effect.policy) in self.store.closed
        assert closed, "the subgraph is closed first"
        assert set(effect.micro_batch_ids) == held.ledger, "the sum is what the records say"
        new = StateFact(
            version=effect.batch + 1,
            ledger=frozenset(held.ledger),
            dropped=frozenset(held.dropped),
            applied=True,
        )
        self.store.states[effect.policy] = new
        for name in held.ledger:
            assert name not in self.store.applied, "applied twice"
            self.store.applied[name] = effect.policy
        held.ledger, held.dropped = set(), set()
        return StateSaved(new)

    def consumed(self) -> set[str]:
        return {
            row.vertex_id for name in self.store.applied for row in self.store.records[name].rows
        }

    def check(self) -> None:
        """I5, I9 and the cursor, over all that is committed."""
        store = self.store
        version = store.version or 0
        consumed = self.consumed()
        assert not consumed & store.void.keys(), "consumed and void"
        for vertex_id, row in store.rows.items():
            if store.batch_of(vertex_id) >= version:
                continue
            if row.trainable:
                assert (vertex_id in consumed) != (vertex_id in store.void), vertex_id
            else:
                assert vertex_id not in consumed
        seen = [
            spec.query_index
            for name, spec in sorted(store.groups.items())
            if GroupId.parse(name).batch.batch < version
            and not is_evaluation(name)
            and not spec.repeats
        ]
        expected, cursor = self.order.take(Cursor(), len(seen))
        assert (tuple(seen), store.cursor) == (expected, cursor), "queries skipped or repeated"
        # One that had been dropped and replaced before it was lost needs no other.
        replaced = {spec.replaces for spec in store.groups.values() if not spec.repeats}
        assert {g.replaces: g.query_index for g in store.groups.values() if g.repeats} == {
            name: store.groups[name].query_index
            for name in store.lost - replaced
            if store.status[name] is GroupStatus.DROPPED
        }, "the query of a lost group comes again, once"

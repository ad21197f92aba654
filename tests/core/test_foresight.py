"""Whose state is loaded ahead, and where."""

from __future__ import annotations

from typing import Any

import pytest

from flexmarl.core.demands import Demand, Place
from flexmarl.core.foresight import foresee
from flexmarl.core.ids import BatchId
from flexmarl.core.policy_training import (
    Binding,
    OperationKind,
    PolicyRules,
    Record,
    RecordStage,
)
from flexmarl.core.run_effects import Bind, Prefetch
from flexmarl.core.run_events import StateFact, StateSaved
from flexmarl.core.training import Training, TrainingRules
from flexmarl.core.training_rows import Row

FROM_S = 0.25
TWO = {"t0": ("slot0", "slot1")}


def want(policy: str, work: float, **more: Any) -> Demand:
    return Demand(policy=policy, work=work, world_size=more.pop("world_size", 1), **more)


def held(policy: str, work: float, *slots: str, **more: Any) -> Demand:
    return want(policy, work, trainer="t0", slots=slots, world_size=len(slots), busy=True, **more)


def where(*demands: Demand, trainers: Any = TWO) -> tuple[str, str, tuple[str, ...]] | None:
    found = foresee(demands, trainers=trainers)
    return None if found is None else (found.policy, found.trainer, found.slots)


def test_who_is_served_first_gets_the_slot_that_comes_free_first() -> None:
    holders = [held("a", 5, "slot0"), held("b", 9, "slot1", finishing=True)]
    assert where(*holders, want("c", 2), want("d", 7)) == ("d", "t0", ("slot1",))
    holders = [held("a", 5, "slot0"), held("b", 9, "slot1")]
    assert where(*holders, want("d", 7)) == ("d", "t0", ("slot0",))
    holders = [held("a", 5, "slot0"), held("b", 5, "slot1", expects=True)]
    assert where(*holders, want("d", 7)) == ("d", "t0", ("slot0",))


def test_free_slots_come_first_and_all_are_in_the_trainers_order() -> None:
    assert where(held("a", 5, "slot0"), want("d", 7)) == ("d", "t0", ("slot1",))
    wide = want("d", 7, world_size=2)
    assert where(held("a", 5, "slot0"), wide) == ("d", "t0", ("slot0", "slot1"))


def test_nobody_waits_or_nothing_is_large_enough() -> None:
    assert where(held("a", 5, "slot0")) is None
    assert where(want("d", 0)) is None
    assert where(want("d", 7, world_size=3)) is None
    assert where(want("d", 7), trainers={}) is None


def test_the_trainer_that_held_it_last_is_asked_again() -> None:
    trainers = {"t0": ("slot0",), "t1": ("slot0",)}
    waits = want("d", 7, last_trainer="t1")
    assert where(held("a", 5, "slot0"), waits, trainers=trainers) == ("d", "t1", ("slot0",))


def test_places_are_respected() -> None:
    placed = held("a", 5, "slot0", places=(Place("t0", ("slot0",)),))
    assert where(placed, held("b", 9, "slot1"), want("d", 7)) == ("d", "t0", ("slot1",))
    assert where(placed, held("b", 9, "slot1"), want("d", 7, world_size=2)) is None
    own = want("d", 7, places=(Place("t0", ("slot0",)),))
    assert where(own) == ("d", "t0", ("slot0",))
    assert where(own, trainers={"t1": ("slot0",)}) is None


@pytest.mark.parametrize(
    ("bind_s", "others_bind_s", "is_hinted"),
    [(FROM_S / 2, FROM_S / 2, False), (FROM_S, FROM_S / 2, True), (FROM_S / 2, FROM_S, False)],
)
def test_state_that_takes_time_to_load_is_loaded_ahead_once(
    bind_s: float, others_bind_s: float, is_hinted: bool
) -> None:
    policies = {name: PolicyRules() for name in ("a", "b", "other")}
    training = Training(TrainingRules(policies=policies, prefetch_from_s=FROM_S))
    assert list(training.due(version=None, now=0.0)) == []
    training.trainer_opened("t0", ("slot0",))
    now, loads = 0.0, []
    # All make set 0 in turn on the one slot.
    for _ in policies:
        (bind,) = [e for e in training.due(version=None, now=now) if isinstance(e, Bind)]
        now += {"a": bind_s, "other": others_bind_s}.get(bind.policy, FROM_S)
        training.done(bind, StateSaved(StateFact(version=0)), now=now)
        training.policies[bind.policy].unbind()
    training.policies["b"].binding = Binding(9, "t0", ("slot0",), now, idle_since=now)
    training.begin_batch(BatchId(0))
    assert [e for e in training.due(version=0, now=now) if isinstance(e, Prefetch)] == []
    row = Row(
        vertex_id="v", sample_id="s", agent="x", policy="a", path="0:0", num_response_tokens=3
    )
    training.policies["a"].records["m"] = Record("m", (row,), RecordStage.READY)
    holder = training.policies["b"].binding
    assert holder is not None
    holder.begin(OperationKind.SUSPEND, now=now)
    assert [e for e in training.due(version=0, now=now) if isinstance(e, Prefetch)] == []
    holder.operation = None
    for _ in range(2):
        loads += [e for e in training.due(version=0, now=now) if isinstance(e, Prefetch)]
    assert [(e.policy, e.slots) for e in loads] == [("a", ("slot0",))] * is_hinted
    assert all(e.waits == "trainer t0: load a ahead of its turn" for e in loads)


def test_who_spans_trainers_gets_no_hint_and_its_slots_are_held_everywhere() -> None:
    trainers = {"t0": ("slot0",), "t1": ("slot0",)}
    assert where(want("d", 7, world_size=2, spans=True), trainers=trainers) is None
    places = (Place("t0", ("slot0",)), Place("t1", ("slot0",)))
    assert where(want("d", 7, world_size=2, places=places), trainers=trainers) is None
    beyond = (Place("t1", ("slot0",)),)
    spanning = want("a", 5, trainer="t0", slots=("slot0",), beyond=beyond, finishing=True)
    free = {**trainers, "t2": ("slot0", "slot1")}
    assert where(spanning, want("d", 7, last_trainer="t1"), trainers=free) == (
        "d",
        "t1",
        ("slot0",),
    )

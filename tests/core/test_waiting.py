"""What a run waits for, since when, and what would end it (I8)."""

from __future__ import annotations

from random import Random
from typing import Any

from core.run_simulation import World
from core.test_run import AGENTS, rules
from core.test_run_ends import FAILED, until, world

from flexmarl.core.evaluation import EvaluationRules
from flexmarl.core.run_effects import Bind, Compute, StartSamples
from flexmarl.core.run_events import EffectFailed
from flexmarl.core.states import RunStatus
from flexmarl.core.waiting import Bounds, InstanceSight, Wait, explain

BOUNDS = Bounds(
    store_patience_s=60.0,
    service_patience_s=61.0,
    operation_timeout_s=62.0,
    sample_timeout_s=63.0,
    call_timeout_s={"p1": 64.0},
)


def engine(**more: Any) -> InstanceSight:
    values = {
        "instance_id": "p1-0",
        "host_id": "h0",
        "pid": 77,
        "policies": ("p1",),
        "state": "serving",
        "num_running": 3,
        "silent_s": 40.0,
    }
    return InstanceSight(**{**values, **more})


def waits(run: World, *instances: InstanceSight, later_s: float = 0.0) -> list[Wait]:
    return explain(run.core, instances=instances, bounds=BOUNDS, now=run.now + later_s)


def rolling_out() -> World:
    run = world()
    until(run, lambda w: w.running and not w.pending)
    return run


def test_a_silent_engine_is_named_before_all_else() -> None:
    run = rolling_out()
    first = waits(run, engine(), later_s=9.0)[0]
    assert "p1-0" in first.what
    assert "77" in first.what
    assert first.for_s == 40.0
    assert "64" in first.ends


def test_an_engine_that_does_not_serve_is_named_with_its_state() -> None:
    (found,) = [
        w.what
        for w in waits(rolling_out(), engine(state="loading weights", num_running=0, pid=0))
        if "p1-0" in w.what
    ]
    assert found == "instance p1-0 of p1: it is loading weights"


def test_engines_at_work_and_idle_ones_are_no_cause() -> None:
    quiet = waits(rolling_out(), engine(silent_s=0.5), engine(num_running=0))
    assert not [w for w in quiet if "instance" in w.what]


def test_open_samples_say_since_when_none_ended() -> None:
    run = rolling_out()
    (samples,) = [w for w in waits(run, later_s=5.0) if "open sample" in w.what]
    assert samples.for_s >= 5.0
    assert "workflow.sample_timeout_s = 63" in samples.ends


def test_an_evaluation_is_waited_for_like_a_batch() -> None:
    run = World(
        rules(evaluation=EvaluationRules(every=1, num_queries=1)),
        Random(4),
        trouble=0.0,
        num_slots=2,
        agents=AGENTS,
    )
    seen: set[tuple[bool, bool]] = set()
    while run.ended is None:
        for wait in waits(run, engine()):
            if "open sample" in wait.what or "evaluation of version" in wait.what:
                seen.add(("of batch" in wait.what, "evaluation of version" in wait.what))
        run.step()
    assert {(True, True), (False, True)} <= seen


def test_every_effect_says_what_ends_it_and_since_when_it_runs() -> None:
    run, seen = world(), {}
    while run.ended is None:
        for effect, since in run.core.in_flight:
            assert since <= run.now
            (wait,) = [w for w in waits(run) if w.what == effect.waits][:1]
            assert wait.for_s >= 0
            seen[type(effect).__name__] = wait.ends
        run.step()
    assert {"OpenTrainer", "Bind", "Compute", "Commit", "ActivateVersion", "StartSamples"} <= set(
        seen
    )
    assert "operation_timeout_s = 62" in seen["Compute"]
    assert "service_patience_s = 61" in seen["OpenTrainer"]
    assert "service_patience_s = 61" in seen["StartSamples"]
    assert "dispatcher" in seen["ActivateVersion"]
    assert "store_patience_s = 60" in seen["Commit"]
    assert run.ended.status is RunStatus.FINISHED
    assert waits(run) == []


def test_a_policy_without_slots_says_who_holds_them() -> None:
    run = world()
    seen: set[str] = set()
    while run.ended is None:
        seen.update(w.ends for w in waits(run) if w.what.startswith("policy "))
        run.step()
    assert any("bound now: p" in ends for ends in seen)
    assert "a trainer that opens the run" in seen


def test_a_policy_that_failed_is_tried_again() -> None:
    run = world()
    until(run, lambda w: any(isinstance(e, Compute) for e in w.pending))
    effect = next(e for e in run.pending if isinstance(e, Compute))
    run.pending = [e for e in run.pending if e is not effect]
    run.drop(effect.policy, effect.binding)
    run.feed(EffectFailed(effect, FAILED))
    (found,) = [w for w in waits(run) if w.what.startswith(f"policy {effect.policy}")]
    assert found.ends == "another try, after 1 failure(s) in a row"
    assert any(w.what == "timer allocation" for w in waits(run))
    assert not isinstance(effect, Bind | StartSamples)


def test_state_that_is_loaded_ahead_says_what_comes_instead_of_it() -> None:
    run = World(rules(), Random(5), trouble=0.0, num_slots=1, agents=AGENTS)
    ends = set()
    while run.ended is None:
        ends |= {wait.ends for wait in waits(run) if "ahead of its turn" in wait.what}
        run.now += 0.2  # bindings take long enough for it
        run.step()
    (end,) = ends
    assert "operation_timeout_s = 62" in end
    assert end.endswith("its binding loads the state")

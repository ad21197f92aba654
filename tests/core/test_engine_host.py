from dataclasses import replace

import pytest

from flexmarl.core.engine_host import EngineHost
from flexmarl.core.engine_host_events import (
    EngineEnded,
    EngineHostConfig,
    EngineReadied,
    InstancePhase,
    InstanceWanted,
    LoadEnded,
    LoadEngine,
    LoadOrder,
    LoadOrdered,
    PlanReceived,
    Problem,
    ReportInstance,
    SetTimer,
    StartEngine,
    StopEngine,
    TimerFired,
)

CONFIG = EngineHostConfig(
    start_timeout_s=100.0,
    load_timeout_s=50.0,
    backoff_initial_s=1.0,
    backoff_max_s=3.0,
    stable_s=30.0,
)
DIED = Problem("CHILD_DIED", "gone")


def wanted(name: str = "a-0", **changes) -> InstanceWanted:
    base = InstanceWanted(
        instance_id=name,
        run_id="r",
        policies=("a",),
        engine="transformers",
        model_path="/m",
        model_hash="sha256:1",
        max_concurrency=4,
        dtype="float32",
        max_context=0,
    )
    return replace(base, **changes)


def plan(*instances: InstanceWanted, term: int = 1, run_id: str = "r") -> PlanReceived:
    return PlanReceived(run_id=run_id, term=term, instances=instances)


def order(version: int, *, content: str | None = None, policy: str = "a") -> LoadOrder:
    return LoadOrder(
        policy=policy, version=version, weights_hash=content or f"h{version}", key=f"k{version}"
    )


def ordered(version: int, *names: str, content: str | None = None, policy: str = "a"):
    return LoadOrdered(
        instance_ids=names or ("a-0",), order=order(version, content=content, policy=policy)
    )


def only(kind, effects):
    found = [effect for effect in effects if isinstance(effect, kind)]
    assert len(found) == 1, effects
    return found[0]


def none_of(kind, effects) -> bool:
    return not any(isinstance(effect, kind) for effect in effects)


def phase(host: EngineHost, name: str = "a-0"):
    view = host.view(name)
    return view and view.phase


def started(host: EngineHost, now: float = 0.0) -> int:
    """Plan one instance and let its process become ready; returns the generation."""
    generation = only(StartEngine, host.handle(plan(wanted()), now)).generation
    host.handle(EngineReadied(instance_id="a-0", generation=generation), now)
    return generation


def loaded(host: EngineHost, generation: int, version: int, *, content=None, now: float = 0.0):
    load = only(LoadEngine, host.handle(ordered(version, content=content), now))
    return host.handle(
        LoadEnded(instance_id="a-0", generation=generation, load_id=load.load_id, problem=None),
        now,
    )


def test_an_instance_starts_loads_and_serves():
    host = EngineHost(CONFIG)
    effects = host.handle(plan(wanted()), 5.0)
    start = only(StartEngine, effects)
    assert (start.wanted, start.reason) == (wanted(), "planned")
    assert only(SetTimer, effects).at == 105.0
    assert phase(host) is InstancePhase.STARTING

    effects = host.handle(EngineReadied(instance_id="a-0", generation=start.generation), 6.0)
    assert effects == [ReportInstance("a-0")]
    assert phase(host) is InstancePhase.EMPTY

    effects = host.handle(ordered(0), 7.0)
    load = only(LoadEngine, effects)
    assert load.order == order(0) and load.fetch and load.run_id == "r"
    assert only(SetTimer, effects).at == 57.0
    assert phase(host) is InstancePhase.LOADING

    host.handle(
        LoadEnded(instance_id="a-0", generation=start.generation, load_id=1, problem=None), 8.0
    )
    view = host.view("a-0")
    assert (view.phase, view.version, view.weights_hash) == (InstancePhase.SERVING, 0, "h0")
    assert host.instance_ids() == ["a-0"]


def test_instances_take_weights_over_beside_each_other():
    host = EngineHost(CONFIG)
    names = ("a-0", "a-1", "a-2")
    for start in host.handle(plan(*map(wanted, names)), 0.0):
        if isinstance(start, StartEngine):
            ready = EngineReadied(instance_id=start.wanted.instance_id, generation=start.generation)
            host.handle(ready, 1.0)
    effects = host.handle(ordered(0, *names), 2.0)
    assert [e.instance_id for e in effects if isinstance(e, LoadEngine)] == list(names)
    assert {phase(host, name) for name in names} == {InstancePhase.LOADING}


def test_a_repeated_plan_changes_nothing():
    host = EngineHost(CONFIG)
    started(host)
    assert host.handle(plan(wanted()), 1.0) == []


def test_instances_that_are_not_planned_stop_and_changed_ones_start_anew():
    host = EngineHost(CONFIG)
    host.handle(plan(wanted("a-0"), wanted("a-1")), 0.0)
    effects = host.handle(plan(wanted("a-1", dtype="bfloat16")), 1.0)
    stops = [e for e in effects if isinstance(e, StopEngine)]
    assert [(s.instance_id, s.reason) for s in stops] == [
        ("a-0", "not_planned"),
        ("a-1", "not_planned"),
    ]
    assert only(StartEngine, effects).wanted.dtype == "bfloat16"
    assert host.view("a-0") is None


def test_a_plan_of_an_older_term_is_ignored_and_of_another_run_is_not():
    host = EngineHost(CONFIG)
    host.handle(plan(wanted(), term=3), 0.0)
    assert host.handle(plan(term=2), 1.0) == []
    assert host.instance_ids() == ["a-0"]
    assert only(StopEngine, host.handle(plan(term=1, run_id="other"), 2.0)).instance_id == "a-0"
    assert host.run_id == "other"


def test_a_dead_instance_that_is_not_planned_needs_no_stop():
    host = EngineHost(CONFIG)
    generation = started(host)
    host.handle(EngineEnded(instance_id="a-0", generation=generation, problem=DIED), 1.0)
    assert none_of(StopEngine, host.handle(plan(), 2.0))


def test_orders_before_readiness_and_while_loading_wait_and_the_newest_wins():
    host = EngineHost(CONFIG)
    generation = only(StartEngine, host.handle(plan(wanted()), 0.0)).generation
    assert none_of(LoadEngine, host.handle(ordered(0), 1.0))
    effects = host.handle(EngineReadied(instance_id="a-0", generation=generation), 2.0)
    assert only(LoadEngine, effects).order == order(0)
    assert none_of(LoadEngine, host.handle(ordered(1), 3.0))
    assert none_of(LoadEngine, host.handle(ordered(2), 3.0))
    effects = host.handle(
        LoadEnded(instance_id="a-0", generation=generation, load_id=1, problem=None), 4.0
    )
    load = only(LoadEngine, effects)
    assert (load.load_id, load.order) == (2, order(2))


def test_an_order_for_what_is_served_is_only_reported():
    host = EngineHost(CONFIG)
    loaded(host, started(host), 1)
    assert host.handle(ordered(1), 1.0) == [ReportInstance("a-0")]


def test_the_same_content_moves_the_version_without_fetching():
    host = EngineHost(CONFIG)
    generation = started(host)
    loaded(host, generation, 1, content="same")
    load = only(LoadEngine, host.handle(ordered(2, content="same"), 1.0))
    assert not load.fetch


@pytest.mark.parametrize("event", [ordered(1, "unknown"), ordered(1, policy="other")])
def test_orders_for_others_are_ignored(event):
    host = EngineHost(CONFIG)
    started(host)
    assert host.handle(event, 1.0) == []


def test_a_refused_load_keeps_what_is_served():
    host = EngineHost(CONFIG)
    generation = started(host)
    load = only(LoadEngine, host.handle(ordered(0), 1.0))
    bad = Problem("CHECKSUM_MISMATCH", "content")
    ended = LoadEnded(instance_id="a-0", generation=generation, load_id=load.load_id, problem=bad)
    effects = host.handle(ended, 2.0)
    assert effects == [ReportInstance("a-0")]  # the dispatcher decides when to try again
    assert (phase(host), host.view("a-0").problem) == (InstancePhase.EMPTY, bad)
    assert host.handle(ended, 2.5) == []  # told twice
    loaded(host, generation, 1)
    load = only(LoadEngine, host.handle(ordered(2), 3.0))
    host.handle(replace(ended, load_id=load.load_id), 4.0)
    view = host.view("a-0")
    assert (view.phase, view.version, view.weights_hash) == (InstancePhase.SERVING, 1, "h1")
    assert only(LoadEngine, host.handle(ordered(2), 5.0)).order == order(2)


def test_a_dead_process_is_started_again_and_given_its_weights_unasked():
    host = EngineHost(CONFIG)
    generation = started(host)
    loaded(host, generation, 3)
    effects = host.handle(EngineEnded(instance_id="a-0", generation=generation, problem=DIED), 10.0)
    assert only(SetTimer, effects).at == 11.0
    view = host.view("a-0")
    assert (view.phase, view.version, view.weights_hash) == (InstancePhase.DEAD, 0, "")
    assert view.problem == DIED
    assert none_of(StartEngine, host.handle(TimerFired(), 10.5))
    start = only(StartEngine, host.handle(TimerFired(), 11.0))
    assert start.reason == "restart" and start.generation != generation
    assert host.view("a-0").num_restarts == 1
    effects = host.handle(EngineReadied(instance_id="a-0", generation=start.generation), 12.0)
    load = only(LoadEngine, effects)
    assert load.order == order(3) and load.fetch


def test_restarts_back_off_until_a_process_was_stable():
    host = EngineHost(CONFIG)
    generation = only(StartEngine, host.handle(plan(wanted()), 0.0)).generation
    now, delays = 0.0, []
    for lifetime in (1.0, 1.0, 1.0, 1.0, 40.0):
        now += lifetime
        effects = host.handle(
            EngineEnded(instance_id="a-0", generation=generation, problem=DIED), now
        )
        at = only(SetTimer, effects).at
        delays.append(at - now)
        now = at
        generation = only(StartEngine, host.handle(TimerFired(), now)).generation
    assert delays == [1.0, 2.0, 3.0, 3.0, 1.0]


def test_events_of_an_earlier_process_change_nothing():
    host = EngineHost(CONFIG)
    old = started(host)
    host.handle(EngineEnded(instance_id="a-0", generation=old, problem=DIED), 1.0)
    assert host.handle(EngineEnded(instance_id="a-0", generation=old, problem=DIED), 1.5) == []
    new = only(StartEngine, host.handle(TimerFired(), 2.0)).generation
    stale = [
        EngineReadied(instance_id="a-0", generation=old),
        EngineEnded(instance_id="a-0", generation=old, problem=DIED),
        LoadEnded(instance_id="a-0", generation=old, load_id=1, problem=None),
        EngineReadied(instance_id="gone", generation=old),
    ]
    for event in stale:
        assert host.handle(event, 3.0) == []
    assert phase(host) is InstancePhase.STARTING
    ready = EngineReadied(instance_id="a-0", generation=new)
    assert host.handle(ready, 4.0) == [ReportInstance("a-0")]
    assert host.handle(ready, 4.0) == []


@pytest.mark.parametrize(
    ("load_first", "at", "reason"),
    [
        (False, 100.0, "starting_took_too_long"),
        (True, 50.0, "loading_took_too_long"),
    ],
)
def test_what_takes_too_long_is_killed_and_started_again(load_first, at, reason):
    host = EngineHost(CONFIG)
    if load_first:
        generation = started(host)
        host.handle(ordered(0), 0.0)
    else:
        generation = only(StartEngine, host.handle(plan(wanted()), 0.0)).generation
    stop = only(StopEngine, host.handle(TimerFired(), at))
    assert (stop.generation, stop.reason) == (generation, reason)
    ended = EngineEnded(instance_id="a-0", generation=generation, problem=DIED)
    assert only(SetTimer, host.handle(ended, at + 1)).at == at + 2.0
    assert only(StartEngine, host.handle(TimerFired(), at + 2)).reason == "restart"


def test_one_timer_serves_all_instances():
    host = EngineHost(CONFIG)
    effects = host.handle(plan(wanted("a-0")), 0.0)
    assert only(SetTimer, effects).at == 100.0
    assert none_of(SetTimer, host.handle(plan(wanted("a-0"), wanted("a-1")), 10.0))
    effects = host.handle(TimerFired(), 100.0)
    assert only(StopEngine, effects).instance_id == "a-0"
    assert only(SetTimer, effects).at == 110.0


def test_an_instance_whose_policies_alone_change_keeps_its_engine():
    host = EngineHost(CONFIG)
    start = only(StartEngine, host.handle(plan(wanted()), 0.0))
    host.handle(EngineReadied(instance_id="a-0", generation=start.generation), 1.0)
    load = only(LoadEngine, host.handle(ordered(3), 1.0))
    host.handle(
        LoadEnded(
            instance_id="a-0", generation=start.generation, load_id=load.load_id, problem=None
        ),
        2.0,
    )
    effects = host.handle(plan(wanted(policies=("b",))), 3.0)
    assert none_of(StopEngine, effects)
    assert none_of(StartEngine, effects)
    assert host.view("a-0").wanted.policies == ("b",)
    # Orders for its former policy are none of its business any more; those for the new one are.
    assert host.handle(ordered(4), 3.0) == []
    load = only(LoadEngine, host.handle(ordered(3, policy="b", content="g3"), 3.0))
    assert (load.generation, load.fetch) == (start.generation, True)
    assert phase(host) is InstancePhase.LOADING


def test_a_moved_instance_loads_nothing_of_its_former_policy_after_a_restart():
    host = EngineHost(CONFIG)
    start = only(StartEngine, host.handle(plan(wanted()), 0.0))
    host.handle(ordered(3), 0.0)
    host.handle(plan(wanted(policies=("b",))), 0.0)
    effects = host.handle(EngineReadied(instance_id="a-0", generation=start.generation), 1.0)
    assert none_of(LoadEngine, effects)
    assert phase(host) is InstancePhase.EMPTY


def test_a_load_that_is_under_way_when_an_instance_moves_just_ends():
    host = EngineHost(CONFIG)
    start = only(StartEngine, host.handle(plan(wanted()), 0.0))
    host.handle(EngineReadied(instance_id="a-0", generation=start.generation), 1.0)
    load = only(LoadEngine, host.handle(ordered(3), 1.0))
    host.handle(plan(wanted(policies=("b",))), 1.0)
    effects = host.handle(
        LoadEnded(
            instance_id="a-0", generation=start.generation, load_id=load.load_id, problem=None
        ),
        2.0,
    )
    assert only(ReportInstance, effects)
    assert none_of(LoadEngine, effects)

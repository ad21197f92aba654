"""When an instance moves between policies, and where instances go between batches."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.core.balance import BalanceConfig, Balancer
from flexmarl.core.balance_monitor import (
    DEFAULT_TOKENS_PER_S,
    Monitor,
    MoveCosts,
    PolicyLoad,
    drain_s,
)
from flexmarl.core.dispatch_records import PolicyBook
from flexmarl.core.forecast import forecast_moves, share_out


def load(
    policy: str,
    *,
    instances: int = 2,
    waiting: int = 0,
    work: int = 0,
    base: str = "m",
    rate: float = 100.0,
    load_s: float = 0.5,
    restart_s: float = 20.0,
    running: int = 1000,
    places: int = 1,
) -> PolicyLoad:
    """Instances of so many places, each of which does `rate` tokens per second."""
    drains = [
        drain_s(work, running + waiting, n * places, rate)
        for n in (instances, instances - 1, instances + 1)
    ]
    return PolicyLoad(
        policy, base, instances, waiting, work, places * rate, *drains, load_s, restart_s
    )


def balancer(**numbers) -> Balancer:
    return Balancer(BalanceConfig(**{"confirm": 1, **numbers}))


def test_the_slowest_queue_gets_an_instance_from_who_misses_it_least():
    loads = [
        load("busy", waiting=50, work=4000),
        load("idle", work=0),
        load("some", work=300),
    ]
    move = balancer().decide(loads, 0.0)
    assert (move.giver, move.receiver, move.restart) == ("idle", "busy", False)
    assert move.gain_s == pytest.approx(20.0 - 4000 / 300)
    assert "busy takes 20.00 s for its queue with 2 instances" in move.reason


def test_who_has_more_places_than_requests_gives_for_nothing():
    # Its one long call takes 90 s, with three instances or with two.
    waits = load("busy", instances=3, waiting=60, work=8000)
    alone = load("slow", instances=3, work=9000, running=1)
    move = balancer().decide([waits, alone], 0.0)
    assert (move.giver, move.receiver) == ("slow", "busy")
    assert move.gain_s == pytest.approx(8000 / 300 - 8000 / 400)
    # Three calls on three instances of one place would have to wait for each other.
    full = load("slow", instances=3, work=9000, running=3)
    assert balancer().decide([waits, full], 0.0) is None


def test_work_drains_at_the_pace_of_requests_and_places():
    assert drain_s(600, 3, 8, 100.0) == 2.0
    assert drain_s(600, 30, 2, 100.0) == 3.0
    assert drain_s(600, 3, 0, 100.0) == inf
    assert drain_s(0, 0, 4, 100.0) == 0.0


def test_a_last_instance_is_never_given_away():
    loads = [load("busy", waiting=50, work=4000), load("idle", instances=1)]
    assert balancer().decide(loads, 0.0) is None
    assert balancer(rule="queue_gap").decide(loads, 0.0) is None


def test_a_move_that_gains_less_than_it_costs_is_not_made():
    loads = [load("busy", waiting=5, work=200), load("idle")]
    # 1 s falls to 0.67 s: less than 0.5 s and its margin.
    assert balancer().decide(loads, 0.0) is None
    cheap = [load("busy", waiting=5, work=200, load_s=0.1), load("idle")]
    assert balancer().decide(cheap, 0.0) is not None


def test_another_base_model_costs_an_engine_start():
    busy = load("busy", waiting=50, work=4000)
    other = load("other", base="n")
    # 20 s falls to 13.3 s, which 20 s of starting does not pay for.
    assert balancer().decide([busy, other], 0.0) is None
    same = load("same", work=2)
    assert balancer().decide([busy, other, same], 0.0).giver == "same"
    huge = load("busy", waiting=500, work=40_000)
    move = balancer().decide([huge, other], 0.0)
    assert (move.giver, move.restart, move.cost_s) == ("other", True, 20.0)


def test_without_waiting_calls_more_instances_help_nobody():
    loads = [load("busy", waiting=0, work=4000), load("idle")]
    assert balancer().decide(loads, 0.0) is None


def test_a_policy_without_any_instance_comes_first():
    loads = [load("busy", waiting=9, work=9000), load("dead", instances=0, waiting=1, work=5)]
    move = balancer().decide([*loads, load("none", instances=0)], 0.0)
    assert (move.giver, move.receiver) == ("busy", "dead")


def test_a_move_must_be_right_several_times_in_a_row():
    b = balancer(confirm=3)
    wanted = [load("busy", waiting=50, work=4000), load("idle")]
    calm = [load("busy"), load("idle")]
    assert [bool(b.decide(x, 0.0)) for x in (wanted, wanted, calm, wanted, wanted, wanted)] == [
        False, False, False, False, False, True,
    ]  # fmt: skip


def test_what_was_moved_stays_for_a_while():
    b = balancer(residence_s=10.0)
    there = [load("a", waiting=50, work=4000), load("b")]
    back = [load("b", waiting=50, work=4000), load("a")]
    assert b.decide(there, 0.0).receiver == "a"
    b.moved("b", "a", 0.0)
    assert b.decide(back, 5.0) is None
    assert b.decide(there, 5.0) is not None
    assert b.decide(back, 10.0).receiver == "b"
    # Who gave takes nothing back from whom it gave to, but from others.
    b.moved("c", "a", 20.0)
    assert b.decide([load("c", waiting=50, work=4000), load("a"), load("b")], 21.0).giver == "b"


def test_what_samples_will_still_ask_counts_where_queues_are_short():
    short = [load("hot", waiting=3, work=300), load("cold", instances=4, work=100)]
    # 1.5 s fall to 1 s: less than a move costs with its margin.
    assert balancer().decide(short, 0.0) is None
    coming = {"hot": 8000.0, "cold": 800.0}.get
    move = balancer().decide(short, 0.0, coming=coming)
    assert (move.giver, move.receiver) == ("cold", "hot")
    assert move.gain_s == pytest.approx(8000 / 200 - 8000 / 300)
    assert "40.00 s for the rest of its batch with 2 instances" in move.reason
    # Who needs as much gives nothing, nor does anybody while nothing is known.
    assert balancer().decide(short, 0.0, coming={"hot": 800.0, "cold": 8000.0}.get) is None
    assert balancer(rule="queue_gap").decide(short, 0.0, coming=coming) is None


def test_all_work_of_a_batch_is_carried_by_all_places():
    rest = load("p", instances=2, work=100, running=1, places=4).with_all(6400.0)
    assert (rest.drain_s, rest.drain_with_less_s) == (8.0, 16.0)
    assert rest.drain_with_more_s == pytest.approx(6400 / 1200)
    assert rest.work_tokens == 6400
    alone, nobody = (load("p", instances=n).with_all(100.0) for n in (1, 0))
    assert (alone.drain_s, alone.drain_with_less_s) == (1.0, inf)
    assert (nobody.drain_s, nobody.drain_with_more_s) == (inf, 1.0)


def test_queue_gap_compares_queues_alone():
    b = balancer(rule="queue_gap", queue_gap=5)
    assert b.decide([load("a", waiting=6, work=1), load("b", waiting=1)], 0.0) is None
    move = b.decide([load("a", waiting=7, work=1), load("b", waiting=1), load("c", waiting=1)], 0.0)
    assert (move.giver, move.receiver) == ("b", "a")
    assert "7 wait for a, 6 more" in move.reason
    assert balancer(rule="queue_gap").decide([], 0.0) is None


def test_off_moves_nothing():
    loads = [load("busy", waiting=50, work=400_000), load("idle", instances=9)]
    assert balancer(rule="off").decide(loads, 0.0) is None


loads_of_runs = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 40), st.integers(0, 9999), st.sampled_from("mn")),
    min_size=2,
    max_size=6,
)


@given(loads_of_runs, st.sampled_from(["drain_time", "queue_gap"]))
def test_moves_keep_every_policy_served_and_come_to_rest(rows, rule):
    b = balancer(rule=rule, residence_s=0.0)
    counts = [instances for instances, *_ in rows]
    for step in range(200):
        loads = [
            load(f"p{n}", instances=counts[n], waiting=waiting, work=work + waiting, base=base)
            for n, (_, waiting, work, base) in enumerate(rows)
        ]
        move = b.decide(loads, float(step))
        if move is None:
            break
        counts[int(move.giver[1:])] -= 1
        counts[int(move.receiver[1:])] += 1
        b.moved(move.giver, move.receiver, float(step))
        assert min(counts) >= 1
    # With nothing changing but the moves, a rule that looks at drain times ends; a gap of queues
    # does not shrink by moving alone, so that one goes on until nobody may give.
    assert step < 199


def test_rates_and_costs_are_learnt():
    book = PolicyBook("p")
    costs = MoveCosts(load_s=0.5, restart_s=20.0)
    monitor = Monitor({"p": "m"}, book=lambda _: book, costs=costs)
    (first,) = monitor.observe(0.0)
    assert first == PolicyLoad("p", "m", 0, 0, 0, DEFAULT_TOKENS_PER_S, 0.0, 0.0, 0.0, 0.5, 20.0)
    book.num_instances, book.num_places, book.num_waiting, book.waiting_tokens = 2, 8, 3, 70
    book.count_running(1, 30, 1.0)
    book.done_tokens = 500
    (now,) = monitor.observe(3.0)
    assert now.tokens_per_s == pytest.approx(4 * 250.0)
    assert (now.num_instances, now.num_waiting, now.work_tokens) == (2, 3, 100)
    # Four requests, of which four, four and eight have places.
    assert now.drain_s == now.drain_with_less_s == now.drain_with_more_s == 100 / (4 * 250.0)
    book.num_places = 6
    (now,) = monitor.observe(3.0)
    assert now.drain_with_less_s == 100 / (3 * 250.0)
    # Idle time tells nothing; a faster minute outweighs what was before.
    book.count_running(-1, -30, 3.0)
    assert monitor.observe(50.0)[0].tokens_per_s == pytest.approx(3 * 250.0)
    book.count_running(1, 30, 50.0)
    book.done_tokens += 60_000
    assert monitor.observe(110.0)[0].tokens_per_s == pytest.approx(3 * 1000.0, rel=0.2)
    # What ends in no time counts with what ends next.
    rate = monitor.observe(110.0)[0].tokens_per_s
    book.done_tokens += 10
    assert monitor.observe(110.0)[0].tokens_per_s == rate
    costs.loaded("p", 0.1)
    costs.started("m", 3.0)
    costs.loaded("p", 0.2)
    (now,) = monitor.observe(110.0)
    assert (now.load_s, now.restart_s) == (pytest.approx(0.13), 3.0)


def test_instances_are_shared_out_by_work():
    assert share_out({"a": 76.0, "b": 12.0, "c": 12.0}, 12) == {"a": 8, "b": 2, "c": 2}
    assert share_out({"a": 0.0, "b": 0.0}, 2) == {"a": 1, "b": 1}


def test_between_batches_instances_go_where_the_next_one_needs_them():
    loads = [load("a", instances=4), load("b", instances=4), load("c", instances=4)]
    demands = {"a": 7600.0, "b": 1200.0, "c": 1200.0}
    moves = forecast_moves(loads, demands=demands, min_gain=0.2)
    assert [(m.giver, m.receiver) for m in moves] == [("b", "a")] * 2 + [("c", "a")] * 2
    assert "76% of the next batch is for a, which gets 8 instances" in moves[0].reason
    settled = [load("a", instances=8), load("b", instances=2), load("c", instances=2)]
    assert forecast_moves(settled, demands=demands, min_gain=0.2) == []
    # What a little rounding would gain is not worth moving for.
    near = [load("a", instances=7), load("b", instances=3), load("c", instances=2)]
    assert forecast_moves(near, demands=demands, min_gain=0.2) == []


def test_a_forecast_prefers_givers_of_the_same_base():
    loads = [
        load("a", instances=1),
        load("b", instances=3, base="n"),
        load("c", instances=3),
    ]
    demands = {"a": 500.0, "b": 100.0, "c": 100.0}
    moves = forecast_moves(loads, demands=demands, min_gain=0.2)
    assert [(m.giver, m.restart, m.cost_s) for m in moves] == [
        ("c", False, 0.5), ("c", False, 0.5), ("b", True, 20.0), ("b", True, 20.0),
    ]  # fmt: skip


def test_nothing_is_forecast_of_what_was_never_seen():
    assert forecast_moves([load("a"), load("b")], demands={"a": 5.0}, min_gain=0.2) == []
    equal = [load("a"), load("b")]
    assert forecast_moves(equal, demands={"a": 0.0, "b": 0.0}, min_gain=0.2) == []

from __future__ import annotations

import pytest

from flexmarl.core.ledger import Counts, Ledger, Presence, check_apply
from flexmarl.core.passes import Tile, cut_tiles, plan_passes
from flexmarl.core.schedules import Decay, RateSchedule


def test_a_ledger_knows_what_was_added_and_what_was_dropped() -> None:
    ledger = Ledger(batch=3)
    assert ledger.empty
    ledger = ledger.add("a", Counts(num_rows=2, num_tokens=9)).drop("b")
    ledger = ledger.add("c", Counts(num_rows=1, num_tokens=1))
    assert not ledger.empty
    assert not Ledger(batch=3, dropped=("b",)).empty
    assert ledger.counts == Counts(num_rows=3, num_tokens=10)
    assert ledger.counts.denominator("token_mean") == 10.0
    assert ledger.counts.denominator("seq_mean_token_mean") == 3.0
    assert [ledger.presence(name) for name in "abcd"] == [
        Presence.ADDED,
        Presence.DROPPED,
        Presence.ADDED,
        Presence.NEW,
    ]


@pytest.mark.parametrize("name", ["a", "b"])
def test_nothing_comes_into_a_sum_twice(name: str) -> None:
    ledger = Ledger(batch=0).add("a", Counts()).drop("b")
    with pytest.raises(ValueError, match=name):
        ledger.add(name, Counts())
    with pytest.raises(ValueError, match=name):
        ledger.drop(name)


def test_an_apply_must_find_exactly_what_it_names() -> None:
    ledger = Ledger(batch=0).add("b", Counts()).add("a", Counts()).drop("c")
    assert check_apply(ledger, ["a", "b", "c"]).exact
    check = check_apply(ledger, ["a", "z", "c", "y"])
    assert check.missing == ("y", "z")
    assert check.unexpected == ("b",)
    assert not check.exact
    assert not check_apply(ledger, ["a", "b"]).exact


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("max_tokens", [1, 12, 40, 10_000])
@pytest.mark.parametrize("lengths", [[], [5], [3, 9, 9, 1, 4], list(range(1, 30))])
def test_passes_cover_each_row_once_equally_often_per_rank(
    lengths: list[int], max_tokens: int, world_size: int
) -> None:
    plan = plan_passes(lengths, world_size=world_size, max_tokens=max_tokens)
    assert len(plan) == world_size
    counts = {len(passes) for passes in plan}
    assert len(counts) == 1
    assert counts.pop() >= 1
    rows = [row for passes in plan for chosen in passes for row in chosen]
    assert sorted(rows) == list(range(len(lengths)))
    for passes in plan:
        for chosen in passes:
            assert sum(lengths[row] for row in chosen) <= max_tokens or len(chosen) == 1


def test_ranks_get_about_equal_work() -> None:
    lengths = list(range(1, 101))
    plan = plan_passes(lengths, world_size=2, max_tokens=10_000)
    work = [sum(lengths[row] for chosen in passes for row in chosen) for passes in plan]
    assert abs(work[0] - work[1]) <= 2


def test_a_learning_rate_rises_with_updates() -> None:
    schedule = RateSchedule(peak=1.0, warmup_updates=4)
    assert [schedule.at(n) for n in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert RateSchedule(peak=0.5).at(0) == 0.5


@pytest.mark.parametrize(
    ("decay", "rates"),
    [("linear", [0.5, 1.0, 0.8, 0.6, 0.6]), ("cosine", [0.5, 1.0, 0.8, 0.6, 0.6])],
)
def test_a_learning_rate_falls_to_its_last_share(decay: Decay, rates: list[float]) -> None:
    schedule = RateSchedule(
        peak=1.0, warmup_updates=2, decay=decay, total_updates=10, final_share=0.6
    )
    got = [schedule.at(n) for n in (0, 2, 6, 10, 99)]
    assert got == pytest.approx(rates)
    assert schedule.at(3) < 1.0
    assert (schedule.at(3) > 1.0 - 0.4 / 8) is (decay == "cosine")


def test_dr_grpo_divides_by_rows_times_the_configured_limit() -> None:
    counts = Counts(num_rows=2, num_tokens=4)
    assert counts.denominator("dr_grpo", response_limit=3) == 6.0
    assert counts.denominator("seq_mean_token_sum", response_limit=3) == 2.0


@pytest.mark.parametrize(
    ("row_ends", "max_tokens", "expected"),
    [
        ((1,), 4, [Tile(0, 1, 0, 1)]),
        ((2, 4), 4, [Tile(0, 2, 0, 4)]),
        ((2, 4, 5), 4, [Tile(0, 2, 0, 4), Tile(2, 1, 4, 5)]),
        ((9, 10), 4, [Tile(0, 1, 0, 9), Tile(1, 1, 9, 10)]),
        ((1, 9, 10), 4, [Tile(0, 1, 0, 1), Tile(1, 1, 1, 9), Tile(2, 1, 9, 10)]),
        ((0, 3, 3, 6), 4, [Tile(0, 3, 0, 3), Tile(3, 1, 3, 6)]),
    ],
)
def test_tiles_are_whole_rows_within_the_bound(
    row_ends: tuple[int, ...], max_tokens: int, expected: list[Tile]
) -> None:
    assert list(cut_tiles(row_ends, max_tokens=max_tokens)) == expected

"""Bounds on queries and samples in progress."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from flexmarl.core.admission import Admission


def offer(admission: Admission, group: int, sample: int) -> list[str]:
    name = f"g{group}s{sample}"
    return admission.offer(name, group_id=f"g{group}", order=(0, group))


def ended(admission: Admission, name: str) -> list[str]:
    return admission.ended(name, group_id=name.partition("s")[0])


def test_without_bounds_everything_starts_at_once():
    admission = Admission()
    assert offer(admission, 3, 0) == ["g3s0"]
    assert offer(admission, 3, 0) == ["g3s0"]  # again, after a crash of its worker
    assert ended(admission, "g3s0") == []
    assert ended(admission, "g3s0") == []
    assert admission.num_waiting == 0


def test_queries_and_samples_of_each_are_bounded_and_the_oldest_goes_first():
    admission = Admission(max_queries=2, max_samples_per_query=1)
    assert offer(admission, 5, 0) == ["g5s0"]
    assert offer(admission, 5, 1) == []
    assert offer(admission, 7, 0) == ["g7s0"]
    assert offer(admission, 9, 0) == []
    assert offer(admission, 6, 0) == []
    assert admission.num_waiting == 3
    assert ended(admission, "g7s0") == ["g6s0"]
    assert ended(admission, "g5s0") == ["g5s1"]
    assert ended(admission, "g6s0") == ["g9s0"]


def test_a_sample_that_ends_while_it_waits_gives_up_its_turn():
    admission = Admission(max_queries=1)
    assert offer(admission, 0, 0) == ["g0s0"]
    assert offer(admission, 0, 1) == ["g0s1"]  # samples of one query are not bounded
    assert offer(admission, 1, 0) == []
    assert ended(admission, "g1s0") == []
    assert ended(admission, "g0s0") == []
    assert ended(admission, "g0s1") == []
    assert offer(admission, 2, 0) == ["g2s0"]


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 3)), max_size=80),
    st.one_of(st.none(), st.integers(1, 3)),
    st.one_of(st.none(), st.integers(1, 2)),
)
def test_bounds_hold_and_nothing_is_forgotten(moves, max_queries, max_samples):
    admission = Admission(max_queries=max_queries, max_samples_per_query=max_samples)
    offered, running = {}, {}
    for is_offer, group, sample in moves:
        name = f"g{group}s{sample}"
        if is_offer and name not in offered:
            offered[name] = None
            started = offer(admission, group, sample)
        elif not is_offer:
            offered.pop(name, None)
            running.pop(name, None)
            started = ended(admission, name)
        else:
            continue
        running |= dict.fromkeys(started)
        per_query = Counter(name.partition("s")[0] for name in running)
        assert len(per_query) <= (max_queries or 99)
        assert all(count <= (max_samples or 99) for count in per_query.values())
        assert admission.num_waiting == len(offered) - len(running)
    while running:
        name = next(iter(running))
        del running[name], offered[name]
        running |= dict.fromkeys(ended(admission, name))
    assert not offered

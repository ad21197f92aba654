"""What may be written into the stored graph."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.core import graph_rules as rules
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.graph_rules import WriteOutcome
from flexmarl.core.states import GroupStatus, SampleStatus, VertexStatus

SAMPLE = "b000001a0-g0002-s003a4"


def refused(reason: ErrorReason):
    return pytest.raises(DomainError, match=reason.value)


class TestIds:
    def test_agreeing_ids_pass(self):
        rules.check_sample_ids(
            sample_id=SAMPLE,
            group_id="b000001a0-g0002",
            batch=1,
            batch_attempt=0,
            sample_attempt=4,
        )
        rules.check_vertex_ids(
            [f"{SAMPLE}/0.1:2", f"{SAMPLE}/0:0"],
            sample_ids=[SAMPLE, SAMPLE],
            paths=["0.1:2", "0:0"],
        )

    @pytest.mark.parametrize(
        "wrong",
        [
            {"group_id": "b000001a0-g0003"},
            {"batch": 2},
            {"batch_attempt": 1},
            {"sample_attempt": 0},
            {"sample_id": "../x"},
        ],
    )
    def test_disagreeing_ids_are_refused(self, wrong):
        ids = {
            "sample_id": SAMPLE,
            "group_id": "b000001a0-g0002",
            "batch": 1,
            "batch_attempt": 0,
            "sample_attempt": 4,
        }
        with pytest.raises(ValueError, match="sample"):
            rules.check_sample_ids(**{**ids, **wrong})

    def test_ordinal_is_the_ids(self):
        rules.check_sample_ordinal(sample_id=SAMPLE, ordinal=3)
        with pytest.raises(ValueError, match="its ordinal is another"):
            rules.check_sample_ordinal(sample_id=SAMPLE, ordinal=4)

    @pytest.mark.parametrize("path", ["", "0", "../0:0", "0:\ud800", "0:a/b"])
    def test_malformed_path_is_refused(self, path):
        with pytest.raises(ValueError, match="path"):
            rules.check_vertex_ids([f"{SAMPLE}/{path}"], sample_ids=[SAMPLE], paths=[path])

    def test_vertex_id_of_another_sample_is_refused(self):
        with pytest.raises(ValueError, match="vertex id"):
            rules.check_vertex_ids(["x/0:0"], sample_ids=[SAMPLE], paths=["0:0"])


class TestVertices:
    @pytest.mark.parametrize("status", [VertexStatus.READY, VertexStatus.RUNNING])
    def test_only_ended_ones_are_stored(self, status):
        with refused(ErrorReason.INVALID_ARGUMENT):
            rules.check_ended("v", status)

    def test_ended_one_passes(self):
        rules.check_ended("v", VertexStatus.CANCELLED)

    @pytest.mark.parametrize(
        ("known", "same", "late", "closed", "outcome"),
        [
            (False, False, False, False, WriteOutcome.ACCEPTED),
            (True, True, False, False, WriteOutcome.UNCHANGED),
            (True, True, True, True, WriteOutcome.UNCHANGED),
            (True, False, False, False, WriteOutcome.DUPLICATE),
            (True, False, True, True, WriteOutcome.DUPLICATE),
            (False, False, True, True, WriteOutcome.DUPLICATE),
            (False, False, False, True, WriteOutcome.SUBGRAPH_CLOSED),
        ],
    )
    def test_outcomes(self, known, same, late, closed, outcome):
        decided = rules.decide_vertex(known=known, same=same, late=late, subgraph_closed=closed)
        assert decided is outcome


class TestSamples:
    @pytest.mark.parametrize(
        ("known", "new", "same", "group_open", "outcome"),
        [
            (None, SampleStatus.OPEN, False, True, WriteOutcome.ACCEPTED),
            (None, SampleStatus.DONE, False, True, WriteOutcome.ACCEPTED),
            (None, SampleStatus.DONE, False, False, WriteOutcome.DUPLICATE),
            (SampleStatus.OPEN, SampleStatus.OPEN, False, True, WriteOutcome.ACCEPTED),
            (SampleStatus.OPEN, SampleStatus.FAILED, False, True, WriteOutcome.ACCEPTED),
            (SampleStatus.OPEN, SampleStatus.DONE, False, False, WriteOutcome.DUPLICATE),
            (SampleStatus.DONE, SampleStatus.DONE, True, False, WriteOutcome.UNCHANGED),
            (SampleStatus.DONE, SampleStatus.OPEN, False, True, WriteOutcome.DUPLICATE),
            (SampleStatus.FAILED, SampleStatus.DONE, False, True, WriteOutcome.DUPLICATE),
        ],
    )
    def test_outcomes(self, known, new, same, group_open, outcome):
        decided = rules.decide_sample(known=known, new=new, same=same, group_open=group_open)
        assert decided is outcome

    @pytest.mark.parametrize(
        ("known", "new", "group_open", "cancelled"),
        [
            (SampleStatus.OPEN, SampleStatus.DONE, False, True),
            (SampleStatus.OPEN, SampleStatus.CANCELLED, False, True),
            (SampleStatus.OPEN, SampleStatus.DONE, True, False),
            (SampleStatus.OPEN, SampleStatus.OPEN, False, False),
            (SampleStatus.FAILED, SampleStatus.DONE, False, False),
            (None, SampleStatus.DONE, False, False),
        ],
    )
    def test_one_that_its_group_did_not_wait_for_ends_cancelled(
        self, known, new, group_open, cancelled
    ):
        assert rules.ends_cancelled(known=known, new=new, group_open=group_open) is cancelled


class TestClosures:
    def test_open_group_closes_and_the_same_end_again_is_unchanged(self):
        first = rules.decide_closure("g", known=GroupStatus.OPEN, new=GroupStatus.CLOSED)
        again = rules.decide_closure("g", known=GroupStatus.CLOSED, new=GroupStatus.CLOSED)
        assert (first, again) == (WriteOutcome.ACCEPTED, WriteOutcome.UNCHANGED)

    @pytest.mark.parametrize(
        ("known", "new"),
        [
            (GroupStatus.CLOSED, GroupStatus.DROPPED),
            (GroupStatus.DROPPED, GroupStatus.OPEN),
            (GroupStatus.OPEN, GroupStatus.OPEN),
        ],
    )
    def test_other_moves_are_refused(self, known, new):
        with refused(ErrorReason.STATE_TRANSITION_REFUSED):
            rules.decide_closure("g", known=known, new=new)


class TestRelease:
    def decide(self, **changes):
        given_ = {
            "status": VertexStatus.DONE,
            "trainable": True,
            "is_void": False,
            "stored": None,
            "reward": 1.0,
            "advantage": 0.5,
        }
        return rules.decide_release("v", **{**given_, **changes})

    def test_finished_row_is_released_once(self):
        assert self.decide() is WriteOutcome.ACCEPTED
        assert self.decide(stored=(1.0, 0.5)) is WriteOutcome.UNCHANGED

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("name", ["reward", "advantage"])
    def test_numbers_must_be_finite(self, name, value):
        with refused(ErrorReason.REWARD_INVALID):
            self.decide(**{name: value})

    @pytest.mark.parametrize(
        "change",
        [
            {"status": VertexStatus.CANCELLED},
            {"trainable": False},
            {"is_void": True},
            {"stored": (1.0, 0.4)},
        ],
    )
    def test_other_rows_are_refused(self, change):
        with refused(ErrorReason.STATE_TRANSITION_REFUSED):
            self.decide(**change)


class TestClaims:
    @pytest.mark.parametrize("owner", [None, "m1"])
    def test_released_row_without_other_owner_passes(self, owner):
        rules.check_claim("v", released=True, is_void=False, owner=owner, micro_batch_id="m1")

    def test_second_owner_is_refused(self):
        with refused(ErrorReason.ROW_ALREADY_MARKED):
            rules.check_claim("v", released=True, is_void=False, owner="m0", micro_batch_id="m1")

    @pytest.mark.parametrize(("released", "is_void"), [(False, False), (True, True)])
    def test_unreleased_or_void_row_is_refused(self, released, is_void):
        with refused(ErrorReason.STATE_TRANSITION_REFUSED):
            rules.check_claim(
                "v", released=released, is_void=is_void, owner=None, micro_batch_id="m1"
            )


class TestEdges:
    def test_stored_and_new_upstreams_pass(self):
        new = {"s/0:1": ["s/0:0"], "s/0:2": ["s/0:1", "s/0:0"]}
        rules.check_edges(new, is_stored=lambda vertex: vertex == "s/0:0")

    def test_no_new_upstream_needs_no_order(self):
        rules.check_edges({"s/0:1": ["s/0:0"], "s/0:2": []}, is_stored=lambda _: True)

    def test_calls_without_edges_ask_nobody(self):
        asked: list[str] = []
        rules.check_edges({"s/0:1": [], "s/0:2": ()}, is_stored=asked.append)
        assert not asked

    def test_upstream_may_come_after_its_downstream(self):
        rules.check_edges({"s/0:2": ["s/0:1"], "s/0:1": ()}, is_stored=lambda _: False)

    @pytest.mark.parametrize(
        "new",
        [
            {"s/0:1": ["s/0:0"]},
            {"s/0:1": ["t/0:0"]},
            {"s/0:1": ["s/0:1"]},
            {"s/0:1": ["s/0:2"], "s/0:2": ["s/0:1"]},
        ],
        ids=["dangling", "other sample", "self", "cycle"],
    )
    def test_wrong_edges_are_refused(self, new):
        with refused(ErrorReason.INVALID_ARGUMENT):
            rules.check_edges(new, is_stored=lambda _: False)

    @given(st.integers(1, 12), st.randoms(use_true_random=False))
    def test_order_puts_every_upstream_first(self, size, rng):
        names = [f"v{number:02d}" for number in range(size)]
        shuffled = names[:]
        rng.shuffle(shuffled)
        edges = {
            name: [u for u in shuffled[:position] if rng.random() < 0.4]
            for position, name in enumerate(shuffled)
        }
        order = rules.topological_order(edges)
        assert sorted(order) == names
        place = {name: position for position, name in enumerate(order)}
        assert all(place[u] < place[v] for v, ups in edges.items() for u in ups)

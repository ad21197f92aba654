"""Placement of groups on shards, and the cursor of a watch over several."""

from __future__ import annotations

from collections import Counter

import pytest

from flexmarl.core.ids import group_of
from flexmarl.core.shard_placement import Placement
from flexmarl.core.watch_cursor import read_cursor, write_cursor

GROUPS = [f"b{batch:06d}a0-g{ordinal:04d}" for batch in range(20) for ordinal in range(50)]
THREE = ("s0", "s1", "s2")


class TestPlacement:
    def test_groups_are_spread_evenly(self):
        placed = Counter(Placement(THREE).of_group(group) for group in GROUPS)
        assert set(placed) == set(THREE)
        assert max(placed.values()) < 1.2 * len(GROUPS) / 3

    def test_it_is_the_same_everywhere(self):
        assert [Placement(THREE).of_group(group) for group in GROUPS[:6]] == [
            Placement(("s0", "s2", "s1")).of_group(group) for group in GROUPS[:6]
        ]
        first = [Placement(THREE).of_group(group) for group in GROUPS[:8]]
        assert first == ["s0", "s2", "s0", "s2", "s2", "s2", "s1", "s1"]

    def test_all_below_a_group_is_with_it(self):
        placement = Placement(THREE)
        for group in GROUPS[:20]:
            shard = placement.of_group(group)
            assert placement.of_row(f"{group}-s002a1") == shard
            assert placement.of_row(f"{group}-s002a1/0.1:0") == shard

    def test_loss_moves_only_the_groups_of_the_lost_shard(self):
        before, after = Placement(THREE), Placement(THREE, frozenset({"s1"}))
        assert after.alive == ("s0", "s2")
        for group in GROUPS:
            old, new = before.of_group(group), after.of_group(group)
            assert new == old if old != "s1" else new in after.alive

    @pytest.mark.parametrize(
        ("shards", "lost"),
        [((), ()), (("s0", "s0"), ()), (("../x",), ()), (THREE, ("s0",)), (THREE, ("s9",))],
    )
    def test_malformed_lists_are_refused(self, shards, lost):
        with pytest.raises(ValueError, match="shard"):
            Placement(shards, frozenset(lost))

    @pytest.mark.parametrize("text", ["", "b1", "b000000a0", "b000000a0-g0000x", "x-g0000"])
    def test_what_has_no_group_is_refused(self, text):
        with pytest.raises(ValueError, match="not an id of a group"):
            group_of(text)


class TestCursor:
    @pytest.mark.parametrize("positions", [{"s0": 7}, {"s0": 7, "s1": 0, "s2": 12}])
    def test_it_comes_back(self, positions):
        assert read_cursor(write_cursor(positions), tuple(positions)) == positions

    def test_empty_means_the_oldest(self):
        assert read_cursor("", THREE) == {"s0": 0, "s1": 0, "s2": 0}

    @pytest.mark.parametrize(
        ("text", "shards"),
        [
            ("x", ("s0",)),
            ("-1", ("s0",)),
            ("7", ("s0", "s1")),
            ("s0=1", ("s0", "s1")),
            ("s0=1,s2=2", ("s0", "s1")),
            ("s0=1,s1=x", ("s0", "s1")),
            ("s0=1=2,s1=2", ("s0", "s1")),
        ],
    )
    def test_cursor_of_another_watch_is_refused(self, text, shards):
        with pytest.raises(ValueError, match="is not of a watch"):
            read_cursor(text, shards)

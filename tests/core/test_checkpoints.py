from __future__ import annotations

from flexmarl.core.checkpoints import CheckpointRule

RULE = CheckpointRule(every=5, keep=2)


def test_every_so_many_versions_and_the_last_one_are_written() -> None:
    assert [v for v in range(13) if RULE.is_due(v, last=12)] == [5, 10, 12]


def test_the_newest_are_kept_however_many_there_are() -> None:
    assert RULE.surplus([], newest=10) == []
    assert RULE.surplus([10, 5], newest=10) == []
    assert RULE.surplus([20, 5, 15, 10], newest=20) == [5, 10]


def test_those_that_a_return_gave_up_go_and_do_not_count() -> None:
    assert RULE.surplus([20, 15, 10, 5], newest=10) == [15, 20]
    assert RULE.surplus([20, 15, 10, 5, 1], newest=10) == [1, 15, 20]

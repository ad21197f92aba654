from __future__ import annotations

from flexmarl.core.checkpoints import CheckpointRule

RULE = CheckpointRule(every=5, keep=2)


def test_every_so_many_versions_and_the_last_one_are_written() -> None:
    assert [v for v in range(13) if RULE.is_due(v, last=12)] == [5, 10, 12]


def test_the_newest_are_kept_however_many_there_are() -> None:
    assert RULE.surplus([]) == []
    assert RULE.surplus([10, 5]) == []
    assert RULE.surplus([20, 5, 15, 10]) == [5, 10]

"""The script by which CI says whether a run learnt."""

from __future__ import annotations

import pytest

from scripts.check_metrics import problems


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([0.1, *[0.95] * 9], []),
        ([], ["no version was trained"]),
        ([0.1] * 10, ["the last 5 versions have 0.100, not above 0.9"]),
        ([0.5, *[0.95] * 9], ["version 0 has 0.500, not below 0.3"]),
        ([0.1, *[0.95] * 8], ["9 versions instead of 10"]),
        (
            [0.1, *[0.95] * 8, float("nan")],
            ["a reward is not finite", "the last 5 versions have nan, not above 0.9"],
        ),
    ],
)
def test_problems_are_named(rewards: list[float], said: list[str]) -> None:
    assert problems(rewards, versions=10, first_below=0.3, last_above=0.9) == said

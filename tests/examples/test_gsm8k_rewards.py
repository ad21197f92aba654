"""The GSM8K team's rewards: numbers as models really write them."""

from __future__ import annotations

import pytest

from examples.gsm8k import rewards
from flexmarl.rollout.workflow import FinishedSample, Output

GOLD = (
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
    "Natalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.\n#### 72"
)


def score(text: str, gold: str, *, ended: bool = True) -> float:
    return rewards.solution_reward(text, gold, ended=ended)


@pytest.mark.parametrize(
    ("text", "truths"),
    [
        ("48/2 = 24", [True]),
        ("48 / 2 = 25", [False]),
        ("$3 x 4 = $12.", [True]),
        ("3 \u00d7 4 = 12, then 12 \u00f7 5 = 2.4", [True, True]),
        ("200 * 50% = 100", [True]),
        ("20% + 10% = 30%", [True]),
        ("20% + 10% = 40%", [False]),
        ("(2 + 3) * 4 = 20", [True]),
        ("((2 + 3) * 4 = 20", []),
        ("10 / 3 = 3.33", [True]),
        ("10 / 3 = 3", [False]),
        ("3 - 5 = -2", [True]),
        ("3 / 0 = 0", []),
        ("1,000 + 1 = 1,001", [True]),
        ("He has 5. 3 + 4 = 7", [True]),
        ("<<48+24=72>>72", [True]),
        ("x = 3", []),
        ("1 + 1 = two", []),
        ("9 ** 9 ** 9 = 1", []),
        ("1+1=2 " * 100, [True] * rewards.MAX_EQUATIONS),
    ],
)
def test_equations_are_checked(text: str, truths: list[bool]) -> None:
    assert rewards.equations(text) == truths


def test_a_right_solution_earns_everything() -> None:
    text = "48 / 2 = 24\n48 + 24 = 72\nAnswer: 72"
    assert score(text, GOLD) == pytest.approx(1.5)


def test_parts_are_earned_apart() -> None:
    assert score("", GOLD) == 0.0
    assert score("Answer: 5", GOLD) == pytest.approx(0.1)
    assert score("48 / 2 = 24", GOLD) == pytest.approx(0.3 / 2 + 0.1)
    assert score("48 / 2 = 25", GOLD) == 0.0
    assert score("It is 72", GOLD) == pytest.approx(1.0 + 0.15)


@pytest.mark.parametrize(
    ("ending", "counts"),
    [("Answer: 7", True), ("Answer: 7\n", True), ("Answer: 7 ducks", False), ("Answer: N", False)],
)
def test_the_ending_is_strict(ending: str, counts: bool) -> None:
    assert score(ending, "#### 8") == pytest.approx(0.1 if counts else 0.0)


def test_a_text_that_was_cut_did_not_end() -> None:
    assert score("Answer: 7", "#### 8", ended=False) == 0.0


def test_agents_are_scored_by_their_own_texts() -> None:
    texts = {"solver": "48 / 2 = 25", "verifier": "No.", "refiner": "Answer: 72"}
    calls = tuple(
        Output(
            text=text,
            tokens=(),
            finish_reason="stop",
            vertex_id=agent,
            agent=agent,
            path=agent,
            value=text,
        )
        for agent, text in texts.items()
    )
    found = rewards.reward(FinishedSample({"answer": GOLD}, texts["refiner"], calls))
    assert found.team == pytest.approx(1.0 + 0.15 + 0.1)
    assert found.agents == {"solver": 0.0, "verifier": 1.0, "refiner": found.team}
    assert found.metrics == {"exact": 1.0}


def test_gold_without_steps_is_its_own_step() -> None:
    assert rewards.steps_found("so 8", "It is eight.\n#### 8") == 1.0
    assert rewards.steps_found("so 9", "It is eight.\n#### 8") == 0.0


@pytest.mark.parametrize(
    ("text", "draft", "value"),
    [
        ("Yes, it is.", "1 + 1 = 2", 1.0),
        ("**No**", "1 + 1 = 3", 1.0),
        ("That is not true.", "1 + 1 = 3", 1.0),
        ("Yes.", "1 + 1 = 3", 0.1),
        ("Yes.", "no equation", 0.1),
        ("Incorrect", "1 + 1 = 2", 0.1),
        ("I like yesterday", "1 + 1 = 2", 0.0),
        ("", "1 + 1 = 2", 0.0),
    ],
)
def test_the_verifier_is_judged_by_the_equations(text: str, draft: str, value: float) -> None:
    assert rewards.verdict_reward(text, draft) == value

"""What an engine answers to the probe prompt, held against what the trainer said."""

from __future__ import annotations

import math

import pytest

from flexmarl.core.weights_probe import (
    PROBE_ATTRIBUTE,
    probe_fault,
    probe_prompt,
    read_probe,
    write_probe,
)


@pytest.mark.parametrize("vocab_size", [2, 24, 49_152])
def test_the_prompt_is_of_the_vocabulary(vocab_size: int) -> None:
    prompt = probe_prompt(vocab_size)
    assert len(prompt) > 10
    assert all(0 <= token < vocab_size for token in prompt)
    assert len(set(prompt)) == min(vocab_size, len(prompt))


def test_an_answer_comes_back_from_the_attribute() -> None:
    said = [-1.25, -0.0000004, -17.1234567]
    assert read_probe({PROBE_ATTRIBUTE: write_probe(said)}) == pytest.approx(said, abs=1e-6)
    assert read_probe({}) == []


@pytest.mark.parametrize(
    ("answered", "dtype", "fault"),
    [
        ([-1.0, -2.0], "float32", ""),
        ([-1.005, -1.995], "float32", ""),
        ([-1.05, -2.0], "float32", "by 0.025 on average"),
        ([-1.05, -2.0], "bfloat16", ""),
        ([-2.2, -2.0], "float16", "by 0.6 on average"),
        ([-1.0, math.nan], "bfloat16", "not finite"),
        ([-1.0, -math.inf], "float32", "not finite"),
    ],
)
def test_an_answer_is_held_against_the_trainers(answered, dtype: str, fault: str) -> None:
    found = probe_fault([-1.0, -2.0], answered, dtype=dtype)
    assert (fault in found) if fault else not found


def test_where_nobody_asked_the_weights_a_finite_answer_will_do() -> None:
    assert probe_fault([], [-3.0], dtype="float32") == ""
    assert "not finite" in probe_fault([], [math.nan], dtype="float32")

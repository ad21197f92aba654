"""What a row takes, and how what it does not take is told."""

from __future__ import annotations

import pytest

from flexmarl.core import row_limits as limits
from flexmarl.core.errors import ErrorReason


def test_what_is_bounded_apart_fits_together() -> None:
    tool = 2 * limits.MAX_VALUE_BYTES
    assert tool < limits.MAX_PAYLOAD_BYTES
    assert limits.MAX_PROMPT_BYTES < limits.MAX_PAYLOAD_BYTES
    failure = 4 * limits.MAX_TEXT_CHARS + limits.MAX_FACTS_BYTES
    assert limits.MAX_UPSTREAM_BYTES + failure < limits.MAX_META_BYTES
    assert limits.MAX_VALUE_BYTES + failure < limits.MAX_SAMPLE_BYTES


@pytest.mark.parametrize(
    ("prompt", "response", "may"),
    [(1_000_000, 0, False), (1_000_000, 100_000, False), (0, 700_000, True), (2_000_000, 0, True)],
)
def test_few_tokens_are_known_to_fit(prompt: int, response: int, may: bool) -> None:
    asked = limits.may_exceed(num_prompt_tokens=prompt, num_response_tokens=response)
    assert asked is may


def test_a_refusal_says_what_how_much_and_what_to_do() -> None:
    error = limits.too_large("agent 'a'", size_bytes=9, max_bytes=8, remedy="say less")
    assert error.reason is ErrorReason.ROW_TOO_LARGE
    assert error.message == "agent 'a': 9 bytes, more than 8; say less"
    assert error.metadata == {"size_bytes": "9", "max_bytes": "8"}


def test_texts_are_cut_and_made_fit_to_be_sent() -> None:
    assert limits.clipped("as it is") == "as it is"
    assert limits.clipped("\ud800x") == "?x"
    long = limits.clipped("y" * 5000)
    assert long.endswith("y... (5000 characters)")
    assert len(long) < 4200

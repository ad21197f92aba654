r"""Numbers in what models and people write: `$1,234.50`, `-5`, `18.`, `\boxed{72}`."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import Final

DIGITS: Final = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
"""A number without sign, as a regular expression; a closing dot does not belong to it."""

# A minus is a sign unless it follows a digit or a bracket: "10-5" holds 10 and 5.
_NUMBER = re.compile(rf"((?:(?<![\d)])[-\u2212])?(?:\$\s?[-\u2212]?)?)({DIGITS})")
_MARKER = re.compile(r"####|\banswer\s*(?:is|:)\s*:?|\\boxed\s*\{", re.IGNORECASE)


def final_answer(text: str) -> Fraction | None:
    r"""The number that a text ends up with; None without any.

    It is the first one after the last `Answer:`, `answer is`, `####` or `\boxed{`, however much
    follows, else the last number of the text.
    """
    markers = list(_MARKER.finditer(text))
    after = numbers(text[markers[-1].end() :]) if markers else []
    if after:
        return after[0]
    everywhere = numbers(text)
    return everywhere[-1] if everywhere else None


def numbers(text: str) -> list[Fraction]:
    """All numbers, without currency signs, thousands' commas and closing dots; signs are kept."""
    return [
        -_value(digits) if "-" in sign or "\u2212" in sign else _value(digits)
        for sign, digits in _NUMBER.findall(text)
    ]


def _value(digits: str) -> Fraction:
    # By way of Decimal: a model may write thousands of digits, which int() refuses to read.
    return Fraction(Decimal(digits.replace(",", "")))

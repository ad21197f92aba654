"""When an engine that says nothing is asked, and when it is given up.

Only an answer tells a long computation from a hang: an engine answers between two steps, whatever
it works on. So silence alone ends nothing; silence after a question does.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

_ASK_AFTER: Final = 0.25
"""Share of the patience after which a silent engine is asked."""


class Verdict(Enum):
    """What to do about an engine."""

    FINE = "fine"
    ASK = "ask"
    HANGS = "hangs"


def judge_silence(
    *, heard_at: float, asked_at: float | None, now: float, silence_s: float
) -> Verdict:
    """Says what to do about an engine that has work.

    Args:
        heard_at: When it said something last.
        asked_at: When it was asked last; None before the first time.
        now: Seconds, on the same clock.
        silence_s: How long it may take to answer.
    """
    if asked_at is not None and asked_at >= heard_at:
        return Verdict.HANGS if now - asked_at >= silence_s else Verdict.FINE
    return Verdict.ASK if now - heard_at >= _ASK_AFTER * silence_s else Verdict.FINE

"""A fixed prompt by which an engine shows that it computes with the weights it was given.

The trainer says with the weights what log-probabilities they give the prompt's tokens. An engine
whose memory cannot be read back, such as vLLM with packed weights, is asked the same before it
serves them: a parameter that did not arrive moves the answer by whole units, rounding by
hundredths.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Final

PROBE_ATTRIBUTE: Final = "probe_logprobs"
"""Attribute of a weights segment that holds the answer."""

_TOKENS: Final = 24

_TOLERANCES: Final[Mapping[str, float]] = {"float64": 1e-2, "float32": 1e-2}
_HALF_TOLERANCE: Final = 0.5
"""For two bytes an element: a token of log-probability -20 is off by a tenth."""


def probe_prompt(vocab_size: int) -> list[int]:
    """Tokens all over a vocabulary."""
    return [(7 + 13 * i) % vocab_size for i in range(_TOKENS)]


def write_probe(logprobs: Sequence[float]) -> str:
    """The attribute's text."""
    return json.dumps([round(logprob, 6) for logprob in logprobs])


def read_probe(attributes: Mapping[str, str]) -> list[float]:
    """What the attribute of a segment says; empty where nobody asked the weights."""
    text = attributes.get(PROBE_ATTRIBUTE)
    return [] if text is None else [float(logprob) for logprob in json.loads(text)]


def probe_fault(expected: Sequence[float], answered: Sequence[float], *, dtype: str) -> str:
    """Says what is wrong with an engine's answer; "" when nothing is.

    Args:
        expected: Log-probability of each token but the first under the weights; empty if unknown.
        answered: The engine's.
        dtype: The engine's.
    """
    if not all(math.isfinite(logprob) for logprob in answered):
        return "log-probs of the probe are not finite"
    if not expected:
        return ""
    gap = sum(abs(a - b) for a, b in zip(expected, answered, strict=True)) / len(expected)
    if gap <= _TOLERANCES.get(dtype, _HALF_TOLERANCE):
        return ""
    return (
        f"log-probs of the probe differ from the trainer's by {gap:.2g} on average: the engine "
        "computes with other weights than it was given"
    )

"""What an advantage estimator is: a baseline over a scope's rewards, and what it declares.

An estimator declares its scope, because a row is released when its scope is closed, and the columns
that a row must have by then. It is a pure function of the scope's values, one per finished sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

Scope = Literal["group", "agent", "call_site"]
"""Rewards compared: the team's in the group, the agent's in it, or those of the same call in it."""

ReleaseScope = Literal["group", "agent", "call_site", "batch"]
"""What has to be closed before a row can be released."""

Centre = Callable[[float, float], float]
"""Advantage of (a row's own reward, the value of its sample in the scope)."""

WHITEN_EPSILON: Final = 1e-8
"""Added to the variance when a whole batch is whitened."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and sample standard deviation (n - 1) of some values; that of one value is 0."""

    count: int
    mean: float
    std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """How the rewards of a scope become advantages.

    Attributes:
        name: What a run's config calls it.
        scopes: Scopes that it may be used with; the first is its default.
        columns: Columns that a row must have before it can be released.
        baseline: Makes `Centre` of the values of a scope, whether to divide by their standard
            deviation, and the epsilon of that division.
        normalizes: Whether it divides by the standard deviation unless told otherwise.
        optional: Whether it can be told otherwise.
        whitens_batch: Whether advantages are whitened over the whole batch; then a row's scope is
            the batch, and no row is released before the last group ended.
    """

    name: str
    scopes: tuple[Scope, ...]
    baseline: Callable[[Sequence[float], bool, float], Centre]
    normalizes: bool
    optional: bool = False
    whitens_batch: bool = False
    columns: tuple[str, ...] = ("reward",)


def moments(values: Sequence[float]) -> Moments:
    """Returns mean and sample standard deviation of at least one value."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Moments(1, mean, 0.0)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Moments(count, mean, math.sqrt(variance))


def whitening(values: Sequence[float]) -> tuple[float, float]:
    """Returns (mean, factor): (value - mean) x factor has mean 0 and variance 1.

    Values that do not vary have the factor 1: there is nothing to scale.
    """
    found = moments(values)
    if found.std**2 < WHITEN_EPSILON:
        return found.mean, 1.0
    return found.mean, 1.0 / math.sqrt(found.std**2 + WHITEN_EPSILON)

"""What a policy's gradient sum contains (design, exactly once).

The ledger is the ids of the micro-batches whose gradients are in the sum. A micro-batch is consumed
when its id is in the newest *saved* ledger and at no other moment, so sum and ledger change
together here and are saved in one write.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

Aggregation = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "dr_grpo"]
"""How the terms of a loss become one number; all terms of a loss share it."""


class Presence(Enum):
    """What is known of a micro-batch."""

    NEW = "new"
    ADDED = "added"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Denominators that an aggregation may divide by.

    Attributes:
        num_rows: Rows with at least one sampled token.
        num_tokens: Sampled tokens of those rows.
    """

    num_rows: int = 0
    num_tokens: int = 0

    def plus(self, other: Counts) -> Counts:
        """Returns the sum."""
        return Counts(
            num_rows=self.num_rows + other.num_rows, num_tokens=self.num_tokens + other.num_tokens
        )

    def denominator(self, aggregation: Aggregation, *, response_limit: int = 1) -> float:
        """Returns what a sum of these is divided by, once, at apply.

        Args:
            aggregation: "token_mean" divides by sampled tokens, "seq_mean_token_sum" and
                "seq_mean_token_mean" by rows, "dr_grpo" (arXiv 2503.20783) by rows times the
                configured response limit: never by a length that the samples happened to have.
            response_limit: That limit.
        """
        if aggregation == "token_mean":
            return float(self.num_tokens)
        return float(self.num_rows * (response_limit if aggregation == "dr_grpo" else 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Content of one gradient sum, immutable: a change makes a new ledger.

    Attributes:
        batch: Batch that the sum belongs to.
        added: Micro-batches in the sum, in order.
        dropped: Micro-batches dropped whole because their gradient was not finite.
        counts: Denominators of the sum.
    """

    batch: int
    added: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    counts: Counts = Counts()

    def presence(self, micro_batch_id: str) -> Presence:
        """Says whether a micro-batch was added, was dropped, or is new."""
        if micro_batch_id in self.added:
            return Presence.ADDED
        if micro_batch_id in self.dropped:
            return Presence.DROPPED
        return Presence.NEW

    @property
    def empty(self) -> bool:
        """Says whether nothing was added and nothing dropped."""
        return not self.added and not self.dropped

    def add(self, micro_batch_id: str, counts: Counts) -> Ledger:
        """Returns the ledger after the micro-batch's gradient was added to the sum."""
        self._check_new(micro_batch_id)
        return replace(self, added=(*self.added, micro_batch_id), counts=self.counts.plus(counts))

    def drop(self, micro_batch_id: str) -> Ledger:
        """Returns the ledger after the micro-batch was dropped whole."""
        self._check_new(micro_batch_id)
        return replace(self, dropped=(*self.dropped, micro_batch_id))

    def _check_new(self, micro_batch_id: str) -> None:
        if self.presence(micro_batch_id) is not Presence.NEW:
            raise ValueError(f"{micro_batch_id} is in the ledger already")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyCheck:
    """Difference between what an apply expects of the sum and what is in it.

    Attributes:
        missing: Expected, neither added nor dropped.
        unexpected: Added or dropped, not expected.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Says whether the sum is what the apply expects."""
        return not self.missing and not self.unexpected


def check_apply(ledger: Ledger, expected: Collection[str]) -> ApplyCheck:
    """Compares a sum with the micro-batches that an apply was asked for."""
    known = {*ledger.added, *ledger.dropped}
    return ApplyCheck(
        missing=_sorted(set(expected) - known), unexpected=_sorted(known - set(expected))
    )


def _sorted(ids: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(ids))

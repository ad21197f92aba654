"""Ids of batches, groups, samples, vertices and micro-batches.

Ids sort as text in the order of their parts, carry the attempts, and never contain "/" except the
one that separates a sample from the path of a call. Groups are formed by id, never
by position (I14).

    b000012a0                     batch 12, batch attempt 0
    b000012a0-g0003               group 3 of it
    b000012a0-g0003-s002a0        sample 2 of the group, sample attempt 0
    b000012a0-g0003-s002a0/0.1:0  call 0 made in task 0.1 of the sample
    b000012a0-m0004-sorter        micro-batch 4 of the batch, of policy sorter
    e000012a0-g0003-s002a0        sample 2 of query 3 in the evaluation of version 12
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_BATCH = re.compile(r"([be])(\d{6,})a(\d+)")
_GROUP = re.compile(r"([be])(\d{6,})a(\d+)-g(\d{4,})")
_SAMPLE = re.compile(r"([be])(\d{6,})a(\d+)-g(\d{4,})-s(\d{3,})a(\d+)")
_PATH = re.compile(r"\d+(\.\d+)*:(\d+|[A-Za-z_][A-Za-z0-9_-]{0,63})")


@dataclass(frozen=True, slots=True)
class BatchId:
    """One attempt of one batch; or the evaluation of the version of that number.

    An evaluation's rows are sampled like a batch's and are no part of it: they are never released,
    counted, or trained on.
    """

    batch: int
    attempt: int = 0
    evaluation: bool = False

    def __str__(self) -> str:
        return f"{'e' if self.evaluation else 'b'}{self.batch:06d}a{self.attempt}"


@dataclass(frozen=True, slots=True)
class GroupId:
    """One group of a batch attempt."""

    batch: BatchId
    ordinal: int

    def __str__(self) -> str:
        return f"{self.batch}-g{self.ordinal:04d}"

    @classmethod
    def parse(cls, text: str) -> GroupId:
        """Reads a group id.

        Raises:
            ValueError: `text` is not a group id.
        """
        letter, *parts = _full(_GROUP, text, "group").groups()
        batch, attempt, ordinal = (int(part) for part in parts)
        return cls(BatchId(batch, attempt, letter == "e"), ordinal)


@dataclass(frozen=True, slots=True)
class SampleId:
    """One attempt of one sample of a group."""

    group: GroupId
    ordinal: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.group}-s{self.ordinal:03d}a{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> SampleId:
        """Reads a sample id.

        Raises:
            ValueError: `text` is not a sample id.
        """
        letter, *parts = _full(_SAMPLE, text, "sample").groups()
        batch, batch_attempt, group, ordinal, attempt = (int(part) for part in parts)
        return cls(GroupId(BatchId(batch, batch_attempt, letter == "e"), group), ordinal, attempt)


@dataclass(frozen=True, slots=True)
class VertexId:
    """One call of a sample attempt, by its path."""

    sample: SampleId
    path: str

    def __post_init__(self) -> None:
        _full(_PATH, self.path, "path")

    def __str__(self) -> str:
        return f"{self.sample}/{self.path}"

    @classmethod
    def parse(cls, text: str) -> VertexId:
        """Reads a vertex id.

        Raises:
            ValueError: `text` is not a vertex id.
        """
        sample, _, path = text.partition("/")
        return cls(SampleId.parse(sample), path)


def micro_batch_id(batch: BatchId, *, ordinal: int, policy: str) -> str:
    """Returns the id of the `ordinal`-th micro-batch of a batch attempt."""
    return f"{batch}-m{ordinal:04d}-{policy}"


def parse_batch(text: str) -> BatchId:
    """Reads the batch attempt that a group, sample, vertex or micro-batch id starts with.

    Raises:
        ValueError: `text` does not start with a batch id.
    """
    match = _BATCH.match(text)
    if match is None:
        raise ValueError(f"not an id of this project: {text!r}")
    return BatchId(int(match.group(2)), int(match.group(3)), match.group(1) == "e")


def is_evaluation(text: str) -> bool:
    """Whether a group, sample or vertex id is of an evaluation."""
    return text.startswith("e")


def group_of(text: str) -> str:
    """Returns the group that a group, sample or vertex id starts with.

    Raises:
        ValueError: `text` is not the id of a group or of something in one.
    """
    match = _GROUP.match(text)
    if match is None or text[match.end() : match.end() + 1] not in ("", "-"):
        raise ValueError(f"not an id of a group or of something in one: {text!r}")
    return match.group()


def check_name(name: str, *, what: str) -> str:
    """Returns `name` if it may name a run, policy, agent, tool, shard or slot.

    Raises:
        ValueError: It has separators, path parts or more than 64 characters.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{what} {name!r}: use letters, digits, '-' and '_', "
            "at most 64, starting with a letter or digit"
        )
    return name


def _full(pattern: re.Pattern[str], text: str, what: str) -> re.Match[str]:
    match = pattern.fullmatch(text)
    if match is None:
        raise ValueError(f"not a {what} id: {text!r}")
    return match

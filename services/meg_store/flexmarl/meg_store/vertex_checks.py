"""Validation of written rows: what a row must look like, whatever is stored already."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.client.enums import VERTEX_STATUS
from flexmarl.core import graph_rules
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ids import GroupId, check_name
from flexmarl.core.training_rows import MAX_REWARD, is_usable
from flexmarl.meg_store.columns import check_ready, check_values

_ENDED = frozenset(
    (
        common_pb2.VERTEX_STATUS_DONE,
        common_pb2.VERTEX_STATUS_FAILED,
        common_pb2.VERTEX_STATUS_CANCELLED,
    )
)

_NO_VALUES: Final[Mapping[str, graph_pb2.ColumnValue]] = MappingProxyType({})

Alike: TypeAlias = dict[tuple[Any, ...], graph_pb2.VertexMeta]
"""Rows that were checked, one of each kind: by what many rows of a call repeat."""

_repeated: Final = attrgetter(
    "sample_id",
    "group_id",
    "batch",
    "batch_attempt",
    "sample_attempt",
    "agent",
    "policy",
    "kind",
    "status",
    "void_reason",
    "micro_batch_id",
    "merged_into",
)
_own: Final = attrgetter(
    "vertex_id",
    "path",
    "num_response_tokens",
    "version_runs",
    "upstream_vertex_ids",
    "ready_columns",
)
_data: Final = attrgetter("response_tokens", "logprobs", "columns")


@dataclass(slots=True)
class Checked:
    """What had to be read of vertices to check them.

    Attributes:
        ids: Their ids, in order.
        upstream: Ids of upstream vertices, of those that have any, by id.
        objects: Keys of the objects that a vertex refers to, of those that do, by position.
    """

    ids: list[str] = field(default_factory=list)
    upstream: dict[str, list[str]] = field(default_factory=dict)
    objects: dict[int, Sequence[str]] = field(default_factory=dict)


def check_vertices(
    metas: Sequence[graph_pb2.VertexMeta],
    payloads: Iterable[graph_pb2.VertexPayload | None],
    *,
    alike: Alike,
    declared: Mapping[str, int],
) -> Checked:
    """Checks vertices that are about to be written, each column of all of them.

    One loop without calls: of what a row costs in Python, most is here.

    Args:
        metas: Meta columns; ready columns are added to them.
        payloads: Their data columns; None for a vertex without.
        alike: What rows checked before had in common with them is not looked at again; it is added.
        declared: Types of the run's declared columns.

    Raises:
        DomainError: INVALID_ARGUMENT; MESSAGE_TOO_LARGE for a column.
        ValueError: An id or a name is malformed, lengths disagree, or a column is unknown or of
            another type.
    """
    checked = Checked()
    ids, paths, samples = checked.ids, list[str](), list[str]()
    last = None
    for meta, repeated, own, payload in zip(
        metas, map(_repeated, metas), map(_own, metas), payloads, strict=True
    ):
        if repeated != last:  # neighbours are alike: compared faster than looked up
            if repeated not in alike:
                _check_repeated(meta)
                alike[repeated] = meta
            last = repeated
        vertex_id, path, num_tokens, runs, upstream, ready = own
        if runs:
            # Nearly all rows have one run; a sum over a generator costs more than all else here.
            total = runs[0].num_tokens if len(runs) == 1 else sum(run.num_tokens for run in runs)
            if total != num_tokens:
                raise ValueError(f"vertex {vertex_id!r}: version_runs do not add up to its tokens")
        if upstream:
            checked.upstream[vertex_id] = list(upstream)
        values: Mapping[str, graph_pb2.ColumnValue] = _NO_VALUES
        if payload is not None:
            tokens, logprobs, values = _data(payload)
            if len(tokens) != num_tokens or len(logprobs) not in (0, num_tokens):
                raise ValueError(
                    f"vertex {vertex_id!r}: {len(tokens)} response tokens and {len(logprobs)} "
                    f"log-probabilities for num_response_tokens = {num_tokens}"
                )
        if values or ready:
            check_ready(meta, values, declared)
        if values and (objects := check_values(vertex_id, values, declared)):
            checked.objects[len(ids)] = objects
        ids.append(vertex_id)
        paths.append(path)
        samples.append(repeated[0])
    graph_rules.check_vertex_ids(ids, sample_ids=samples, paths=paths)
    for meta in metas:
        if meta.HasField("reward") or meta.HasField("advantage"):
            raise _too_early(meta.vertex_id)
    return checked


def _check_repeated(meta: graph_pb2.VertexMeta) -> None:
    """Checks what many rows repeat."""
    vertex_id = meta.vertex_id
    graph_rules.check_sample_ids(
        sample_id=meta.sample_id,
        group_id=meta.group_id,
        batch=meta.batch,
        batch_attempt=meta.batch_attempt,
        sample_attempt=meta.sample_attempt,
    )
    if flaw := _flaw_of_role(meta.agent, meta.policy, meta.kind):
        raise ValueError(f"vertex {vertex_id!r}: {flaw}")
    if meta.status not in _ENDED:
        graph_rules.check_ended(vertex_id, VERTEX_STATUS.to_core(meta.status))
    if meta.micro_batch_id or meta.merged_into:
        raise _too_early(vertex_id)
    if meta.void_reason != common_pb2.VOID_REASON_UNSPECIFIED:
        raise ValueError(f"vertex {vertex_id!r}: rows are voided by CloseGroups or VoidRows")


def _too_early(vertex_id: str) -> ValueError:
    return ValueError(f"vertex {vertex_id!r}: reward, advantage and mark come after its end")


@lru_cache(maxsize=4096)
def _flaw_of_role(agent: str, policy: str, kind: int) -> str:
    """What is wrong with what every row of an agent repeats; empty: nothing."""
    check_name(agent, what="agent")
    if policy:
        check_name(policy, what="policy")
    elif kind == common_pb2.VERTEX_KIND_AGENT:
        return "an agent's vertex names its policy"
    return "kind is missing" if kind == common_pb2.VERTEX_KIND_UNSPECIFIED else ""


def check_sample(sample: graph_pb2.Sample) -> None:
    """Checks a sample that is about to be written.

    Raises:
        DomainError: REWARD_INVALID.
        ValueError: Ids disagree.
    """
    graph_rules.check_sample_ids(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        batch=sample.batch,
        batch_attempt=sample.batch_attempt,
        sample_attempt=sample.sample_attempt,
    )
    graph_rules.check_sample_ordinal(sample_id=sample.sample_id, ordinal=sample.ordinal)
    if sample.HasField("rewards"):
        _check_rewards(sample.sample_id, sample.rewards)


def check_group(group: graph_pb2.Group) -> None:
    """Checks a group that is about to be admitted.

    Raises:
        ValueError: Ids disagree, or it is not open.
    """
    parsed = GroupId.parse(group.group_id)
    stated = (group.batch, group.batch_attempt, group.ordinal)
    if stated != (parsed.batch.batch, parsed.batch.attempt, parsed.ordinal):
        raise ValueError(f"group id {group.group_id!r} does not agree with its other ids")
    if group.num_samples == 0:
        raise ValueError(f"group {group.group_id!r} wants no samples")


def check_size(row_id: str, size_bytes: int, limit: int) -> None:
    """Refuses an oversized value.

    Raises:
        DomainError: MESSAGE_TOO_LARGE.
    """
    if size_bytes > limit:
        raise DomainError(
            ErrorReason.MESSAGE_TOO_LARGE,
            f"row {row_id!r} has {size_bytes} bytes, at most {limit} fit in a row; store an object",
        )


def _check_rewards(sample_id: str, rewards: graph_pb2.RewardSet) -> None:
    values: list[Iterable[float]] = [
        rewards.agents.values(),
        rewards.vertices.values(),
        rewards.metrics.values(),
    ]
    if rewards.HasField("team"):
        values.append((rewards.team,))
    if not all(is_usable(value) for part in values for value in part):
        raise DomainError(
            ErrorReason.REWARD_INVALID,
            f"sample {sample_id!r}: rewards and metrics must be finite, of at most {MAX_REWARD:g}",
            {"sample": sample_id},
        )

"""Between the contracts' messages and the core's facts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as store_pb
from flexmarl.client.enums import GROUP_STATUS, SAMPLE_STATUS, VOID_REASON
from flexmarl.core.dataset_order import Cursor
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ids import SampleId
from flexmarl.core.run_effects import CloseGroup
from flexmarl.core.run_events import StateFact
from flexmarl.core.states import VoidReason
from flexmarl.core.training_rows import Rewards, Row, RowVoid, RunFailure, SampleFact

DONE = common_pb2.VERTEX_STATUS_DONE

ItemT = TypeVar("ItemT")


def chunks(items: Sequence[ItemT], size: int) -> Iterator[Sequence[ItemT]]:
    """What is too much for one message, in parts of at most `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def failure_of(failure: common_pb2.Failure) -> RunFailure:
    """A failure that came with a message."""
    return RunFailure(
        reason=failure.reason, message=failure.message, metadata=dict(failure.metadata)
    )


def failure_of_error(error: Exception) -> RunFailure:
    """A failure that came as an exception; internal text does not leave the process."""
    if isinstance(error, DomainError):
        return RunFailure(
            reason=error.reason.value, message=error.message, metadata=dict(error.metadata)
        )
    return RunFailure(
        reason=ErrorReason.INTERNAL.value, message="the orchestrator failed; see its log"
    )


def failure_message(failure: RunFailure) -> common_pb2.Failure:
    """The message of a failure."""
    return common_pb2.Failure(
        reason=failure.reason, message=failure.message, metadata=dict(failure.metadata)
    )


def sample_fact(sample: graph_pb2.Sample) -> SampleFact:
    """What the core needs of a sample."""
    rewards = None
    if sample.HasField("rewards"):
        given = sample.rewards
        rewards = Rewards(
            team=given.team if given.HasField("team") else None,
            agents=dict(given.agents),
            vertices=dict(given.vertices),
            metrics=dict(given.metrics),
        )
    return SampleFact(
        sample_id=SampleId.parse(sample.sample_id),
        status=SAMPLE_STATUS.to_core(sample.status),
        rewards=rewards,
        failure=failure_of(sample.failure) if sample.HasField("failure") else None,
        left=frozenset(sample.left_policies),
        used=frozenset(sample.used_policies),
    )


def row_of(meta: graph_pb2.VertexMeta, *, shard: str) -> Row:
    """What the core needs of a finished vertex."""
    return Row(
        vertex_id=meta.vertex_id,
        sample_id=meta.sample_id,
        agent=meta.agent,
        policy=meta.policy,
        path=meta.path,
        num_prompt_tokens=meta.num_prompt_tokens,
        num_response_tokens=meta.num_response_tokens,
        trainable=meta.trainable,
        shard=shard,
        finished_unix_ns=meta.finished_unix_ns,
        extends=meta.extends_vertex_id,
        merged_into=meta.merged_into,
    )


def vertex_refs(rows: Iterable[Row]) -> list[common_pb2.VertexRef]:
    """References to the vertices that rows are made of."""
    return [row_ref(vertex) for row in rows for vertex in row.vertices]


def row_ref(row: Row) -> common_pb2.VertexRef:
    """Reference to a row."""
    return common_pb2.VertexRef(shard=row.shard, vertex_id=row.vertex_id, agent=row.agent)


def voided_row(item: RowVoid) -> store_pb.VoidedRow:
    """Message of a void row."""
    return store_pb.VoidedRow(row=row_ref(item.row), reason=VOID_REASON.to_wire(item.reason))


def voided_by_reason(counts: store_pb.CountVerticesResponse) -> dict[VoidReason, int]:
    """Void rows of a batch by reason, over all policies."""
    total: dict[VoidReason, int] = {}
    for policy in counts.policies.values():
        for name, count in policy.voided.items():
            reason = VoidReason(name)
            total[reason] = total.get(reason, 0) + count
    return total


def closure_of(effect: CloseGroup) -> store_pb.GroupClosure:
    """Message of a group's end."""
    reason: Any = 0
    if effect.drop_reason is not None:
        reason = VOID_REASON.to_wire(effect.drop_reason)
    return store_pb.GroupClosure(
        group_id=effect.group_id,
        status=GROUP_STATUS.to_wire(effect.status),
        drop_reason=reason,
        released=[
            store_pb.ReleasedRow(
                row=row_ref(item.row),
                reward=item.reward,
                advantage=item.advantage,
                merged_into=item.row.merged_into,
            )
            for item in effect.released
        ],
        voided=[voided_row(item) for item in effect.voided],
    )


def state_fact(state: graph_pb2.StateRecord) -> StateFact:
    """What the core needs of a state record."""
    return StateFact(
        version=state.version,
        ledger=frozenset(state.ledger),
        dropped=frozenset(state.dropped),
        applied=state.applied,
        metrics=dict(state.metrics),
    )


def policy_manifest(state: graph_pb2.StateRecord) -> graph_pb2.PolicyManifest:
    """A policy's entry in a manifest, from the state that belongs to it."""
    manifest = graph_pb2.PolicyManifest(
        weights=state.weights,
        weights_hash=state.weights_hash,
        num_updates=state.num_updates,
        state_version=state.version,
    )
    if state.HasField("master"):
        manifest.master.CopyFrom(state.master)
    if state.HasField("moments"):
        manifest.moments.CopyFrom(state.moments)
    return manifest


def cursor_of(cursor: graph_pb2.DatasetCursor) -> Cursor:
    """The core's cursor."""
    return Cursor(cursor.epoch, cursor.position)


def cursor_message(cursor: Cursor) -> graph_pb2.DatasetCursor:
    """The message of a cursor."""
    return graph_pb2.DatasetCursor(epoch=cursor.epoch, position=cursor.position)


def dataset_name(config_path: str, key: str) -> str:
    """What a person calls the dataset: its file name, or its key where there is none."""
    return config_path.rpartition("/")[2] or json.dumps(key)

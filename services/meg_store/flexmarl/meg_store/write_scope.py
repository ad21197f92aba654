"""What the rows of one call have in common: whether their groups, samples, subgraphs take any."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import NamedTuple

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.client.enums import SAMPLE_STATUS
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ids import is_evaluation
from flexmarl.core.states import SAMPLE
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.database import Draft


class Place(NamedTuple):
    """What the vertices of one sample meet.

    Attributes:
        is_over: The sample, or its group, has ended.
        closed: Policies whose subgraph of the batch is closed.
    """

    is_over: bool
    closed: Collection[str]


class WriteScope:
    """Looks up each group, sample and batch of a call once."""

    def __init__(self, draft: Draft, run_id: str) -> None:
        self._draft = draft
        self._run_id = run_id
        self._group_open: dict[str, bool] = {}
        self._closed: dict[tuple[int, int], Collection[str]] = {}
        self._places: dict[str, Place] = {}
        self.num_late = 0

    def place(self, meta: graph_pb2.VertexMeta) -> Place:
        """What a vertex meets; its ids agree with each other.

        Raises:
            DomainError: NOT_FOUND for a group that was not admitted.
        """
        sample_id = meta.sample_id
        known = self._places.get(sample_id)
        if known is None:
            is_over = not self.is_group_open(meta.group_id) or self._is_sample_over(sample_id)
            known = self._places[sample_id] = Place(is_over, self._closed_to(meta))
        return known

    def is_group_open(self, group_id: str) -> bool:
        """Whether a group takes rows.

        Raises:
            DomainError: NOT_FOUND.
        """
        known = self._group_open.get(group_id)
        if known is None:
            value = self._draft.get(Table.GRAPH, keys.join("group", self._run_id, group_id))
            if value is None:
                raise DomainError(
                    ErrorReason.NOT_FOUND,
                    f"group {group_id!r} was not admitted to run {self._run_id!r}",
                    {"group": group_id},
                )
            status = graph_pb2.Group.FromString(value).status
            known = self._group_open[group_id] = status == common_pb2.GROUP_STATUS_OPEN
        return known

    def keep_late(self, row_id: str, value: bytes) -> None:
        """Keep a late result for people."""
        # The same late result again takes the same key, so repetition does not fill the table.
        digest = hashlib.sha256(value).digest()[:8]
        self._draft.put(Table.LATE, keys.prefix(self._run_id, row_id) + digest, value)
        self.num_late += 1

    def _is_sample_over(self, sample_id: str) -> bool:
        value = self._draft.get(Table.GRAPH, keys.join("sample", self._run_id, sample_id))
        return value is not None and SAMPLE.is_terminal(
            SAMPLE_STATUS.to_core(graph_pb2.Sample.FromString(value).status)
        )

    def _closed_to(self, meta: graph_pb2.VertexMeta) -> Collection[str]:
        if is_evaluation(meta.sample_id):
            return ()  # what is never trained on may end whenever it likes
        batch = (meta.batch, meta.batch_attempt)
        known = self._closed.get(batch)
        if known is None:
            known = self._closed[batch] = closed_policies(self._draft, self._run_id, *batch)
        return known


def closed_key(run_id: str, batch: int, batch_attempt: int) -> bytes:
    """Key of a batch's closed subgraphs: the names of their policies, joined by NUL."""
    return keys.join("closed", run_id, str(batch), str(batch_attempt))


def closed_policies(draft: Draft, run_id: str, batch: int, batch_attempt: int) -> list[str]:
    """Policies whose subgraph of a batch is closed."""
    value = draft.get(Table.META, closed_key(run_id, batch, batch_attempt))
    return value.decode().split("\0") if value else []

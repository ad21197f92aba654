"""A policy's state between the store's segments and the ranks that map them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2
from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.client.buffers import BufferSpec
from flexmarl.client.segments import SegmentReader, SegmentWriter
from flexmarl.client.store import StoreClient
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.weights_probe import PROBE_ATTRIBUTE, write_probe
from flexmarl.runtime.aio import in_thread
from flexmarl.trainer.state_layout import segment_specs
from flexmarl.trainer.totals import IN, OUT, Traffic

AnswerT = TypeVar("AnswerT")

HOLDER = "trainer"

_ANSWER_S: Final = 1.0
"""Longest wait for the answer of a store that may have given what nobody needs any more."""

_TIERS = {
    "memory": meg_store_pb2.SEGMENT_TIER_MEMORY,
    "disk": meg_store_pb2.SEGMENT_TIER_DISK,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentNames:
    """Keys of the segments that one binding of a policy writes.

    No two bindings write under one key, so an equal key is an equal content. Bindings of a run
    differ by their terms; a run differs by its creation from a deleted one that had its id.
    """

    run_id: str
    created_unix_ns: int
    policy: str
    term: int

    def key(self, kind: str, *, version: int, number: int | None = None) -> str:
        """Returns the key of a set's segment; `number` counts saves of gradients."""
        run = f"{self.run_id}.{self.created_unix_ns:x}"
        key = f"{run}.{self.policy}.v{version}.t{self.term}.{kind}"
        return key if number is None else f"{key}.{number}"


class StateSegments:
    """Opens and makes the segments of one policy.

    Args:
        store: Home store, on this node.
        names: Keys.
        tier: "memory" or "disk".
        weights_dtype: Dtype that engines load.
        moments: Prefixes of the optimizer's moments.
        traffic: Added to: bytes that ranks read and write.
        verify: Compare what is opened with its checksum, where the store has computed it.
    """

    def __init__(
        self,
        store: StoreClient,
        names: SegmentNames,
        *,
        tier: str,
        weights_dtype: str,
        moments: tuple[str, ...],
        traffic: Traffic,
        verify: bool,
    ) -> None:
        self._store = store
        self._names = names
        self._tier = _TIERS[tier]
        self._weights_dtype = weights_dtype
        self._moments = moments
        self._traffic = traffic
        self._verify = verify

    @asynccontextmanager
    async def opened(
        self, refs: Mapping[str, common_pb2.ObjectRef]
    ) -> AsyncIterator[list[rank_pb2.MappedSegment]]:
        """Holds leases on segments for the block, by kind; yields them for the ranks to map.

        Raises:
            DomainError: See `StoreClient.open_segment`; CHECKSUM_MISMATCH when verified.
        """
        opening = [asyncio.create_task(self._open(ref.key)) for ref in refs.values()]
        try:
            readers = await _answers(opening)
            if self._verify:
                checks = (in_thread(_check_content, reader) for reader in readers)
                found = await asyncio.gather(*checks, return_exceptions=True)
                if wrong := [error for error in found if error is not None]:
                    raise wrong[0]
            self._traffic[IN] += sum(ref.size_bytes for ref in refs.values())
            yield [
                rank_pb2.MappedSegment(
                    kind=kind,
                    key=ref.key,
                    path=reader.path,
                    buffers=reader.view.buffers,
                    in_memory=reader.view.tier == meg_store_pb2.SEGMENT_TIER_MEMORY,
                )
                for (kind, ref), reader in zip(refs.items(), readers, strict=True)
            ]
        finally:
            await asyncio.gather(*(_give_back(task) for task in opening))

    async def allocate(
        self,
        kinds: Sequence[str],
        parameters: Sequence[meg_store_pb2.NamedBuffer],
        *,
        published: Sequence[meg_store_pb2.NamedBuffer],
        world_size: int,
        version: int,
        number: int | None = None,
    ) -> StateTargets:
        """Makes room for some kinds of state of a set that this many ranks write.

        Args:
            kinds: Kinds of state.
            parameters: Full parameters that are trained, in the master dtype.
            published: Full weights that engines load.
            world_size: Number of ranks.
            version: Version of the set.
            number: Number of the save within it.

        Raises:
            DomainError: See `StoreClient.allocate_segment`. None is being made any more then: one
                that came late would take the place of the next try's.
        """
        allocating = [
            asyncio.create_task(
                self._allocate(
                    kind,
                    segment_specs(
                        kind,
                        published if kind == "weights" else parameters,
                        weights_dtype=self._weights_dtype,
                        world_size=world_size,
                        moments=self._moments,
                    ),
                    key=self._names.key(kind, version=version, number=number),
                )
            )
            for kind in kinds
        ]
        try:
            writers = await _answers(allocating)
        except BaseException:
            await asyncio.gather(*(_give_up(task) for task in allocating))
            raise
        return StateTargets(dict(zip(kinds, writers, strict=True)), self._traffic)

    async def _open(self, key: str) -> SegmentReader:
        return await self._store.open_segment(self._names.run_id, key, holder=HOLDER)

    async def _allocate(
        self, kind: str, specs: Sequence[BufferSpec], *, key: str
    ) -> tuple[str, SegmentWriter]:
        writer = await self._store.allocate_segment(
            self._names.run_id,
            key,
            specs,
            tier=self._tier,
            attributes={"kind": kind, "policy": self._names.policy},
        )
        return key, writer


class StateTargets:
    """Allocated segments, by kind, until they are sealed."""

    def __init__(self, writers: dict[str, tuple[str, SegmentWriter]], traffic: Traffic) -> None:
        self._writers = writers
        self._traffic = traffic

    def for_ranks(self) -> list[rank_pb2.MappedSegment]:
        """What the ranks map and fill."""
        return [
            rank_pb2.MappedSegment(
                kind=kind,
                key=key,
                path=writer.path,
                buffers=writer.layout,
                in_memory=writer.tier == meg_store_pb2.SEGMENT_TIER_MEMORY,
            )
            for kind, (key, writer) in self._writers.items()
        ]

    async def seal(
        self, written: rank_pb2.RankWritten | None = None
    ) -> dict[str, common_pb2.ObjectRef]:
        """Publishes them.

        Args:
            written: What rank 0 says of the weights, which carry their hash and what they answer to
                the probe; the others' hashes the store computes beside.
        """
        refs = await asyncio.gather(
            *(
                _seal(writer, None if kind != "weights" else written)
                for kind, (_, writer) in self._writers.items()
            )
        )
        self._traffic[OUT] += sum(ref.size_bytes for ref in refs)
        return dict(zip(self._writers, refs, strict=True))

    def abandon(self) -> None:
        """Unmaps what was not sealed; the store sweeps it."""
        for _, writer in self._writers.values():
            if writer.object is None:
                writer.abandon()


async def _answers(asking: Sequence[asyncio.Task[AnswerT]]) -> list[AnswerT]:
    """What the store answered to all; the first refusal is raised once all have ended."""
    if asking:
        await asyncio.wait(asking)
    return [task.result() for task in asking]


async def _give_back(opening: asyncio.Task[SegmentReader]) -> None:
    """Closes a reader; one that is being opened still, for who was cancelled meanwhile, too."""
    if (reader := await _outcome(opening)) is not None:
        await reader.close()


async def _give_up(allocating: asyncio.Task[tuple[str, SegmentWriter]]) -> None:
    """Abandons a writer; one that is being made still, for who was cancelled meanwhile, too."""
    if (made := await _outcome(allocating)) is not None:
        made[1].abandon()


async def _outcome(asking: asyncio.Task[AnswerT]) -> AnswerT | None:
    """What the store answered; None when it refused, or says nothing to who waits no longer."""
    await asyncio.wait([asking], timeout=_ANSWER_S)
    answered = not asking.cancel() and not asking.cancelled()
    return asking.result() if answered and asking.exception() is None else None


async def _seal(
    writer: SegmentWriter, written: rank_pb2.RankWritten | None
) -> common_pb2.ObjectRef:
    if written is None:
        return await writer.seal()
    attributes = {}
    if written.probe_logprobs:
        attributes[PROBE_ATTRIBUTE] = write_probe(written.probe_logprobs)
    return await writer.seal(checksum=written.weights_hash, attributes=attributes)


def _check_content(reader: SegmentReader) -> None:
    """Compares what lies in a segment's file with what was sealed.

    Raises:
        DomainError: CHECKSUM_MISMATCH.
    """
    sealed, key, path = reader.object.checksum, reader.object.key, reader.path
    if not sealed:
        return  # it is being computed still
    found = reader.content_hash()
    if found != sealed:
        raise DomainError(
            ErrorReason.CHECKSUM_MISMATCH,
            f"segment {key}: {path} has the content {found}, sealed was {sealed}",
            {"segment": key, "path": path},
        )

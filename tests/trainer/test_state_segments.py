"""Segments of a set are made side by side: none is in the making once one could not be had."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from trainer.service_harness import fails

from flexmarl.api.meg_store.v1 import meg_store_pb2
from flexmarl.client.segments import SegmentWriter
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.trainer.segments import SegmentNames, StateSegments
from flexmarl.trainer.totals import Traffic

PARAMETERS = [meg_store_pb2.NamedBuffer(name="w", dtype="F32", shape=[4], size_bytes=16)]


class SlowStore:
    """A store that has no room for moments, and answers about weights when it is let."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.may_answer = asyncio.Event()
        self.made: list[SegmentWriter] = []

    async def allocate_segment(self, run_id, key, specs, **_) -> SegmentWriter:
        if key.endswith("moments"):
            raise DomainError(ErrorReason.DISK_FULL, f"no room for {key}")
        await self.may_answer.wait()
        path = self.folder / key
        path.touch()
        writer = SegmentWriter(
            meg_store_pb2.AllocateSegmentResponse(path=str(path)), [], self.seal, mappings=None
        )
        self.made.append(writer)
        return writer

    async def seal(self, *_) -> None:
        raise AssertionError("nothing of it is published")


@pytest.fixture
def store(tmp_path: Path) -> SlowStore:
    return SlowStore(tmp_path)


async def allocate(store: SlowStore) -> None:
    segments = StateSegments(
        store,
        SegmentNames(run_id="r", created_unix_ns=1, policy="p", term=1),
        tier="memory",
        weights_dtype="float32",
        moments=("m", "v"),
        traffic=Traffic(),
        verify=False,
    )
    await segments.allocate(
        ("weights", "moments"), PARAMETERS, published=PARAMETERS, world_size=1, version=0
    )


async def test_one_that_cannot_be_had_is_told_when_none_is_in_the_making(store: SlowStore) -> None:
    """One that came later would take the place of the next try's, which has the same key."""
    trying = asyncio.create_task(allocate(store))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not trying.done()
    store.may_answer.set()
    with fails(ErrorReason.DISK_FULL):
        await trying
    assert [writer._has_ended for writer in store.made] == [True]


async def test_one_that_was_made_for_who_gave_up_is_abandoned(store: SlowStore) -> None:
    trying = asyncio.create_task(allocate(store))
    await asyncio.sleep(0)
    trying.cancel()
    await asyncio.sleep(0)
    store.may_answer.set()
    with pytest.raises(asyncio.CancelledError):
        await trying
    assert [writer._has_ended for writer in store.made] == [True]

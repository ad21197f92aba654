"""Copies between a device and files: nobody reads a buffer before the copy into it is done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flexmarl.api.meg_store.v1 import meg_store_pb2
from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.client.mappings import KeptMappings
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.trainer.rank.segments import MAPPED_FROM_BYTES, SegmentFile, SegmentFiles
from flexmarl.trainer.rank.state_files import StateFiles, rows_of
from flexmarl.trainer.rank.transfers import HostTransfers, StagedTransfers, transfers_of
from flexmarl.trainer.state_layout import block_of

SIZES = [0, 1, 63, 64, 65, 128, 1000]


class LateStream:
    """Copies when it is waited for, and not a moment before: what is read early is wrong."""

    def __init__(self) -> None:
        self._pending: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, slot: int) -> None:
        assert slot not in self._pending, "a buffer is overwritten before its copy was waited for"
        self._pending[slot] = (target, source)

    def wait(self, slot: int) -> None:
        if slot in self._pending:
            target, source = self._pending.pop(slot)
            target.copy_(source)


@pytest.fixture
def files() -> Iterator[SegmentFiles]:
    mappings = KeptMappings()
    yield SegmentFiles(mappings)
    mappings.close()


def segment(path: Path | str, count: int, *, in_memory: bool = False) -> rank_pb2.MappedSegment:
    buffer = meg_store_pb2.NamedBuffer(name="w", dtype="F32", shape=[count], size_bytes=count * 4)
    return rank_pb2.MappedSegment(
        kind="master", key="k", path=str(path), buffers=[buffer], in_memory=in_memory
    )


def staged() -> StagedTransfers:
    staging = (torch.empty(64, dtype=torch.uint8), torch.empty(64, dtype=torch.uint8))
    return StagedTransfers(LateStream(), staging)


@pytest.mark.parametrize("size", SIZES)
def test_bytes_come_back_through_two_staging_buffers(
    files: SegmentFiles, tmp_path: Path, size: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(size + 10))
    content = torch.randint(0, 256, (size,), dtype=torch.uint8)
    again = torch.zeros_like(content)
    with files.opened(segment(path, 1), write=True) as file:
        staged().store(file, 10, content)
        staged().load(file, 10, again)
    assert torch.equal(again, content)
    assert path.read_bytes()[:10] == bytes(10)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, (64 << 20) + 1, (200 << 20) + 7])
def test_bytes_come_back_from_a_gpu(files: SegmentFiles, tmp_path: Path, size: int) -> None:
    device = torch.device("cuda:0")
    path = tmp_path / "file"
    path.write_bytes(b"")
    content = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    again = torch.zeros_like(content)
    with files.opened(segment(path, 1), write=True) as file:
        transfers_of(device).store(file, 0, content)
        transfers_of(device).load(file, 0, again)
    assert torch.equal(again, content)


def test_what_was_stored_otherwise_than_meant_is_found_when_verified(
    files: SegmentFiles, tmp_path: Path
) -> None:
    class Flipping(HostTransfers):
        def store(self, file: SegmentFile, offset: int, source: torch.Tensor) -> None:
            wrong = source.clone()
            wrong[-1] ^= 1
            file.write(offset, wrong)

    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    target = segment(path, 1000)
    parameters = [meg_store_pb2.NamedBuffer(name="w", dtype="F32", shape=[1000])]
    block = block_of(parameters, rank=0, world_size=1)
    memory = torch.randint(0, 256, (block.size_bytes,), dtype=torch.uint8)
    StateFiles(files, Flipping(), verify=False).store(target, rows_of(target, block, memory))
    with pytest.raises(DomainError) as caught:
        StateFiles(files, Flipping(), verify=True).store(target, rows_of(target, block, memory))
    assert caught.value.reason is ErrorReason.CHECKSUM_MISMATCH
    StateFiles(files, HostTransfers(), verify=True).store(target, rows_of(target, block, memory))


def test_full_short_and_missing_files_are_told_by_the_segments_key(
    files: SegmentFiles, tmp_path: Path
) -> None:
    data = torch.zeros(100, dtype=torch.uint8)
    with (
        files.opened(segment("/dev/full", 1), write=True) as file,
        pytest.raises(DomainError) as full,
    ):
        file.write(0, data)
    assert full.value.reason is ErrorReason.DISK_FULL
    (tmp_path / "short").write_bytes(bytes(50))
    with (
        files.opened(segment(tmp_path / "short", 1), write=False) as file,
        pytest.raises(DomainError) as short,
    ):
        file.read(0, data)
    assert short.value.reason is ErrorReason.CHECKSUM_MISMATCH
    with (
        pytest.raises(DomainError) as missing,
        files.opened(segment(tmp_path / "missing", 1), write=False),
    ):
        pass
    assert missing.value.reason is ErrorReason.SEGMENT_NOT_FOUND
    assert all("k" in error.value.message for error in (full, short, missing))


def test_a_file_of_the_memory_tier_is_mapped_and_comes_again(
    files: SegmentFiles, tmp_path: Path
) -> None:
    size = MAPPED_FROM_BYTES + 100
    path = tmp_path / "a"
    path.write_bytes(bytes(size))
    for name in "abc":  # the store gives it out under another name
        path = path.rename(tmp_path / name)
        content = torch.randint(0, 256, (size - 20,), dtype=torch.uint8)
        again = torch.zeros_like(content)
        with files.opened(segment(path, 1, in_memory=True), write=True) as file:
            file.write(10, content)
        assert path.read_bytes() == bytes(10) + content.numpy().tobytes() + bytes(10)
        with files.opened(segment(path, 1, in_memory=True), write=False) as file:
            file.read(10, again)
            with pytest.raises(DomainError) as short:
                file.read(21, again)
            with pytest.raises(DomainError):
                file.write(21, content)
        assert torch.equal(again, content)
        assert short.value.reason is ErrorReason.CHECKSUM_MISMATCH


def test_two_users_of_a_mapped_file_do_not_meet(files: SegmentFiles, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(2 * MAPPED_FROM_BYTES))
    both = segment(path, 1, in_memory=True)
    half = torch.ones(MAPPED_FROM_BYTES, dtype=torch.uint8)
    with files.opened(both, write=True) as first, files.opened(both, write=True) as second:
        first.write(0, half)
        second.write(MAPPED_FROM_BYTES, 2 * half)
    assert path.read_bytes() == b"\1" * MAPPED_FROM_BYTES + b"\2" * MAPPED_FROM_BYTES

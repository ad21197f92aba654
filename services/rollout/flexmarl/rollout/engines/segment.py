"""The bytes of a sealed weights segment, mapped and checked, without torch."""

from __future__ import annotations

import mmap
from pathlib import Path

from flexmarl.api.rollout.v1.engine_pb2 import EngineLoad
from flexmarl.client.buffers import Buffer, BufferSpec, content_hash
from flexmarl.core.errors import DomainError, ErrorReason


def map_checked(load: EngineLoad) -> mmap.mmap:
    """The segment's bytes, which have the named content; unmapped with the last view of them.

    Raises:
        DomainError: SEGMENT_NOT_FOUND, CHECKSUM_MISMATCH.
    """
    memory = _map(load)
    _check_content(memory, load)
    return memory


def _map(load: EngineLoad) -> mmap.mmap:
    try:
        with Path(load.path).open("rb") as file:
            # Private and writable: torch warns about read-only memory, and nothing writes to it.
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise DomainError(
            ErrorReason.SEGMENT_NOT_FOUND, f"{load.path}: cannot be mapped", {"path": load.path}
        ) from error
    end = max((buffer.offset + buffer.size_bytes for buffer in load.buffers), default=0)
    if end > len(memory):
        raise DomainError(
            ErrorReason.CHECKSUM_MISMATCH,
            f"{load.path}: layout needs {end} bytes, the file has {len(memory)}",
            {"path": load.path},
        )
    return memory


def _check_content(memory: mmap.mmap, load: EngineLoad) -> None:
    view = memoryview(memory)
    actual = content_hash(
        [
            Buffer(
                BufferSpec(buffer.name, buffer.dtype, tuple(buffer.shape)),
                view[buffer.offset : buffer.offset + buffer.size_bytes],
            )
            for buffer in load.buffers
        ]
    )
    if actual != load.weights_hash:
        raise DomainError(
            ErrorReason.CHECKSUM_MISMATCH,
            f"weights of version {load.version}: content {actual}, expected {load.weights_hash}",
            {"expected": load.weights_hash, "actual": actual},
        )

"""The content hash of a weights segment: the name that rows and requests carry."""

from __future__ import annotations

import hashlib
import mmap
from pathlib import Path

from flexmarl.api.trainer.v1alpha1 import rank_pb2


def hash_segment(segment: rank_pb2.MappedSegment) -> str:
    """Returns "sha256:" + hex over the buffers sorted by name; see client.buffers.content_hash."""
    digest = hashlib.sha256()
    with Path(segment.path).open("rb") as file:
        memory = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    for buffer in sorted(segment.buffers, key=lambda item: item.name):
        shape = ",".join(str(extent) for extent in buffer.shape)
        data = memory[buffer.offset : buffer.offset + buffer.size_bytes]
        for part in (buffer.name.encode(), buffer.dtype.encode(), shape.encode(), data):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return f"sha256:{digest.hexdigest()}"

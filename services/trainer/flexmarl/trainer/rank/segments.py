"""Files of the node's store, mapped as tensors."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch

from flexmarl.api.meg_store.v1alpha1 import meg_store_pb2
from flexmarl.api.trainer.v1alpha1 import rank_pb2

DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "U8": torch.uint8,
}
"""Element types by safetensors' spelling."""

DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
"""Inverse of `DTYPES`."""


@contextmanager
def mapped(segment: rank_pb2.MappedSegment, *, write: bool) -> Iterator[dict[str, torch.Tensor]]:
    """Maps a segment for the block; yields its buffers by name, views of the file.

    The file's size was set when it was allocated; a buffer outside of it is refused.

    Raises:
        ValueError: A buffer does not fit the file or its own shape.
    """
    flags = os.O_RDWR if write else os.O_RDONLY
    descriptor = os.open(segment.path, flags | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        # A private mapping is writable in torch's eyes and still never reaches the file.
        memory = (
            mmap.mmap(descriptor, size, prot=prot)
            if write
            else mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=prot | mmap.PROT_WRITE)
        )
    finally:
        os.close(descriptor)
    # The tensors keep the mapping alive; it is unmapped with the last of them.
    yield {buffer.name: _view(memory, buffer, size) for buffer in segment.buffers}


def _view(memory: mmap.mmap, buffer: meg_store_pb2.NamedBuffer, size: int) -> torch.Tensor:
    dtype = DTYPES[buffer.dtype]
    count = _count(buffer.shape)
    if count * dtype.itemsize != buffer.size_bytes or buffer.offset + buffer.size_bytes > size:
        raise ValueError(f"buffer {buffer.name} does not fit its segment")
    if not count:
        return torch.empty(tuple(buffer.shape), dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=buffer.offset)
    return flat.view(tuple(buffer.shape))


def _count(shape: Sequence[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count

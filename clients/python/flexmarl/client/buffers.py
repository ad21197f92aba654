"""Named buffers: how state lies in memory, and the one hash of its content.

A buffer is a name, an element type in safetensors' spelling, a shape, and bytes. Nothing here knows
torch or numpy: both take a `memoryview`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb

ALIGNMENT: Final = 64
"""Buffers start at multiples of a cache line."""

DTYPE_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "F64": 8,
        "F32": 4,
        "F16": 2,
        "BF16": 2,
        "I64": 8,
        "I32": 4,
        "I16": 2,
        "I8": 1,
        "U64": 8,
        "U32": 4,
        "U16": 2,
        "U8": 1,
        "BOOL": 1,
    }
)
"""Element types and their sizes in bytes."""

_HASH_CHUNK_BYTES = 8 << 20
_RANK_MARK: Final = "@"


def rank_part(name: str, *, rank: int, world_size: int) -> str:
    """Returns the name of the buffer that holds a rank's rows of a tensor, or all of its rows."""
    return name if world_size == 1 else f"{name}{_RANK_MARK}{rank:04d}"


def tensor_of(buffer_name: str) -> str:
    """Returns the name of the tensor whose rows a buffer holds; see `rank_part`."""
    return buffer_name.partition(_RANK_MARK)[0]


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """What a buffer is, without its bytes.

    Attributes:
        name: Such as a parameter's name.
        dtype: Key of `DTYPE_BYTES`.
        shape: Sizes; empty for a scalar.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Size of its bytes.

        Raises:
            ValueError: The element type is unknown.
        """
        size = DTYPE_BYTES.get(self.dtype)
        if size is None:
            raise ValueError(f"buffer {self.name!r}: unknown dtype {self.dtype!r}")
        return math.prod(self.shape) * size


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer: what it is, and a flat view of its bytes (format `B`)."""

    spec: BufferSpec
    data: memoryview

    @property
    def name(self) -> str:
        """Its name."""
        return self.spec.name

    @property
    def dtype(self) -> str:
        """Its element type."""
        return self.spec.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.spec.shape


@dataclass(frozen=True, slots=True)
class Layout:
    """Where buffers lie in a segment."""

    buffers: tuple[pb.NamedBuffer, ...]
    size_bytes: int


def lay_out(specs: Sequence[BufferSpec]) -> Layout:
    """Places buffers one after the other, each aligned.

    Raises:
        ValueError: A name is used twice, or an element type is unknown.
    """
    if len({spec.name for spec in specs}) < len(specs):
        raise ValueError("two buffers have the same name")
    placed: list[pb.NamedBuffer] = []
    offset = 0
    for spec in specs:
        placed.append(
            pb.NamedBuffer(
                name=spec.name,
                dtype=spec.dtype,
                shape=spec.shape,
                offset=offset,
                size_bytes=spec.size_bytes,
            )
        )
        offset += -(-spec.size_bytes // ALIGNMENT) * ALIGNMENT
    return Layout(tuple(placed), max(offset, ALIGNMENT))


def spec_of(buffer: pb.NamedBuffer) -> BufferSpec:
    """What a placed buffer is."""
    return BufferSpec(buffer.name, buffer.dtype, tuple(buffer.shape))


def check_layout(buffers: Iterable[pb.NamedBuffer], *, size_bytes: int) -> None:
    """Checks that buffers are aligned, distinct, of their types' size, and fit.

    Raises:
        ValueError: Names the buffer.
    """
    end = 0
    names: set[str] = set()
    for buffer in sorted(buffers, key=lambda b: (b.offset, b.size_bytes)):
        spec = spec_of(buffer)
        if spec.size_bytes != buffer.size_bytes:
            raise ValueError(
                f"buffer {buffer.name!r}: {buffer.size_bytes} bytes for {spec.dtype} of shape "
                f"{list(spec.shape)}"
            )
        if buffer.offset % ALIGNMENT:
            raise ValueError(f"buffer {buffer.name!r}: offset is no multiple of {ALIGNMENT}")
        if buffer.offset < end or buffer.offset + buffer.size_bytes > size_bytes:
            raise ValueError(f"buffer {buffer.name!r} overlaps another or the segment's end")
        if buffer.name in names:
            raise ValueError(f"buffer {buffer.name!r} is named twice")
        names.add(buffer.name)
        end = buffer.offset + buffer.size_bytes


def content_hash(buffers: Iterable[Buffer]) -> str:
    """Hash of names, types, shapes and bytes: the `weights_hash` that rows and requests carry.

    The buffers are taken in name order; each of name, dtype, shape ("2,3") and bytes is preceded by
    its length as 8 little-endian bytes. Where they lie does not matter.

    Returns:
        `sha256:<hex>`.
    """
    digest = hashlib.sha256()
    for buffer in sorted(buffers, key=lambda b: b.name):
        spec = buffer.spec
        shape = ",".join(map(str, spec.shape))
        for text in (spec.name, spec.dtype, shape):
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(8, "little"))
            digest.update(encoded)
        digest.update(buffer.data.nbytes.to_bytes(8, "little"))
        for start in range(0, buffer.data.nbytes, _HASH_CHUNK_BYTES):
            digest.update(buffer.data[start : start + _HASH_CHUNK_BYTES])
    return f"sha256:{digest.hexdigest()}"

"""Files of tensors in the safetensors format, written without a tensor library."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """One tensor to write.

    Attributes:
        name: As in `state_dict()`.
        dtype: In safetensors' spelling, such as "F32".
        shape: Shape.
        data: Its bytes, row-major.
    """

    name: str
    dtype: str
    shape: Sequence[int]
    data: memoryview


def write_safetensors(
    path: Path, tensors: Iterable[TensorBytes], metadata: Mapping[str, str]
) -> None:
    """Write tensors in the safetensors format, streaming; sorted by name.

    See https://github.com/huggingface/safetensors#format: the size of the header, the header, the
    bytes of all tensors without gaps.
    """
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for tensor in ordered:
        end = offset + tensor.data.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start aligned
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for tensor in ordered:
            file.write(tensor.data)
        file.flush()
        os.fsync(file.fileno())

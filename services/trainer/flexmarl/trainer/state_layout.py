"""How a policy's state lies in segments: full tensors, so that any number of ranks loads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from flexmarl.api.meg_store.v1alpha1 import meg_store_pb2
from flexmarl.client.buffers import BufferSpec

DTYPE_NAMES: Final = {"float64": "F64", "float32": "F32", "bfloat16": "BF16"}
"""Spelling of segments by that of a run's config."""

MOMENTS: Final = ("exp_avg.", "exp_avg_sq.")
"""Prefixes of AdamW's moments in a moments segment."""


def segment_specs(
    kind: str, parameters: Sequence[meg_store_pb2.NamedBuffer], *, weights_dtype: str
) -> list[BufferSpec]:
    """Returns the buffers of one kind of state: "weights", "master", "moments" or "gradients".

    Args:
        kind: See above.
        parameters: Full parameters in the master dtype.
        weights_dtype: Dtype that engines load, as in the run's config.
    """
    prefixes = MOMENTS if kind == "moments" else ("",)
    dtype = DTYPE_NAMES[weights_dtype] if kind == "weights" else None
    return [
        BufferSpec(prefix + item.name, dtype or item.dtype, tuple(item.shape))
        for item in parameters
        for prefix in prefixes
    ]

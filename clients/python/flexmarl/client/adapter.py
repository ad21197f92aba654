"""A policy's adapter as a folder that `peft` loads over its base model.

The master state of a policy with `lora` is the adapter, named as `peft` names its parameters in a
model; a saved adapter has other names, which leave out what it is called there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flexmarl.client.buffers import Buffer, tensor_of
from flexmarl.client.tensor_files import TensorBytes, write_safetensors

_SAVED_PREFIX: Final = "base_model.model."
_CALLED: Final = ".default"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraShape:
    """What an adapter is: `policies.<name>.lora` of a run's resolved config.

    Attributes:
        rank: Rank of each update.
        alpha: Its scale is alpha / rank.
        targets: Layers that have one, by the last part of their name.
    """

    rank: int
    alpha: int
    targets: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """What is written.

    Attributes:
        shape: What it is.
        base_model: Where the base model lies; `peft` looks there, or where it is told to.
        tensors: Full tensors, named as they are saved.
    """

    shape: LoraShape
    base_model: str
    tensors: list[TensorBytes]


def adapter_of(buffers: Iterable[Buffer], *, shape: LoraShape, base_model: str) -> Adapter:
    """Puts an adapter together from master state, whatever number of ranks wrote it.

    Args:
        buffers: Of the master segment, rank by rank.
        shape: Of the policy's adapter.
        base_model: See `Adapter`.
    """
    rows: dict[str, list[Buffer]] = {}
    for buffer in buffers:
        rows.setdefault(tensor_of(buffer.spec.name), []).append(buffer)
    return Adapter(
        shape=shape,
        base_model=base_model,
        tensors=[_whole(name, parts) for name, parts in rows.items()],
    )


def write_adapter(adapter: Adapter, folder: Path) -> None:
    """Writes the folder, which is made."""
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base_model,
        "r": adapter.shape.rank,
        "lora_alpha": adapter.shape.alpha,
        "target_modules": list(adapter.shape.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "adapter_config.json").write_text(text + "\n", encoding="utf-8")
    write_safetensors(folder / "adapter_model.safetensors", adapter.tensors, {"format": "pt"})


def _whole(name: str, parts: list[Buffer]) -> TensorBytes:
    spec = parts[0].spec
    return TensorBytes(
        name=_SAVED_PREFIX + name.replace(_CALLED, ""),
        dtype=spec.dtype,
        shape=(sum(part.spec.shape[0] for part in parts), *spec.shape[1:]),
        data=memoryview(b"".join(part.data for part in parts)),
    )

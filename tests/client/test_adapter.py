"""An adapter's folder: names, shapes and rows, whatever number of ranks wrote the state."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

from safetensors.numpy import load_file

from flexmarl.client.adapter import LoraShape, adapter_of, write_adapter
from flexmarl.client.buffers import Buffer, BufferSpec, rank_part

LAYER = "model.layers.0.self_attn.q_proj"
A, B = f"{LAYER}.lora_A.default.weight", f"{LAYER}.lora_B.default.weight"


def rows(name: str, shape: tuple[int, ...], values: list[float], **ranks: int) -> Buffer:
    data = memoryview(array("f", values)).cast("B")
    return Buffer(BufferSpec(rank_part(name, **ranks), "F32", shape), data)


def test_rows_of_all_ranks_are_put_together_under_the_names_of_a_saved_adapter(
    tmp_path: Path,
) -> None:
    one = [
        rows(A, (1, 2), [1, 2], rank=0, world_size=1),
        rows(B, (3, 1), [3, 4, 5], rank=0, world_size=1),
    ]
    three = [  # the last rank has no row of either
        rows(A, (1, 2), [1, 2], rank=0, world_size=3),
        rows(B, (2, 1), [3, 4], rank=0, world_size=3),
        rows(A, (0, 2), [], rank=1, world_size=3),
        rows(B, (1, 1), [5], rank=1, world_size=3),
        rows(A, (0, 2), [], rank=2, world_size=3),
        rows(B, (0, 1), [], rank=2, world_size=3),
    ]
    shape = LoraShape(rank=1, alpha=4, targets=("q_proj",))
    for name, buffers in (("one", one), ("three", three)):
        folder = tmp_path / name
        write_adapter(adapter_of(buffers, shape=shape, base_model="/models/base"), folder)
        saved = load_file(folder / "adapter_model.safetensors")
        assert {name: tensor.tolist() for name, tensor in saved.items()} == {
            f"base_model.model.{LAYER}.lora_A.weight": [[1, 2]],
            f"base_model.model.{LAYER}.lora_B.weight": [[3], [4], [5]],
        }
        described = json.loads((folder / "adapter_config.json").read_text())
        assert described["r"] == 1
        assert described["lora_alpha"] == 4
        assert described["target_modules"] == ["q_proj"]
        assert described["base_model_name_or_path"] == "/models/base"

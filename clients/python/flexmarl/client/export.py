"""A policy's weights as a Hugging Face folder that `AutoModelForCausalLM` loads.

The weights segment holds the tensors under the names of `state_dict()`, so writing it is a copy:
no tensor library is needed, and the bytes in the file are the bytes that were served.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from flexmarl.client.adapter import Adapter, write_adapter
from flexmarl.client.tensor_files import TensorBytes, write_safetensors
from flexmarl.core.errors import DomainError, ErrorReason

_BASE_FILES: Final = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "LICENSE*",
)
"""What is taken over from the base model's folder, beside its config."""

ADAPTER: Final = "adapter"
"""Folder of a policy's adapter, in that of its merged weights."""

MAX_FILE_BYTES: Final = 5 << 30
"""Largest weights file, as the library splits its own."""

_TORCH_DTYPES: Final = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def write_hf_folder(
    tensors: Sequence[TensorBytes],
    *,
    base_model: Path,
    out: Path,
    metadata: Mapping[str, str] | None = None,
    adapter: Adapter | None = None,
    replace: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Write a model folder; it appears whole or not at all.

    Args:
        tensors: The weights; tied ones once.
        base_model: Folder with config and tokenizer.
        out: Folder to make.
        metadata: Kept in the weights file, for people.
        adapter: Written beside the weights, which it is merged into, in a folder of its own.
        replace: Take the place of a folder that is there already.
        max_file_bytes: Weights beyond are split over several files with an index; a tensor is never
            split.

    Raises:
        DomainError: ALREADY_EXISTS when `out` exists, a link to nowhere included, and `replace` is
            false; MODEL_INVALID when the base folder has no config.
    """
    if os.path.lexists(out) and not replace:
        raise DomainError(ErrorReason.ALREADY_EXISTS, f"{out}: exists already; give another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    try:
        temporary.mkdir()
        _copy_base(base_model, temporary)
        _write_config(base_model, temporary, _torch_dtype(tensors))
        # transformers refuses a weights file that does not name its framework.
        _write_weights(temporary, tensors, {"format": "pt", **(metadata or {})}, max_file_bytes)
        if adapter is not None:
            write_adapter(adapter, temporary / ADAPTER)
        _publish(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def _write_weights(
    folder: Path,
    tensors: Sequence[TensorBytes],
    metadata: Mapping[str, str],
    max_file_bytes: int,
) -> None:
    files: list[list[TensorBytes]] = [[]]
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        held = sum(other.data.nbytes for other in files[-1])
        if files[-1] and held + tensor.data.nbytes > max_file_bytes:
            files.append([])
        files[-1].append(tensor)
    if len(files) == 1:
        write_safetensors(folder / "model.safetensors", files[0], metadata)
        return
    places = {}
    for number, part in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_safetensors(folder / name, part, metadata)
        places.update({tensor.name: name for tensor in part})
    total = sum(tensor.data.nbytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    text = json.dumps(index, indent=2) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _torch_dtype(tensors: Sequence[TensorBytes]) -> str:
    names = {_TORCH_DTYPES[tensor.dtype] for tensor in tensors if tensor.dtype in _TORCH_DTYPES}
    # Mixed weights are loaded in the widest of their types, so that none is rounded.
    return next(name for name in ("float64", "float32", "bfloat16", "float16") if name in names)


def _copy_base(base_model: Path, folder: Path) -> None:
    if not (base_model / "config.json").is_file():
        raise DomainError(ErrorReason.MODEL_INVALID, f"{base_model}: has no config.json")
    for pattern in _BASE_FILES:
        for file in sorted(base_model.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)


def _write_config(base_model: Path, folder: Path, dtype: str) -> None:
    config = json.loads((base_model / "config.json").read_bytes())
    # The base may be stored in another precision, or quantised; these weights are neither.
    config.pop("torch_dtype", None)
    config.pop("quantization_config", None)
    config["dtype"] = dtype
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def _publish(temporary: Path, out: Path) -> None:
    if not os.path.lexists(out):
        temporary.rename(out)
        return
    old = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    out.rename(old)
    temporary.rename(out)
    # Of a link the link alone goes: what it leads to is not of this export.
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old)
    else:
        old.unlink()

"""Exports: what transformers loads is what the segment held, bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from flexmarl.client.export import write_hf_folder
from flexmarl.client.tensor_files import TensorBytes
from flexmarl.core.errors import DomainError

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float64: "F64"}


def tensors_of(model: torch.nn.Module) -> list[TensorBytes]:
    """A weights segment by hand: each stored tensor once, tied ones under their first name."""
    seen: set[int] = set()
    found = []
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        data = memoryview(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        found.append(TensorBytes(name, _DTYPES[tensor.dtype], tuple(tensor.shape), data))
    return found


def small_model(*, tied: bool, dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).to(dtype)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "tokenizer.json").write_text('{"model": "mine"}')
    (folder / "model.safetensors").write_bytes(b"other weights")
    return folder


@pytest.mark.parametrize("dtype", list(_DTYPES))
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_identical_weights(
    base: Path, tmp_path: Path, dtype: torch.dtype, tied: bool
):
    model = small_model(tied=tied, dtype=dtype)
    # The base says another dtype than the one that was trained in.
    (base / "config.json").write_text(
        json.dumps({**model.config.to_dict(), "dtype": "float16", "architectures": ["X"]})
    )
    out = write_hf_folder(tensors_of(model), base_model=base, out=tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    want = model.state_dict()
    assert loaded.state_dict().keys() == want.keys()
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, want[name]), name
    assert (out / "tokenizer.json").read_text() == '{"model": "mine"}'


def test_the_file_says_where_it_comes_from(base: Path, tmp_path: Path):
    model = small_model(tied=False, dtype=torch.float32)
    (base / "config.json").write_text(json.dumps(model.config.to_dict()))
    out = write_hf_folder(
        tensors_of(model), base_model=base, out=tmp_path / "out", metadata={"version": "7"}
    )
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "version": "7"}


def test_an_existing_folder_is_kept_unless_replaced(base: Path, tmp_path: Path):
    model = small_model(tied=False, dtype=torch.float32)
    (base / "config.json").write_text(json.dumps(model.config.to_dict()))
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("keep")
    with pytest.raises(DomainError, match="exists already"):
        write_hf_folder(tensors_of(model), base_model=base, out=out)
    assert (out / "mine").exists()
    write_hf_folder(tensors_of(model), base_model=base, out=out, replace=True)
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out"]


def test_a_failed_export_leaves_nothing(base: Path, tmp_path: Path):
    model = small_model(tied=False, dtype=torch.float32)
    (base / "config.json").write_text("{not json")
    with pytest.raises(ValueError, match="Expecting"):
        write_hf_folder(tensors_of(model), base_model=base, out=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize("tied", [False, True])
def test_large_weights_are_split_over_files(base: Path, tmp_path: Path, tied: bool):
    model = small_model(tied=tied, dtype=torch.float32)
    (base / "config.json").write_text(json.dumps(model.config.to_dict()))
    out = write_hf_folder(
        tensors_of(model), base_model=base, out=tmp_path / "out", max_file_bytes=3000
    )
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    loaded = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    want = model.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, want[name]), name

"""Small real models, their weights as a segment file, and the plain reference to compare with."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from flexmarl.api.rollout.v1.engine_pb2 import (
    EngineBuffer,
    EngineLoad,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
)
from flexmarl.client.buffers import Buffer, BufferSpec, content_hash
from flexmarl.rollout.engines.base import Engine, EngineSettings
from flexmarl.rollout.engines.registry import build_engine

SAFETENSORS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float64: "F64"}


def make_model_folder(folder: Path, *, tied: bool = False, vocab_size: int = 24) -> Path:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        rope_theta=100.0,
        tie_word_embeddings=tied,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    return folder


def reference_model(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.to(dtype).eval()


def write_segment(path: Path, model, *, version: int, tied_twice: bool = False) -> EngineLoad:
    """Write the model's weights as a segment file and describe it."""
    named = dict(model.named_parameters(remove_duplicate=not tied_twice))
    buffers, data, offset = [], bytearray(), 0
    views = []
    for name, tensor in named.items():
        raw = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        dtype, shape = SAFETENSORS[tensor.dtype], tuple(tensor.shape)
        buffers.append(
            EngineBuffer(name=name, dtype=dtype, shape=shape, offset=offset, size_bytes=len(raw))
        )
        views.append(Buffer(BufferSpec(name, dtype, shape), memoryview(raw)))
        data += raw
        data += bytes(-len(data) % 64)
        offset = len(data)
    path.write_bytes(data)
    return EngineLoad(
        load_id=f"load{version}",
        policy="p",
        path=str(path),
        buffers=buffers,
        version=version,
        weights_hash=content_hash(views),
    )


def make_engine(folder: Path, **settings) -> Engine:
    defaults = {
        "engine": "transformers",
        "instance_id": "i0",
        "model_path": str(folder),
        "dtype": "float32",
        "max_context": 0,
        "max_concurrency": 16,
    }
    return build_engine(EngineSettings(**{**defaults, **settings}), wake=lambda: None)


def request(
    name: str,
    prompt: list[int],
    *,
    max_tokens: int = 6,
    version: int = 0,
    temperature: float = 1.0,
    seed: int = 0,
    stop: tuple[int, ...] = (),
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> GenerateRequest:
    return GenerateRequest(
        attempt_id=name,
        instance_id="i0",
        policy="p",
        version=version,
        prompt_tokens=prompt,
        sampling=SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            stop_token_ids=stop,
            seed=seed,
        ),
    )


def drain(engine: Engine) -> dict[str, GenerateResult]:
    results: dict[str, GenerateResult] = {}
    for _ in range(1000):
        if engine.due_in_s is None:
            return results
        results.update((result.attempt_id, result) for result in engine.step())
    raise AssertionError("the engine does not come to an end")


@torch.no_grad()
def reference_logprobs(model, prompt: list[int], tokens: list[int], temperature: float = 1.0):
    """Log-probs of the tokens by one plain full forward pass."""
    logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0]
    scaled = logits.double() / (temperature or 1.0)
    positions = torch.arange(len(prompt) - 1, len(prompt) + len(tokens) - 1)
    return scaled.log_softmax(-1)[positions, torch.tensor(tokens)].tolist()

"""Weights of set 0: read from the model's folder, or drawn from the run's seed."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.trainer.rank.construct import load_config, told_as_invalid

_ATTENTION: Final = "eager"
"""Nothing is computed with these models, and a folder's config may name a kernel of the hub."""


def initial_weights(
    model_path: Path, *, init: str, seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, full float32 tensor) of every parameter, tied ones once.

    Random weights are what the library's own initialisation draws after `torch.manual_seed(seed)`
    (`initializer_range` of config.json); always drawn in float32, so that the compute dtype does
    not change them.

    Raises:
        DomainError: MODEL_INVALID.
    """
    model = _drawn(model_path, seed) if init == "random" else _read(model_path)
    yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())
    # The library's models hold cycles: uncollected, this one would stay beside the policy's state.
    del model
    gc.collect()
    _give_back()


def _give_back() -> None:
    """Has the C library return freed memory: it keeps what many medium-sized tensors lay in."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


def _drawn(model_path: Path, seed: int) -> Any:  # noqa: ANN401 - untyped library
    from transformers import AutoModelForCausalLM

    config = load_config(model_path)
    with told_as_invalid(model_path, "no weights can be drawn"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32, attn_implementation=_ATTENTION, trust_remote_code=False
        )


def _read(model_path: Path) -> Any:  # noqa: ANN401 - untyped library
    from transformers import AutoModelForCausalLM

    load_config(model_path)
    remedy = '; give a folder with model.safetensors, or init = "random"'
    with told_as_invalid(model_path, "weights cannot be read", remedy=remedy):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model_path,
            dtype=torch.float32,
            attn_implementation=_ATTENTION,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,  # other formats would unpickle a foreign file
            output_loading_info=True,
        )
    model, found = loaded
    _check_whole(model_path, found["missing_keys"])
    _check_finite(model_path, model)
    return model


def _check_whole(model_path: Path, missing: Iterable[str]) -> None:
    # The library draws what a file lacks at random, with a warning that nobody reads.
    lacking = sorted(missing)
    if lacking:
        raise DomainError(
            ErrorReason.MODEL_INVALID,
            f"{model_path}: its weights lack {len(lacking)} parameter(s) of config.json, such as "
            f"{lacking[0]}",
            {"model": str(model_path), "parameter": lacking[0]},
        )


def _check_finite(model_path: Path, model: Any) -> None:  # noqa: ANN401 - untyped library
    # Every gradient would be dropped as not finite, and every sampled token be noise.
    for name, parameter in model.named_parameters():
        if parameter.numel() and not torch.isfinite(torch.stack(parameter.aminmax())).all():
            raise DomainError(
                ErrorReason.MODEL_INVALID,
                f"{model_path}: its weights hold NaN or infinity, in {name}",
                {"model": str(model_path), "parameter": name},
            )

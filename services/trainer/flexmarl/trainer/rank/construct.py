"""Builds a Hugging Face causal LM whose parameters have shapes and no memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.trainer.rank.attention import PACKED, register
from flexmarl.trainer.rank.failures import told_apart

_ALTERED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "logits_to_keep_fn")


def architecture_of(model_path: Path) -> str:
    """Returns a hash of the folder's config.json.

    Raises:
        DomainError: MODEL_INVALID when there is none.
    """
    try:
        return hashlib.sha256((model_path / "config.json").read_bytes()).hexdigest()
    except OSError as error:
        raise _invalid(model_path, "has no readable config.json") from error


def load_config(model_path: Path) -> Any:  # noqa: ANN401 - untyped library
    """Reads config.json of a model folder, without running code from it.

    Raises:
        DomainError: MODEL_INVALID.
    """
    from transformers import AutoConfig

    architecture_of(model_path)
    with told_as_invalid(model_path, "config.json"):
        # Unless it is told not to, the library asks on the terminal whether to run a folder's code.
        config = AutoConfig.from_pretrained(
            model_path, local_files_only=True, trust_remote_code=False
        )
    for name in _ALTERED_LOGITS:
        if getattr(config, name, None) not in (None, 1.0):
            raise _invalid(model_path, f"config.json: {name} is not supported for training")
    text = config.get_text_config()
    heads, shared = (
        getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads")
    )
    if heads and shared and heads % shared:  # the library would find out in its first pass
        why = f"{heads} attention heads cannot share {shared} of keys and values"
        raise _invalid(model_path, f"config.json: {why}")
    return config


def build_empty(model_path: Path, *, dtype: torch.dtype, device: torch.device) -> Any:  # noqa: ANN401
    """Returns the model with parameters on "meta" and tied; buffers are set and on the device.

    Raises:
        DomainError: MODEL_INVALID.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = load_config(model_path)
    register()
    kind = getattr(config, "model_type", "")
    # Drawing what has no memory would be half of the time.
    with (
        told_as_invalid(model_path, f"no causal language model can be made of it ({kind})"),
        _parameters_on_meta(),
        no_init_weights(),
    ):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=PACKED, trust_remote_code=False
        )
    model.tie_weights()
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    named = dict(model.named_parameters(remove_duplicate=False))
    extra = [name for name in model.state_dict() if name not in named]
    if extra:
        raise _invalid(model_path, f"{extra[0]} is state that is not a parameter; not supported")
    return model


@contextmanager
def told_as_invalid(model_path: Path, what: str, *, remedy: str = "") -> Iterator[None]:
    """Tells whatever the library raises over a foreign folder by the folder's name.

    That may be anything: one value of another type than it wants is told in five ways.

    Raises:
        DomainError: MODEL_INVALID; OUT_OF_MEMORY, which is no fault of the folder.
    """
    try:
        yield
    except DomainError:
        raise
    except Exception as error:
        known = told_apart(error)
        if known is not None and known.reason is ErrorReason.OUT_OF_MEMORY:
            raise known from error
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if "trust_remote_code" in text:
            text = "it needs code of its own, and none is run; give a model that transformers has"
        raise _invalid(model_path, f"{what}: {text}{remedy}") from error


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters registered inside take no memory and no time to initialise; buffers are real."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.data.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _invalid(model_path: Path, text: str) -> DomainError:
    return DomainError(
        ErrorReason.MODEL_INVALID, f"{model_path} {text}", {"model": str(model_path)}
    )

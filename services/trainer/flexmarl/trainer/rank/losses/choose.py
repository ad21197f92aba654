"""The policy loss that a config names: one of the trainer's, or a function of the run's package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.algorithm_config import LossConfig
from flexmarl.trainer.rank.failures import told_apart
from flexmarl.trainer.rank.losses.base import PolicyInputs, PolicyLoss, PolicyTerm
from flexmarl.trainer.rank.losses.registry import LOSSES
from flexmarl.trainer.rank.user_code import load

_TENSORS: Final = ("current", "old", "log_ratio", "advantage", "mask", "row", "row_tokens")


def choose(kind: str, *, package: Path) -> PolicyLoss:
    """Returns the loss.

    Raises:
        DomainError: WORKFLOW_IMPORT_FAILED.
    """
    known = LOSSES.get(kind)
    return known if known is not None else _checked(kind, load(package, kind))


def _checked(name: str, function: Any) -> PolicyLoss:  # noqa: ANN401 - what a user wrote
    """Wraps a user's loss: whatever it does wrong is said by its name."""

    def loss(inputs: PolicyInputs, config: LossConfig) -> PolicyTerm:
        before = _versions(inputs)
        try:
            with torch.enable_grad():  # and as it was afterwards, whatever the loss made of it
                found = function(inputs, config)
        except (Exception, SystemExit) as error:
            known = told_apart(error)
            if known is not None and known.reason is ErrorReason.OUT_OF_MEMORY:
                raise  # what a smaller pass may cure is no fault of the loss
            raise _raised(name, f"{type(error).__name__}: {error}") from error
        term: PolicyTerm = found
        if isinstance(found, torch.Tensor):
            term = PolicyTerm(per_token=found)
        wrong = _wrong(term, inputs)
        changed = [
            field for field, version in _versions(inputs).items() if version != before[field]
        ]
        if changed:
            wrong = f"changed inputs.{changed[0]} in place; compute with a copy of it"
        if wrong:
            raise _raised(name, wrong)
        return term

    return loss


def _versions(inputs: PolicyInputs) -> dict[str, int]:
    """How often each tensor was written to: what comes after the loss reads them, too."""
    return {field: getattr(inputs, field)._version for field in _TENSORS}


def _wrong(term: Any, inputs: PolicyInputs) -> str | None:  # noqa: ANN401 - what a user returned
    """Says what is wrong with what a loss returned."""
    per_token = getattr(term, "per_token", term)
    if not isinstance(term, PolicyTerm) or not isinstance(per_token, torch.Tensor):
        return f"returned {type(per_token).__name__}, not a tensor or a PolicyTerm of one"
    if per_token.shape != inputs.current.shape or not per_token.is_floating_point():
        return f"returned {_kind(per_token)} for {_kind(inputs.current)}: one number per token"
    if not per_token.requires_grad:
        return "returned losses that do not depend on inputs.current"
    fractions: Any = term.fractions
    if not isinstance(fractions, Mapping):
        return f"returned {type(fractions).__name__} as fractions, not a mapping"
    for name, flags in fractions.items():
        if not isinstance(name, str):
            return f"returned a fraction named {name!r}: its name is a text"
        if (
            not isinstance(flags, torch.Tensor)
            or flags.shape != inputs.current.shape
            or flags.dtype != torch.bool
        ):
            return f"returned {_kind(flags)} as fraction {name!r}: one boolean per token"
    return None


def _kind(found: Any) -> str:  # noqa: ANN401 - what a user returned
    if isinstance(found, torch.Tensor):
        return f"{tuple(found.shape)} of {found.dtype}"
    return type(found).__name__


def _raised(name: str, why: str) -> DomainError:
    return DomainError(ErrorReason.LOSS_RAISED, f"loss {name}: {why}", {"loss": name})

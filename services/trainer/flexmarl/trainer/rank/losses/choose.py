"""The policy loss that a config names: one of the trainer's, or a function of the run's package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.algorithm_config import LossConfig
from flexmarl.trainer.rank.failures import told_apart
from flexmarl.trainer.rank.losses.base import PolicyInputs, PolicyLoss, PolicyTerm
from flexmarl.trainer.rank.losses.registry import LOSSES
from flexmarl.trainer.rank.user_code import load


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
        try:
            term = function(inputs, config)
        except Exception as error:
            known = told_apart(error)
            if known is not None and known.reason is ErrorReason.OUT_OF_MEMORY:
                raise  # what a smaller pass may cure is no fault of the loss
            raise _raised(name, f"{type(error).__name__}: {error}") from error
        if isinstance(term, torch.Tensor):
            term = PolicyTerm(per_token=term)
        if not isinstance(term, PolicyTerm):
            raise _raised(name, f"returned {type(term).__name__}, not a tensor or a PolicyTerm")
        if term.per_token.shape != inputs.current.shape:
            shapes = f"{tuple(term.per_token.shape)} for {tuple(inputs.current.shape)}"
            raise _raised(name, f"returned the shape {shapes}: one number per token")
        if not term.per_token.requires_grad:
            raise _raised(name, "returned losses that do not depend on inputs.current")
        return term

    return loss


def _raised(name: str, why: str) -> DomainError:
    return DomainError(ErrorReason.LOSS_RAISED, f"loss {name}: {why}", {"loss": name})

"""What went wrong in a rank, told apart: too little memory, a wait for other ranks, the rest."""

from __future__ import annotations

from typing import Final

import torch
import torch.distributed as dist

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.process_groups import SECOND_HAND

_NO_MEMORY: Final = ("can't allocate memory", "not enough memory", "out of memory")
_WAITED: Final = ("timed out", "timeout", "connection closed by peer", "connection reset")
_REASONS: Final = tuple(ErrorReason)


def told_apart(error: BaseException) -> DomainError | None:
    """Returns the domain error that a library's exception stands for; None for any other."""
    if isinstance(error, DomainError):
        return error
    text = str(error).lower()
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(part in text for part in _NO_MEMORY)
    ):
        return DomainError(ErrorReason.OUT_OF_MEMORY, "a pass does not fit the device's memory")
    if isinstance(error, RuntimeError) and any(part in text for part in _WAITED):
        return DomainError(
            ErrorReason.DEADLINE_EXCEEDED, "waited too long for other ranks in a collective"
        )
    return None


def agree(error: DomainError | None, *, group: dist.ProcessGroup, device: torch.device) -> None:
    """Makes all ranks fail when one does (collective), so that none waits for one that gave up.

    Raises:
        DomainError: This rank's own error, or the reason of another rank's.
    """
    if group.size() > 1:
        code = 0 if error is None else 1 + _REASONS.index(error.reason)
        worst = torch.tensor([code], device=device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
        code = int(worst.item())
        if error is None and code:
            error = DomainError(
                _REASONS[code - 1], "another rank of the group failed", {SECOND_HAND: "true"}
            )
    if error is not None:
        raise error

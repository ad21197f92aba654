"""Returning to an older version, when the state of the newer ones is lost with the memory tier.

    newest version whole, its states whole   nothing is lost
    newest version whole, a state is not     that policy's gradients are computed again
    an older version is the newest whole     the run goes on from it; later batches come again

Batches from that version on are begun under the next attempt: rows of the attempt before are void
(rolled_back), and the same seeds draw the same tokens again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flexmarl.core.errors import DomainError, ErrorReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Return:
    """What is given up.

    Attributes:
        version: The newest version from now on; None: none was committed, the policies begin anew.
        newest: The newest version so far.
        reset: Policies whose newest state becomes that of the version.
    """

    version: int | None
    newest: int | None
    reset: frozenset[str]

    @property
    def abandons(self) -> bool:
        """Whether committed versions are given up."""
        return self.version != self.newest


def plan_return(
    run_id: str, *, versions: Mapping[int, bool], states: Mapping[str, bool]
) -> Return | None:
    """Decides what a run has to give up; None where everything is there.

    Args:
        run_id: The run, for the error.
        versions: Whether all segments of a version are there, by version.
        states: Whether all segments of a policy's newest state are there, by policy.

    Raises:
        DomainError: SEGMENT_NOT_FOUND: no version is whole.
    """
    newest = max(versions, default=None)
    whole = max((version for version, is_whole in versions.items() if is_whole), default=None)
    if newest is not None and whole is None:
        raise DomainError(
            ErrorReason.SEGMENT_NOT_FOUND,
            f"run {run_id!r}: no version is whole any more: the memory tier is lost, and no copy "
            "of a version was on disk (store.state_to_disk_every); train it again",
            {"run": run_id},
        )
    lost = frozenset(policy for policy, is_whole in states.items() if not is_whole)
    if whole == newest and not lost:
        return None
    reset = lost if whole == newest else frozenset(states)
    return Return(version=whole, newest=newest, reset=reset)


def batch_attempt(returned_to: Iterable[int], batch: int) -> int:
    """Attempt of a batch in a run that has returned to these versions."""
    return sum(version <= batch for version in returned_to)

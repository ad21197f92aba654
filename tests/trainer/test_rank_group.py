"""Why a group failed, when its ranks fail one for want of the other."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.process_groups import SECOND_HAND
from flexmarl.trainer import rank_group
from flexmarl.trainer.rank_group import RankGroup
from flexmarl.trainer.workers import Worker


class StandIn:
    """A worker that fails after a while, or never answers until it is killed.

    Args:
        heard: It has heard of another one's failure, and that is all it says.
    """

    def __init__(
        self, number: int, reason: ErrorReason | None, *, after_s: float = 0.0, heard: bool = False
    ) -> None:
        self.slot, self.pid, self.position = f"slot{number}", 70 + number, number
        self._reason, self._after_s = reason, after_s
        self._metadata = {SECOND_HAND: "true"} if heard else {}
        self._killed = asyncio.Event()

    async def call(self, _: rank_pb2.RankCommand, *, timeout_s: float) -> rank_pb2.RankReply:
        if self._reason is None:
            await self._killed.wait()
            raise DomainError(ErrorReason.CHILD_DIED, f"{self.slot} was killed")
        await asyncio.sleep(self._after_s)
        raise DomainError(self._reason, f"{self.slot} failed", self._metadata)

    def kill(self) -> None:
        self._killed.set()


WAITED, DIED = ErrorReason.DEADLINE_EXCEEDED, ErrorReason.CHILD_DIED
CASES: dict[str, tuple[list[tuple[ErrorReason | None, float]], ErrorReason, str]] = {
    "who_waited_heard_of_it_before_the_service": ([(WAITED, 0.0), (DIED, 0.02)], DIED, "slot1"),
    "who_waited_is_last": ([(WAITED, 0.02), (DIED, 0.0)], DIED, "slot1"),
    "who_hangs_is_named": ([(WAITED, 0.0), (None, 0.0)], DIED, r"slot1 \(pid 71\) did not arrive"),
    "out_of_memory_leaves_others_waiting": (
        [(None, 0.0), (ErrorReason.OUT_OF_MEMORY, 0.0)],
        ErrorReason.OUT_OF_MEMORY,
        "slot1 failed",
    ),
    "all_waited": ([(WAITED, 0.0), (WAITED, 0.0)], WAITED, "failed"),
}


@pytest.mark.parametrize("case", CASES)
async def test_the_cause_is_told_and_nobody_is_left_waiting(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, reason, says = CASES[case]
    hangs = any(why is None for why, _ in ranks)
    monkeypatch.setattr(rank_group, "_REFUSAL_GRACE_S", 0.2 if hangs else 60.0)
    workers: list[Any] = [
        StandIn(number, why, after_s=after_s) for number, (why, after_s) in enumerate(ranks)
    ]
    group = RankGroup(cast("list[Worker]", workers), command_timeout_s=1.0)
    with pytest.raises(DomainError, match=says) as caught:
        await group.command(rank_pb2.RankCommand())
    assert caught.value.reason is reason


@pytest.mark.parametrize("first", [0, 1])
async def test_who_only_heard_of_a_failure_is_not_its_cause(first: int) -> None:
    """As when one rank cannot read its state: all fail, and one knows which file it was."""
    workers: list[Any] = [
        StandIn(
            number,
            ErrorReason.CHECKSUM_MISMATCH,
            after_s=0.0 if number == first else 0.02,
            heard=number == 0,
        )
        for number in range(2)
    ]
    group = RankGroup(cast("list[Worker]", workers), command_timeout_s=1.0)
    with pytest.raises(DomainError, match="slot1 failed"):
        await group.command(rank_pb2.RankCommand())

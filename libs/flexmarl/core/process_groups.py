"""Which process groups of a trainer's workers are kept, and the name that each was made under.

Invariants:
    A name stands for one making of a group. Made again, a group has another name, so that nobody
    reads at the rendezvous what its members of long ago had left there.
    Members keep a group or drop it alike, because one book says which are kept. If each decided for
    itself, one could use a kept group while another waits for everybody to make it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from flexmarl.core.access import is_loopback
from flexmarl.core.errors import DomainError, ErrorReason

NUMBERS_OF_OTHERS: Final = 512
"""A trainer's workers have numbers below, their position; ranks of other trainers from here on."""

SECOND_HAND: Final = "second_hand"
"""Metadata of a rank's failure that is another one's: it has heard of it, not of its cause."""


def numbers_of_members(own: Sequence[int], *, first_rank: int, world_size: int) -> tuple[int, ...]:
    """Numbers by which a trainer's own workers know the members of a group, in order of rank.

    Args:
        own: Positions of its workers that are in the group.
        first_rank: Rank of the first of them; the others follow.
        world_size: Ranks of the group.
    """
    members = [NUMBERS_OF_OTHERS + rank for rank in range(world_size)]
    members[first_rank : first_rank + len(own)] = own
    return tuple(members)


def check_part(*, first_rank: int, num_slots: int, world_size: int) -> None:
    """Checks that a trainer's slots can be a part of a group.

    Raises:
        DomainError: INVALID_ARGUMENT.
    """
    if not (num_slots and first_rank + num_slots <= world_size <= NUMBERS_OF_OTHERS):
        raise DomainError(
            ErrorReason.INVALID_ARGUMENT,
            f"{num_slots} slot(s) from rank {first_rank} on are no part of a group of {world_size} "
            f"ranks; it has {NUMBERS_OF_OTHERS} at most",
        )


def check_meeting_place(host: str, *, peers: Sequence[str]) -> None:
    """Checks that ranks of other trainers can reach the rendezvous of the leading one.

    Args:
        host: Where it listens.
        peers: Addresses of the other trainers, `host:port`.

    Raises:
        DomainError: INVALID_ARGUMENT: it is this machine's own, and a trainer is on another one.
    """
    away = [peer for peer in peers if not is_loopback(peer.rpartition(":")[0])]
    if away and is_loopback(host):
        raise DomainError(
            ErrorReason.INVALID_ARGUMENT,
            f"ranks of the trainer at {away[0]} cannot meet at {host}: set interface and "
            "rendezvous_host of every trainer to its private network",
            {"trainer": away[0]},
        )


class GroupBook:
    """Names groups; the one used longest ago is given up when there are too many.

    Args:
        max_groups: Most groups kept.
    """

    def __init__(self, *, max_groups: int) -> None:
        self._max_groups = max_groups
        self._names: OrderedDict[tuple[str, ...], str] = OrderedDict()
        self._num_made = 0

    @property
    def kept(self) -> Sequence[str]:
        """Names of the groups that are kept; all others are to be destroyed."""
        return tuple(self._names.values())

    def meet(self, members: Sequence[str]) -> str:
        """The name of a group, a new one when it has to be made.

        Args:
            members: Names of its processes in order of rank; one started anew has another name.
        """
        key = tuple(members)
        if key not in self._names:
            self._num_made += 1
            self._names[key] = f"{'-'.join(key)}n{self._num_made}"
        self._names.move_to_end(key)
        if len(self._names) > self._max_groups:
            self._names.popitem(last=False)
        return self._names[key]

    def forget(self, member: str) -> None:
        """A process is gone, and so is every group that it was in."""
        for key in [key for key in self._names if member in key]:
            del self._names[key]

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

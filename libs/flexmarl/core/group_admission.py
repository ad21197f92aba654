"""Which queries a batch takes: its first groups, and further ones in place of those that drop out.

    begin    as many groups as the batch has, or as queries are left
    dropped  the next query, at most `replace_max` times in a batch
    lost     its own query again, as often as it takes: it is no fault of its own
    cut off  what a crash left out of an admission, so that no query is skipped

One admission is written at a time: a crash between two could leave a gap, and its query untaken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from flexmarl.core.closure import ClosureRules, may_replace
from flexmarl.core.group_state import GroupState
from flexmarl.core.ids import BatchId, GroupId
from flexmarl.core.run_effects import AdmitGroups, GroupSpec
from flexmarl.core.states import GroupStatus


class GroupAdmission:
    """Admissions of one batch attempt; see the module.

    Args:
        batch: Batch and attempt.
        groups: Its groups by id, which the batch adds to; read here.
        num_groups: Groups that it shall have.
        rules: How often dropped ones are replaced.
        query_at: Dataset row of the group with an ordinal, replacements counted on.
        max_groups: Queries that the dataset has left, replacements included; None: no end.

    Attributes:
        num_replaced: Groups that took, or will take, the next query in place of a dropped one.
    """

    def __init__(
        self,
        batch: BatchId,
        groups: Mapping[str, GroupState],
        *,
        num_groups: int,
        rules: ClosureRules,
        query_at: Callable[[int], int],
        max_groups: int | None,
    ) -> None:
        self.num_replaced = 0
        self._batch = batch
        self._groups = groups
        self._num_first = num_groups if max_groups is None else min(num_groups, max_groups)
        self._rules = rules
        self._query_at = query_at
        self._max_groups = max_groups
        self._to_replace: list[str] = []
        self._gaps: tuple[GroupSpec, ...] = ()
        self._admitting = False

    @property
    def num_admitted(self) -> int:
        """Queries taken so far, replacements included."""
        return sum(not group.spec.repeats for group in self._groups.values())

    @property
    def is_replacing(self) -> bool:
        """Whether a group is due in place of another one."""
        return bool(self._to_replace)

    # What happens

    def restored(self) -> None:
        """The groups that the store has are known."""
        self.num_replaced = _num_replacing(group.spec for group in self._groups.values())
        self._gaps = self._find_gaps()

    def acknowledged(self) -> None:
        """The store has what was admitted last."""
        self._admitting = False

    def replace(self, group: GroupState) -> bool:
        """A group has ended; False when another one should take its place and none is left."""
        if not self._is_unreplaced(group):
            return True
        if not group.lost:
            taken = self.num_admitted + sum(not self._groups[n].lost for n in self._to_replace)
            is_left = self._max_groups is None or taken < self._max_groups
            if not (is_left and may_replace(replaced=self.num_replaced, rules=self._rules)):
                return False
            self.num_replaced += 1
        self._to_replace.append(group.spec.group_id)
        return True

    # What is due

    def opening(self) -> Iterator[AdmitGroups]:
        """The first groups, or those of them, and of later ones, that a crash left out."""
        if not self._groups:
            yield self._admit(self._specs([""] * self._num_first), "the batch begins")
        elif self._gaps:
            self.num_replaced += _num_replacing(self._gaps)
            gaps, self._gaps = self._gaps, ()
            yield self._admit(gaps, "a crash cut their admission")

    def replacing(self) -> Iterator[AdmitGroups]:
        """Groups in place of others, once the admission before is written."""
        if self._to_replace and not self._admitting:
            replaces, self._to_replace = self._to_replace, []
            yield self._admit(self._specs(replaces), "in place of dropped groups")

    # How it is done

    def _admit(self, specs: tuple[GroupSpec, ...], reason: str) -> AdmitGroups:
        self._admitting = True
        return AdmitGroups(batch=self._batch.batch, groups=specs, reason=reason)

    def _specs(self, replaces: Sequence[str]) -> tuple[GroupSpec, ...]:
        specs: list[GroupSpec] = []
        position = self.num_admitted
        for ordinal, replaced in enumerate(replaces, start=len(self._groups)):
            specs.append(self._spec(ordinal, position=position, replaces=replaced))
            position += not specs[-1].repeats
        return tuple(specs)

    def _spec(self, ordinal: int, *, position: int, replaces: str) -> GroupSpec:
        """A group; `position`: of the query that it takes, unless it repeats a lost one's."""
        lost = self._groups[replaces] if replaces and self._groups[replaces].lost else None
        return GroupSpec(
            group_id=str(GroupId(self._batch, ordinal)),
            ordinal=ordinal,
            query_index=self._query_at(position) if lost is None else lost.spec.query_index,
            replaces=replaces,
            repeats=lost is not None,
        )

    def _find_gaps(self) -> tuple[GroupSpec, ...]:
        """Groups that an admission named and the store does not have.

        An admission is one write per store shard; a crash between two leaves some of them out.
        """
        known = {group.spec.ordinal: group.spec for group in self._groups.values()}
        unreplaced = [name for name, group in self._groups.items() if self._is_unreplaced(group)]
        missing: list[GroupSpec] = []
        position = 0
        for ordinal in range(max(self._num_first, max(known) + 1)):
            spec = known.get(ordinal)
            if spec is None:
                replaces = unreplaced.pop(0) if ordinal >= self._num_first else ""
                spec = self._spec(ordinal, position=position, replaces=replaces)
                missing.append(spec)
            position += not spec.repeats
        return tuple(missing)

    def _is_unreplaced(self, group: GroupState) -> bool:
        dropped = group.status is GroupStatus.DROPPED
        return dropped and not any(
            other.spec.replaces == group.spec.group_id for other in self._groups.values()
        )


def _num_replacing(specs: Iterable[GroupSpec]) -> int:
    return sum(bool(spec.replaces) and not spec.repeats for spec in specs)

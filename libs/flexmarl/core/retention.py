"""Which state segments of a run are still needed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSet:
    """One state record: the set (policy, version) and the segments it names."""

    policy: str
    version: int
    keys: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What retention keeps: segments, state records, and every manifest's from a version on."""

    keys: frozenset[str]
    records: frozenset[tuple[str, int]]
    floor: int


def needed_sets(saved: Iterable[SavedSet], *, committed: int) -> list[SavedSet]:
    """Returns the sets that a run goes on from: each policy's newest, and all uncommitted ones.

    Of the others the record alone may be kept, beside what the manifest of its version names: the
    sum of gradients that it may name went with the update.

    Args:
        saved: All state records of the run.
        committed: Newest version; -1 before the first.
    """
    sets = list(saved)
    newest: dict[str, int] = {}
    for item in sets:
        newest[item.policy] = max(newest.get(item.policy, -1), item.version)
    return [s for s in sets if s.version == newest[s.policy] or s.version > committed]


def keep(
    *,
    manifests: Mapping[int, Collection[str]],
    saved: Iterable[SavedSet],
    retain_versions: int,
    on_disk: int | None = None,
    pinned: Iterable[int] = (),
) -> Kept:
    """Decides what a run still needs.

    Nothing is given up from the floor on: the smallest of the newest `retain_versions` manifests,
    the newest version that is whole on disk, and the pinned versions. Below it only each policy's
    newest record is kept.

    Args:
        manifests: Segment keys by version.
        saved: All state records of the run.
        retain_versions: At least 1.
        on_disk: Newest version that is whole on disk; None when none is.
        pinned: Versions that somebody still reads.
    """
    versions = sorted(manifests)
    floors = [versions[-retain_versions:][0]] if versions else []
    floors += [version for version in (on_disk, *pinned) if version is not None]
    floor = min(floors, default=0)
    keys = {key for version in versions if version >= floor for key in manifests[version]}
    sets = list(saved)
    needed = needed_sets(sets, committed=versions[-1] if versions else -1)
    for item in needed:
        keys |= item.keys
    records = {(s.policy, s.version) for s in sets if s in needed or s.version >= floor}
    return Kept(keys=frozenset(keys), records=frozenset(records), floor=floor)

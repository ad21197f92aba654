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
    """What retention keeps."""

    keys: frozenset[str]
    records: frozenset[tuple[str, int]]


def keep(
    *,
    manifests: Mapping[int, Collection[str]],
    saved: Iterable[SavedSet],
    retain_versions: int,
) -> Kept:
    """Decides what a run still needs.

    Kept are the segments of the newest `retain_versions` manifests, of each policy's newest record,
    and of every record beyond the newest manifest (a batch in progress).

    Args:
        manifests: Segment keys by version.
        saved: All state records of the run.
        retain_versions: At least 1.
    """
    versions = sorted(manifests)[-retain_versions:]
    keys = {key for version in versions for key in manifests[version]}
    newest: dict[str, SavedSet] = {}
    sets = list(saved)
    for item in sets:
        if item.policy not in newest or item.version > newest[item.policy].version:
            newest[item.policy] = item
    committed = versions[-1] if versions else -1
    needed = [s for s in sets if newest[s.policy] is s or s.version > committed]
    for item in needed:
        keys |= item.keys
    oldest = versions[0] if versions else 0
    records = {(s.policy, s.version) for s in sets if s in needed or s.version >= oldest}
    return Kept(keys=frozenset(keys), records=frozenset(records))

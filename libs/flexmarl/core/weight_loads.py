"""Which instance loads which version, when (design, commit; I4, I11).

Instances may *load* b+1 when no open sample of b can call them, and *serve* it after the commit:
samples of b+1 are not admitted before. So the target of every instance is the oldest version that
has open samples; without open samples it is the newest version whose weights were announced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InstanceWeights:
    """What an instance holds.

    Attributes:
        instance_id: Instance.
        policy: Policy it serves.
        version: Version it serves; None while it serves none.
        weights_hash: Content hash of what it holds.
        requested: Version and content hash that it was told to load and has not answered about;
            None otherwise.
        not_before: Time before which a refused load is not repeated.
    """

    instance_id: str
    policy: str
    version: int | None
    weights_hash: str
    requested: tuple[int, str] | None
    not_before: float


@dataclass(frozen=True, slots=True)
class Load:
    """Tell these instances of a policy to take over the weights of a version."""

    policy: str
    version: int
    weights_hash: str
    instance_ids: tuple[str, ...]
    reason: str


def target_version(open_versions: Mapping[int, int], announced: list[int]) -> int | None:
    """Version that a policy's instances should hold now.

    Args:
        open_versions: Number of open samples by version.
        announced: Versions whose weights of this policy are known.
    """
    needed = [version for version, count in open_versions.items() if count > 0]
    if not needed:
        return max(announced, default=None)
    oldest = min(needed)
    return oldest if oldest in announced else None


def decide_loads(
    instances: list[InstanceWeights],
    *,
    open_versions: Mapping[int, int],
    weights: Mapping[tuple[str, int], str],
    now: float,
) -> list[Load]:
    """Loads to order now.

    Args:
        instances: Reachable instances.
        open_versions: Number of open samples by version.
        weights: Content hash by (policy, version) of the weights that were announced.
        now: Seconds.
    """
    loads: list[Load] = []
    for policy in sorted({instance.policy for instance in instances}):
        announced = [version for name, version in weights if name == policy]
        target = target_version(open_versions, announced)
        if target is None:
            continue
        wanted = weights[(policy, target)]
        ids = tuple(
            instance.instance_id
            for instance in instances
            if instance.policy == policy
            and (instance.version, instance.weights_hash) != (target, wanted)
            and instance.requested != (target, wanted)
            and instance.not_before <= now
        )
        if ids:
            reason = "open_samples" if any(open_versions.values()) else "newest_announced"
            loads.append(Load(policy, target, wanted, tuple(sorted(ids)), reason))
    return loads

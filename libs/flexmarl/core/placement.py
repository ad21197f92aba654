"""Which host runs which instance: every policy keeps one (I10).

A policy's instances are spread over the hosts, so that one host's death takes as few of them as
possible; between equals the host with the fewest instances gets one. An instance stays on the host
that has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from flexmarl.core.errors import DomainError, ErrorReason


@dataclass(frozen=True, slots=True)
class HostRoom:
    """A connected engine host.

    Attributes:
        host_id: Name.
        max_instances: Most instances it runs; 0 means as many as asked for.
    """

    host_id: str
    max_instances: int


def instance_id(policy: str, ordinal: int) -> str:
    """Id of the `ordinal`-th instance that a policy has at start; moved instances keep theirs."""
    return f"{policy}-{ordinal}"


def check_capacity(wanted: Mapping[str, int], hosts: list[HostRoom]) -> None:
    """Refuses a run whose policies cannot each have an instance.

    Args:
        wanted: Instances per policy.
        hosts: Connected hosts.

    Raises:
        DomainError: NOT_ENOUGH_INSTANCES, with the arithmetic.
    """
    if not hosts or any(host.max_instances == 0 for host in hosts):
        return  # no host yet: the run waits for one, and says so in its status
    room = sum(host.max_instances for host in hosts)
    if room >= len(wanted):
        return
    rooms = " + ".join(f"{h.max_instances} ({h.host_id})" for h in hosts)
    raise DomainError(
        ErrorReason.NOT_ENOUGH_INSTANCES,
        f"{len(wanted)} policies ({', '.join(sorted(wanted))}) need at least {len(wanted)} "
        f"instances, one each; the engine hosts have room for {rooms} = {room}: "
        f"raise max_engines of a host, add a host, or let agents share a policy",
        {"policies": str(len(wanted)), "room": str(room)},
    )


def place(
    assigned: Mapping[str, str], hosts: list[HostRoom], current: Mapping[str, str]
) -> dict[str, str]:
    """Host of each instance that can run.

    First one instance of every policy, then the second of each, and so on, while there is room: a
    shortage takes instances from the policies with most, never a policy's only one. Of a policy's
    instances, and of as many of several policies, those come first that run already.

    Args:
        assigned: Policy of each instance.
        hosts: Connected hosts.
        current: Host of each instance that is placed already; others' entries are ignored.

    Returns:
        Host by instance id.
    """
    room = {host.host_id: host.max_instances or 1 << 30 for host in hosts}
    by_policy: dict[str, list[str]] = {}
    for name in sorted(assigned, key=lambda name: (current.get(name) not in room, _natural(name))):
        by_policy.setdefault(assigned[name], []).append(name)
    order = sorted(
        (rank, current.get(name) not in room, policy, name)
        for policy, names in by_policy.items()
        for rank, name in enumerate(names)
    )
    chosen = [name for *_, name in order[: sum(room.values())]]
    used = dict.fromkeys(room, 0)
    shares: Counter[tuple[str, str]] = Counter()
    placed: dict[str, str] = {}

    def put(name: str, host: str) -> None:
        placed[name] = host
        used[host] += 1
        shares[assigned[name], host] += 1

    # What runs is counted first: nothing that is to be started takes its place.
    for name in chosen:
        host = current.get(name)
        if host in room and used[host] < room[host]:
            put(name, host)
    for name in chosen:
        if name not in placed:
            free = [host for host in sorted(room) if used[host] < room[host]]
            put(name, min(free, key=lambda h: (shares[assigned[name], h], used[h])))
    return placed


def _natural(instance: str) -> tuple[str, int]:
    """Sorts `p-10` after `p-9`."""
    policy, _, ordinal = instance.rpartition("-")
    return policy, int(ordinal)

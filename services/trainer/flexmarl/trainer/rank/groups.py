"""Process groups of a worker: many small ones, made on demand, kept, independent of each other.

A worker is in several groups over its life, alone and with other slots' workers, and a group's
other members may die without harming it. A common real default group would break that promise, so
the default group is torch's "fake" one: it gives every worker its global number (its position in
the trainer) and never communicates. Real groups (gloo, NCCL) are made beside it with their own
store; members are named by global number. Numbers never leave a worker: members of other trainers
have numbers of this worker's own making, and what members have to agree on is the group's prefix.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from flexmarl.core.process_groups import NUMBERS_OF_OTHERS

MAX_POSITIONS = 2 * NUMBERS_OF_OTHERS
"""Size of the numbering that the default group gives."""


def join_numbering(position: int, *, interface: str) -> None:
    """Gives this process its global number and names the interface of its groups.

    gloo would otherwise resolve the host's own name, which can hang (127.0.1.1 in containers).
    """
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ["NCCL_SOCKET_IFNAME"] = interface
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(
        backend="fake", rank=position, world_size=MAX_POSITIONS, store=FakeStore()
    )


def make_group(
    *,
    name: str,
    members: tuple[int, ...],
    position: int,
    store: Store,
    device: torch.device,
    timeout_s: float,
) -> dist.ProcessGroup:
    """Makes a group of the workers at `members`; waits for all of them, at most `timeout_s`."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    group: dist.ProcessGroup
    group, _ = c10d._new_process_group_helper(
        len(members),
        members.index(position),
        list(members),
        dist.Backend(backend),
        store,
        group_name=c10d.GroupName(name),
        timeout=timedelta(seconds=timeout_s),
        device_id=device if backend == "nccl" else None,
    )
    # What torch's own new_group does after the helper: it knows members by global number.
    c10d._world.pg_group_ranks[group] = {member: rank for rank, member in enumerate(members)}
    return group


def mesh_of(group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    """Returns the one-dimensional mesh that FSDP shards over."""
    return DeviceMesh.from_group(group, device.type)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKey:
    """A group: its members in order of rank, and the prefix that it was made under."""

    members: tuple[int, ...]
    prefix: str


class Groups:
    """The groups of one worker; each is made once, used again under later terms, and destroyed.

    Args:
        position: This worker's global number.
        device: Its device.
        timeout_s: Longest wait in a collective; then the group is broken and the worker ends.
    """

    def __init__(self, *, position: int, device: torch.device, timeout_s: float) -> None:
        self._position = position
        self._device = device
        self._timeout_s = timeout_s
        self._groups: dict[GroupKey, dist.ProcessGroup] = {}
        self._stores: dict[tuple[str, int], TCPStore] = {}

    def get(self, key: GroupKey, *, host: str, port: int) -> dist.ProcessGroup:
        """Returns a group, making it if need be: then it waits for all members."""
        group = self._groups.get(key)
        if group is None:
            try:
                group = make_group(
                    name=key.prefix or f"alone/{self._position}",
                    members=key.members,
                    position=self._position,
                    store=self._rendezvous(key, host=host, port=port),
                    device=self._device,
                    timeout_s=self._timeout_s,
                )
            except Exception:
                # Another trainer's rendezvous may have been started anew at its old address.
                self._stores.pop((host, port), None)
                raise
            self._groups[key] = group
        return group

    def without(self, kept: Collection[str]) -> list[GroupKey]:
        """Returns the groups of several that were made under none of these prefixes."""
        return [key for key in self._groups if key.prefix and key.prefix not in kept]

    def of(self, position: int) -> list[GroupKey]:
        """Returns the groups that a worker is in."""
        return [key for key in self._groups if position in key.members]

    def destroy(self, key: GroupKey) -> None:
        """Destroys a group; nothing may use it any more."""
        dist.destroy_process_group(self._groups.pop(key))

    def _rendezvous(self, key: GroupKey, *, host: str, port: int) -> Store:
        if len(key.members) == 1:
            return HashStore()
        store = self._stores.get((host, port))
        if store is None:
            store = self._stores[host, port] = TCPStore(
                host,
                port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=self._timeout_s),
            )
        return PrefixStore(key.prefix, store)

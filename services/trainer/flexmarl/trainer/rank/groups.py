"""Process groups of a worker: many small ones, made on demand, kept, independent of each other.

A worker is in several groups over its life, alone and with other slots' workers, and a group's
other members may die without harming it. A common real default group would break that promise, so
the default group is torch's "fake" one: it gives every worker its global number (its position in
the trainer) and never communicates. Real groups (gloo, NCCL) are made beside it with their own
store; members are named by global number.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

MAX_POSITIONS = 1024
"""Size of the numbering that the default group gives; bounds the slots of one trainer."""


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


class Groups:
    """The groups of one worker, by members; each is made once and used again under later terms.

    Args:
        position: This worker's global number.
        device: Its device.
        timeout_s: Longest wait in a collective; then the group is broken and the worker ends.
    """

    def __init__(self, *, position: int, device: torch.device, timeout_s: float) -> None:
        self._position = position
        self._device = device
        self._timeout_s = timeout_s
        self._groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}
        self._stores: dict[tuple[str, int], TCPStore] = {}

    def get(
        self, *, members: tuple[int, ...], prefix: str, host: str, port: int
    ) -> dist.ProcessGroup:
        """Returns the group of `members` that was made under `prefix`, making it if need be."""
        key = (members, prefix)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = make_group(
                name=f"{prefix or 'alone'}/{'-'.join(str(member) for member in members)}",
                members=members,
                position=self._position,
                store=self._rendezvous(members, prefix, host=host, port=port),
                device=self._device,
                timeout_s=self._timeout_s,
            )
        return group

    def _rendezvous(self, members: tuple[int, ...], prefix: str, *, host: str, port: int) -> Store:
        if len(members) == 1:
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
        return PrefixStore(prefix, store)

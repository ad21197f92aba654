"""State of a policy that is bound to be trained: where it lies, and how it came there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.core.arena import aligned
from flexmarl.core.errors import DomainError
from flexmarl.runtime.policy_config import PolicyConfig
from flexmarl.trainer.rank.failures import agree
from flexmarl.trainer.rank.far_parts import FarParts
from flexmarl.trainer.rank.gradients import Learner
from flexmarl.trainer.rank.handover import receive
from flexmarl.trainer.rank.memory import DeviceMemory, Room, StateKey, keys_of
from flexmarl.trainer.rank.modules import Modules
from flexmarl.trainer.rank.prefetch import Prefetcher
from flexmarl.trainer.rank.residence import Resident
from flexmarl.trainer.rank.shards import ShardedState, state_bytes
from flexmarl.trainer.rank.state_files import StateFiles
from flexmarl.trainer.state_layout import block_of


@dataclass(slots=True, kw_only=True)
class Trained:
    """A policy that is bound to be trained.

    `key` names the saved state that weights and moments equal. It is None from before the first
    change until the changed state has a name again, so it never names other content. Gradients need
    no moments, so in the middle of a batch they may be left out (`has_moments`) until the update.
    `loaded_bytes` counts saved state by how it came here.
    """

    command: rank_pb2.RankBind
    config: PolicyConfig
    rank: int
    members: tuple[int, ...]
    resident: Resident
    room: Room
    state: ShardedState
    key: StateKey | None = None
    has_moments: bool = True
    far: FarParts
    learner: Learner | None = None
    loaded_bytes: Counter[str] = field(default_factory=Counter)


class BoundStates:
    """Gives policies room in the worker's memory, and loads there what it does not keep of them.

    Args:
        modules: Modules; those that point at memory that was replaced are dropped.
        memory: Where state lies.
        files: State from segments.
        prefetcher: Loads beside; where it is at work, a binding waits for it.
        device: The device.
        verify: Compare checksums of what other workers hand over.
    """

    def __init__(
        self,
        *,
        modules: Modules,
        memory: DeviceMemory,
        files: StateFiles,
        prefetcher: Prefetcher,
        device: torch.device,
        verify: bool,
    ) -> None:
        self._modules = modules
        self._memory = memory
        self._files = files
        self._prefetcher = prefetcher
        self._device = device
        self._verify = verify

    def place(
        self, resident: Resident, command: rank_pb2.RankBind, config: PolicyConfig
    ) -> Trained:
        """Gives a policy the region that holds its saved state, or another one.

        Raises:
            DomainError: OUT_OF_MEMORY.
        """
        members = tuple(command.members)
        with self._prefetcher.loading:
            room, key = self._find_kept(resident, command)
            if room is None:
                room = self._take(resident)
        return Trained(
            command=command,
            config=config,
            rank=command.rank,
            members=members,
            resident=resident,
            room=room,
            state=resident.at(room),
            key=key,
            far=self._far_parts(resident, command),
        )

    def load(self, bound: Trained, saved: rank_pb2.RankSaved) -> None:
        """Loads what the region lacks of saved state; moments only if they are named, or kept.

        Raises:
            DomainError: See `StateFiles.load`; CHECKSUM_MISMATCH for what was handed over otherwise
                than it was kept.
        """
        segments = {segment.kind: segment for segment in saved.segments}
        kept = {"master"} if bound.key is not None else set()
        if bound.key is not None and bound.key.moments:
            kept.add("moments")
        given = set[str]()
        if not kept and saved.HasField("giver"):
            given = receive(
                saved.giver, bound.resident.block, bound.state.flat, verify=self._verify
            )
        lacking = segments.keys() - kept - given
        bound.far.load(segments, lacking=lacking, memory=bound.state.flat)
        for path, kinds in (("kept", kept), ("device", given), ("segments", lacking)):
            for kind in kinds:
                bound.loaded_bytes[path] += bound.state.flat(kind).numel()
        bound.has_moments = "moments" in {*segments, *kept, *given}
        bound.key = StateKey(
            master=saved.master_key,
            moments=saved.moments_key if bound.has_moments else "",
            rank=bound.rank,
            world_size=len(bound.members),
        )
        if "gradients" in segments:
            bound.state.set_sum()

    def bring_moments(self, bound: Trained, sources: Sequence[rank_pb2.MappedSegment]) -> None:
        """Loads moments that were left out (collective where there are sources).

        Raises:
            DomainError: See `StateFiles.load`; on all ranks when it fails on one.
        """
        if not sources:
            return
        failure = None
        try:
            bound.far.load(
                {segment.kind: segment for segment in sources},
                lacking=() if bound.has_moments else ("moments",),
                memory=bound.state.flat,
            )
        except DomainError as error:
            if bound.far.has_far_ranks:
                raise  # one may wait for what was not read: the service ends such a group
            failure = error
        agree(failure, group=bound.resident.group, device=self._device)
        bound.has_moments = True

    def _far_parts(self, resident: Resident, command: rank_pb2.RankBind) -> FarParts:
        world_size = len(command.members)
        return FarParts(
            self._files,
            group=resident.group,
            num_near=command.num_near or world_size,
            block_of=lambda rank: (
                resident.block
                if rank == command.rank
                else block_of(
                    resident.parameters,
                    rank=rank,
                    world_size=world_size,
                    moments=resident.block.moments,
                )
            ),
            device=self._device,
        )

    def _find_kept(
        self, resident: Resident, command: rank_pb2.RankBind
    ) -> tuple[Room, StateKey] | tuple[None, None]:
        """Where the saved state lies still, with its moments or without them."""
        saved, world_size = command.saved, len(command.members)
        if not saved.master_key:
            return None, None
        for key in keys_of(
            saved.master_key, saved.moments_key, rank=command.rank, world_size=world_size
        ):
            room = self._memory.find(key)
            if room is None:
                continue
            if room.region.size_bytes == aligned(state_bytes(resident.block)):
                return room, key
            self._memory.leave(room, key)  # another model's, under a name that is not its own
        return None, None

    def _take(self, resident: Resident) -> Room:
        generation = self._memory.generation
        room = self._memory.take(state_bytes(resident.block))
        assert room is not None, "nothing else is in use"
        if self._memory.generation != generation:
            # Modules that point at the old block would keep it alive.
            self._modules.drop_others(resident)
        return room

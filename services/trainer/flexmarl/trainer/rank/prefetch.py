"""Loads the state of the next policy while the present one computes."""

from __future__ import annotations

import threading
import time

from flexmarl.api.meg_store.v1 import meg_store_pb2
from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.trainer.rank.memory import DeviceMemory, StateKey
from flexmarl.trainer.rank.shards import state_bytes
from flexmarl.trainer.rank.state_files import StateFiles
from flexmarl.trainer.state_layout import EXP_AVG, EXP_AVG_SQ, Block, block_of, full_tensors


class Prefetcher:
    """Loads into memory that nobody uses, from a thread beside the computing one.

    Args:
        memory: Where state lies.
        files: State from segments; a second one for this thread.
    """

    def __init__(self, memory: DeviceMemory, files: StateFiles) -> None:
        self._memory = memory
        self._files = files
        self.loading = threading.Lock()
        """Held while state is loaded; whoever needs room takes it and so waits for the end."""

    def load(self, command: rank_pb2.RankPrefetch) -> rank_pb2.RankPrefetched:
        """Loads, unless there is no room or it is there.

        Raises:
            DomainError: See `StateFiles.load`.
        """
        started = time.perf_counter()
        with self.loading:
            loaded = self._load(command)
        return rank_pb2.RankPrefetched(loaded_bytes=loaded, seconds=time.perf_counter() - started)

    def _load(self, command: rank_pb2.RankPrefetch) -> int:
        wanted = command.state
        key = StateKey(
            master=wanted.master_key,
            moments=wanted.moments_key,
            rank=command.rank,
            world_size=len(wanted.members),
        )
        if key in self._memory.kept:
            return 0
        segments = {segment.kind: segment for segment in command.segments}
        block = _block(segments["master"], segments["moments"], command)
        room = self._memory.take(state_bytes(block), grow=False)
        if room is None:
            return 0
        moments = room.memory[block.padded_bytes :]
        loaded = None
        try:
            self._files.load(segments["master"], block, room.memory)
            self._files.load(segments["moments"], block, moments)
            loaded = key
        finally:
            self._memory.leave(room, loaded)
        return state_bytes(block)


def _block(
    master: rank_pb2.MappedSegment, moments: rank_pb2.MappedSegment, command: rank_pb2.RankPrefetch
) -> Block:
    """What the rank will have of the model whose state this is."""
    parameters = [
        meg_store_pb2.NamedBuffer(
            name=name,
            dtype=parts[0].dtype,
            shape=[sum(part.shape[0] for part in parts), *parts[0].shape[1:]],
        )
        for name, parts in full_tensors(master.buffers).items()
    ]
    has_second = any(buffer.name.startswith(EXP_AVG_SQ) for buffer in moments.buffers)
    return block_of(
        parameters,
        rank=command.rank,
        world_size=len(command.state.members),
        moments=(EXP_AVG, EXP_AVG_SQ) if has_second else (EXP_AVG,),
    )

"""State from device to device: a worker that keeps a part hands it to the one that needs it now.

    bound worker (receive)  --how the part lies-->              the other one (Keeper)
                            <--how much of it is kept, bytes--

The keeper may be at work for another policy: it hands over from a thread of its own, and what it
sends changes for nobody. Whoever needs its memory waits for the end, as for a prefetch; it holds
that lock only while the other one receives, who holds none, so two that hand over to each other
never wait for each other. A handover is tried once. Whatever does not come in time is read from
segments, which have the same content, so the death of either end costs no more than that.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.core.arena import aligned
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.logging import get_logger
from flexmarl.trainer.rank.memory import DeviceMemory, Room, StateKey, keys_of
from flexmarl.trainer.rank.state_files import PIECE_BYTES
from flexmarl.trainer.state_layout import Block

SILENCE_S: Final = 10.0
"""Longest wait for the other end, to come and for each piece."""

_KINDS: Final = ("master", "moments")
_KEEPER, _BOUND = 0, 1

_log = get_logger(__name__)


class Keeper:
    """Hands over what this worker keeps.

    Args:
        memory: Where it lies.
        needs_room: Held while somebody needs room, or while the memory is read here.
        device: The device.
        verify: Send checksums.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        needs_room: threading.Lock,
        *,
        device: torch.device,
        verify: bool,
    ) -> None:
        self._memory = memory
        self._needs_room = needs_room
        self._device = device
        self._verify = verify

    def offer(self, command: rank_pb2.RankGive) -> rank_pb2.RankGiving:
        """Says whether a part is kept here; then waits beside for whoever is bound with it."""
        state = command.state
        keys = keys_of(
            state.master_key,
            state.moments_key,
            rank=command.rank,
            world_size=len(state.members),
        )
        kept = not set(keys).isdisjoint(self._memory.kept)
        if kept:
            threading.Thread(
                target=self._give, args=(command.meeting, keys), name="handover", daemon=True
            ).start()
        return rank_pb2.RankGiving(kept=kept)

    def _give(self, meeting: rank_pb2.Handover, keys: tuple[StateKey, ...]) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread has a current one of its own
            pair = _Pair(meeting, end=_KEEPER, device=self._device, verify=self._verify)
            padded, size, num_moments = pair.receive_numbers(3)
            with self._needs_room:
                key, room = self._find(keys)
                if key is None or room is None:
                    pair.send_numbers(0)
                    return
                try:
                    parts = [room.memory[:size], room.memory[padded:][: num_moments * size]]
                    if room.region.size_bytes != aligned(padded + (num_moments + 1) * size):
                        parts = []  # another model's, under a name that is not its own
                    elif not key.moments:
                        parts.pop()
                    pair.send_numbers(len(parts))
                    for part in parts:
                        pair.send_numbers(pair.send(part))
                    pair.finish()
                finally:
                    self._memory.leave(room, key)
        except RuntimeError as error:  # torch's own: the other end is gone, or silent
            _log.info("state_not_handed_over", prefix=meeting.prefix, why=_line(error))

    def _find(self, keys: tuple[StateKey, ...]) -> tuple[StateKey | None, Room | None]:
        for key in keys:
            room = self._memory.find(key)
            if room is not None:
                return key, room
        return None, None


def receive(
    meeting: rank_pb2.Handover,
    block: Block,
    memory: Callable[[str], torch.Tensor],
    *,
    verify: bool,
) -> set[str]:
    """Receives a rank's part of a state into its memory.

    Args:
        meeting: Where the keeper waits.
        block: What the rank has.
        memory: All of a kind of state, flat.
        verify: Compare checksums with those that the keeper sends.

    Returns:
        The kinds that came whole: none, weights, or weights and moments.

    Raises:
        DomainError: CHECKSUM_MISMATCH.
    """
    came: set[str] = set()
    try:
        pair = _Pair(meeting, end=_BOUND, device=memory(_KINDS[0]).device, verify=verify)
        pair.send_numbers(block.padded_bytes, block.size_bytes, len(block.moments))
        (count,) = pair.receive_numbers(1)
        for kind in _KINDS[:count]:
            received = pair.receive(memory(kind))
            (sent,) = pair.receive_numbers(1)
            if received != sent:
                raise DomainError(
                    ErrorReason.CHECKSUM_MISMATCH,
                    f"{kind} handed over under {meeting.prefix} differ from what was kept",
                    {"prefix": meeting.prefix},
                )
            came.add(kind)
    except RuntimeError as error:  # torch's own: the keeper is gone, or silent
        _log.warning("state_not_received", prefix=meeting.prefix, why=_line(error))
    return came


class _Pair:
    """Two workers connected for one handover, beside all groups: of a thread of its own."""

    def __init__(
        self, meeting: rank_pb2.Handover, *, end: int, device: torch.device, verify: bool
    ) -> None:
        timeout = timedelta(seconds=SILENCE_S)
        met = TCPStore(
            meeting.store_host,
            meeting.store_port,
            is_master=False,
            wait_for_workers=False,
            timeout=timeout,
        )
        self._device = device
        self._verify = verify
        self._other = 1 - end
        self._group = _connect(PrefixStore(meeting.prefix, met), end, timeout, device)

    def send(self, whole: torch.Tensor) -> int:
        """Sends bytes; returns their checksum, 0 when it is not asked for."""
        checksum = 0
        for piece in _pieces(whole):
            self._group.send([piece], self._other, 0).wait()
            checksum = self._checksum(piece, checksum)
        return checksum

    def receive(self, whole: torch.Tensor) -> int:
        """Receives bytes; returns their checksum, 0 when it is not asked for."""
        checksum = 0
        for piece in _pieces(whole):
            self._group.recv([piece], self._other, 0).wait()
            checksum = self._checksum(piece, checksum)
        return checksum

    def send_numbers(self, *numbers: int) -> None:
        """Sends numbers."""
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        self._group.send([tensor], self._other, 0).wait()

    def receive_numbers(self, count: int) -> list[int]:
        """Receives as many numbers."""
        tensor = torch.zeros(count, dtype=torch.int64, device=self._device)
        self._group.recv([tensor], self._other, 0).wait()
        return [int(number) for number in tensor.tolist()]

    def finish(self) -> None:
        """Waits until what was sent has left the memory that it lay in."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _checksum(self, piece: torch.Tensor, before: int) -> int:
        return zlib.crc32(piece.cpu().numpy().data, before) if self._verify else 0


def _connect(store: Store, end: int, timeout: timedelta, device: torch.device) -> Any:  # noqa: ANN401 - untyped library
    """Makes the transport itself: torch's own groups are a process' common list, for one thread."""
    if device.type == "cuda":
        from torch._C._distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroupNCCL(store, end, 2, options)
    return ProcessGroupGloo(store, end, 2, timeout)


def _pieces(whole: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from (
        whole[start : start + PIECE_BYTES] for start in range(0, whole.numel(), PIECE_BYTES)
    )


def _line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]

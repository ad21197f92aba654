"""The state of a simulated policy: two numbers in place of billions, with real sums and real files.

What a policy was trained on can be read off it: its first number moves by the mean of advantage x
tokens of the rows consumed, its second counts updates, so no two sets have the same content.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from flexmarl.api.meg_store.v1 import meg_store_pb2
from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.client.buffers import Buffer
from flexmarl.client.segments import MappedSegment, hash_file
from flexmarl.trainer.state_layout import MOMENTS

PARAMETER = "simulated"
_NUMBERS = 2
_RATE = 1e-3


class SimulatedState:
    """Weights, moments (never used, but stored) and gradient sum of the policy that is held."""

    def __init__(self) -> None:
        self.weights = [0.0] * _NUMBERS
        self.total: float | None = None

    def describe(self) -> list[meg_store_pb2.NamedBuffer]:
        """The one parameter, in the master dtype."""
        size = _NUMBERS * 8
        return [
            meg_store_pb2.NamedBuffer(
                name=PARAMETER, dtype="F64", shape=[_NUMBERS], size_bytes=size
            )
        ]

    def set_initial(self, seed: int) -> None:
        """Starts a policy; another seed gives other weights."""
        self.weights = [float(seed % 1_000_003), 0.0]

    def gradient(self, command: rank_pb2.RankGradients) -> float:
        """Returns a micro-batch's gradient; not finite when an advantage is not."""
        responses, advantages = array("i"), array("d")
        responses.frombytes(command.response_lengths)
        advantages.frombytes(command.advantages)
        return sum(
            advantage * length for advantage, length in zip(advantages, responses, strict=True)
        )

    def step(self, denominator: float) -> dict[str, float]:
        """Applies the sum; returns the norm."""
        assert self.total is not None, "a step needs a sum"
        mean = self.total / denominator
        self.weights = [self.weights[0] - _RATE * mean, self.weights[1] + 1.0]
        self.total = None
        return {"grad_norm": abs(mean), "clip_factor": 1.0, "lr": _RATE}

    def load(self, segment: rank_pb2.MappedSegment) -> None:
        """Reads one kind of state."""
        mapped = MappedSegment(segment.path, segment.buffers)
        try:
            numbers = _read(mapped.buffers.values())
            match segment.kind:
                case "master":
                    self.weights = numbers
                case "gradients":
                    self.total = numbers[0]
        finally:
            mapped.close()

    def export(self, segments: Iterable[rank_pb2.MappedSegment]) -> str:
        """Fills segments; returns the hash of the weights, "" when they are not among them."""
        digest = ""
        for segment in segments:
            mapped = MappedSegment(segment.path, segment.buffers, writable=True)
            try:
                _write(mapped.buffers.values(), self._numbers(segment.kind))
            finally:
                mapped.close()
            if segment.kind == "weights":
                digest = hash_file(Path(segment.path), list(segment.buffers))
        return digest

    def _numbers(self, kind: str) -> list[float]:
        match kind:
            case "moments":
                return [0.0] * (len(MOMENTS["adamw"]) * _NUMBERS)
            case "gradients":
                assert self.total is not None, "an empty sum has nothing to copy"
                return [self.total] * _NUMBERS
            case _:
                return self.weights


def _read(buffers: Iterable[Buffer]) -> list[float]:
    """The numbers of a tensor, whose rows lie in as many buffers as ranks wrote it."""
    data = b"".join(buffer.data for buffer in buffers)
    return list(struct.unpack(f"<{len(data) // 8}d", data))


def _write(buffers: Iterable[Buffer], numbers: Sequence[float]) -> None:
    left = iter(numbers)
    for buffer in buffers:
        encoded = [_encode(number, buffer.dtype) for number in islice(left, buffer.shape[0])]
        buffer.data[:] = b"".join(encoded)


def _encode(number: float, dtype: str) -> bytes:
    if dtype == "F64":
        return struct.pack("<d", number)
    single = struct.pack("<f", number)
    return single[2:] if dtype == "BF16" else single  # bfloat16 is the upper half of float32

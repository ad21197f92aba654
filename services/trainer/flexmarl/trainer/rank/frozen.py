"""Weights of a policy that is not trained: published once, never stepped."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping

import torch

from flexmarl.api.meg_store.v1 import meg_store_pb2
from flexmarl.runtime.policy_config import ExternalConfig
from flexmarl.trainer.rank.segments import DTYPE_NAMES, DTYPES


class FrozenWeights:
    """Full weights on the host, held only between reading them and writing them to a segment."""

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._weights = dict(weights)

    def describe(self) -> list[meg_store_pb2.NamedBuffer]:
        """Parameters, without offsets."""
        return [
            meg_store_pb2.NamedBuffer(
                name=name,
                dtype=DTYPE_NAMES[tensor.dtype],
                shape=tensor.shape,
                size_bytes=tensor.numel() * tensor.element_size(),
            )
            for name, tensor in self._weights.items()
        ]

    def size_bytes(self) -> int:
        """Bytes held."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._weights.values())

    def full_rows(
        self, buffers: Mapping[str, meg_store_pb2.NamedBuffer]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the weights, converted, as bytes, with their places in a segment."""
        for name, tensor in self._weights.items():
            converted = tensor.to(DTYPES[buffers[name].dtype]).contiguous()
            yield buffers[name].offset, converted.view(-1).view(torch.uint8)


def mark_of(server: ExternalConfig) -> list[tuple[str, torch.Tensor]]:
    """What stands for the weights of a server that has its own, which nobody here ever sees.

    Another server, or another model of it, is another content: versions do not mix them up.
    """
    digest = hashlib.sha256(f"{server.url}\n{server.model}".encode()).digest()
    return [("external", torch.tensor(list(digest), dtype=torch.float32))]

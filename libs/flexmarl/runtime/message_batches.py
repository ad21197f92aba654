"""Many messages that travel together: as many at a time as one call or message takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

from google.protobuf.message import Message

MessageT = TypeVar("MessageT", bound=Message)

BATCH_BYTES: Final = 16 << 20
"""Where a batch ends: its largest message may come on top, and still it is far below what gRPC
takes."""


def batches(
    messages: Iterable[MessageT], *, max_items: int | None = None, max_bytes: int = BATCH_BYTES
) -> Iterator[list[MessageT]]:
    """The messages in order, in batches within both bounds; a single larger one is one alone."""
    batch: list[MessageT] = []
    size_bytes = 0
    for message in messages:
        message_bytes = message.ByteSize()
        if batch and (len(batch) == max_items or size_bytes + message_bytes > max_bytes):
            yield batch
            batch, size_bytes = [], 0
        batch.append(message)
        size_bytes += message_bytes
    if batch:
        yield batch

"""Messages on the dispatcher's links, to user code and engine hosts: in several when too large.

What one link coalesces in a turn of the loop has no bound of its own: a thousand samples may end in
the same turn, or be replayed in it, each with all of its texts; and an instance that begins to
serve is sent all that waits for it, each with a prompt of its model's whole context.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from google.protobuf.message import EncodeError, Message

from flexmarl.runtime.frames import MAX_FRAME_BYTES
from flexmarl.runtime.message_batches import BATCH_BYTES, batches

MessageT = TypeVar("MessageT", bound=Message)
ItemT = TypeVar("ItemT", bound=Message)


def frames_of(message: Message, *, limit_bytes: int = MAX_FRAME_BYTES) -> Iterator[bytes]:
    """The message as one frame; where that is too large, a frame for each item of its fields.

    An item that is too large alone comes as it is: the link refuses it.
    """
    try:
        whole = message.SerializeToString()
    except EncodeError:  # beyond what the library makes into one text at all, 2 GiB
        whole = None
    if whole is not None and len(whole) <= limit_bytes:
        yield whole
        return
    for field, value in message.ListFields():
        is_list = hasattr(value, "extend")
        for item in value if is_list else (value,):
            part = type(message)()
            own = getattr(part, field.name)
            if is_list:
                own.extend((item,))
            else:
                own.CopyFrom(item)
            yield part.SerializeToString()


def parts_of(
    message: MessageT, *, large: str, first: str, limit_bytes: int = BATCH_BYTES
) -> Iterator[MessageT]:
    """The message as it is; where it is too large, its items `large` in messages of their own.

    Args:
        message: Of a stream.
        large: Its field of many and large items. Fields before it by number come before them, the
            others after them.
        first: A field of its that comes before all others.
        limit_bytes: Size from which on it is parted; a single larger item goes alone.
    """
    if len(getattr(message, large)) <= 1 or message.ByteSize() <= limit_bytes:
        yield message
        return
    number = message.DESCRIPTOR.fields_by_name[large].number
    before, after = type(message)(), type(message)()
    for field, value in message.ListFields():
        if field.name != large:
            end = before if field.name == first or field.number < number else after
            if hasattr(value, "extend"):
                getattr(end, field.name).extend(value)
            else:
                getattr(end, field.name).CopyFrom(value)
    if before.ListFields():
        yield before
    for items in batches(getattr(message, large), max_bytes=limit_bytes):
        part = type(message)()
        getattr(part, large).extend(items)
        yield part
    if after.ListFields():
        yield after


def first_of(items: Iterable[ItemT], *, limit_bytes: int = BATCH_BYTES) -> list[ItemT]:
    """As many of the first items as fit a message together; one at least, where there is one."""
    return next(batches(items, max_bytes=limit_bytes), [])

"""Messages on the links between dispatcher and user code: one frame, or several when too large.

What one link coalesces in a turn of the loop has no bound of its own: a thousand samples may end in
the same turn, or be replayed in it, each with all of its texts.
"""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import EncodeError, Message

from flexmarl.runtime.frames import MAX_FRAME_BYTES


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

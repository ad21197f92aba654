"""Which thread of a service waits for its sockets."""

from __future__ import annotations

import os
from typing import Final

_EXPERIMENTS: Final = "GRPC_EXPERIMENTS"
_ONE_POLLER: Final = "-event_engine_client,-event_engine_listener"


def poll_in_one_thread() -> None:
    """Has gRPC read and write sockets in the thread that tells the event loop of them.

    By default it hands each message from its poller to a pool of threads and from there to the
    thread that `grpc.aio` waits in: two wake-ups more at each end, a fifth of a small call
    (ADR-0036). To be called before the first channel or server; what the environment says already
    stays.
    """
    os.environ.setdefault(_EXPERIMENTS, _ONE_POLLER)

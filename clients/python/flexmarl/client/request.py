"""Request ids: one per logical call, the same in every repetition of it."""

from __future__ import annotations

import os


def new_request_id() -> str:
    """A fresh request id. Make it where the call is decided, not where it is sent or repeated."""
    return os.urandom(16).hex()

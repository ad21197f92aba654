"""Pins: versions that somebody reads, kept until a deadline.

A pin survives a restart of the store. Its deadline runs by the monotonic clock; across a restart
the wall clock says what is left of it, never more than it was given, so a jump of the wall clock
keeps nothing for ever and ends no pin of a living process.
"""

from __future__ import annotations

import struct
import time
import uuid
from dataclasses import dataclass
from functools import partial

from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.core import store_keys as keys
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.database import Database, Draft

_STORED = struct.Struct(">Qqd")


@dataclass(frozen=True, slots=True)
class Pin:
    """One pin; `ends_at` in monotonic seconds."""

    version: int
    ends_at: float


class Pins:
    """The pins of this shard's runs.

    Args:
        database: Keeps them.
        max_ttl_s: Longest time that one may be given.
    """

    def __init__(self, database: Database, *, max_ttl_s: float) -> None:
        self._max_ttl_s = max_ttl_s
        self._pins: dict[str, dict[str, Pin]] = {}
        for key, value in database.scan(Table.META, keys.prefix("pin")):
            _, run_id, pin_id = key.decode().split("\0")
            version, pinned_unix_ns, ttl_s = _STORED.unpack(value[: _STORED.size])
            passed_s = (time.time_ns() - pinned_unix_ns) / 1e9
            left_s = min(max(ttl_s - passed_s, 0.0), ttl_s)
            pins = self._pins.setdefault(run_id, {})
            pins[pin_id] = Pin(version, time.monotonic() + left_s)

    def add(self, draft: Draft, request: pb.PinVersionRequest) -> str:
        """Pin a version; returns the pin's id.

        Raises:
            ValueError: `ttl_s` is out of range.
        """
        if not 0 < request.ttl_s <= self._max_ttl_s:
            raise ValueError(
                f"ttl_s {request.ttl_s:g}: give more than 0, at most {self._max_ttl_s:g}"
            )
        pin_id = uuid.uuid4().hex
        pin = Pin(request.version, time.monotonic() + request.ttl_s)
        value = _STORED.pack(pin.version, time.time_ns(), request.ttl_s) + request.holder.encode()
        draft.put(Table.META, keys.join("pin", request.run_id, pin_id), value)
        self._drop_expired(draft, request.run_id)
        draft.at_commit.append(lambda: self._of(request.run_id).__setitem__(pin_id, pin))
        return pin_id

    def remove(self, draft: Draft, run_id: str, pin_id: str) -> None:
        """Give a pin up; an unknown one is ignored."""
        if pin_id in self._of(run_id):
            draft.delete(Table.META, keys.join("pin", run_id, pin_id))
            draft.at_commit.append(partial(self._pop, run_id, pin_id))

    def versions(self, run_id: str) -> list[int]:
        """Versions of a run that are pinned now."""
        now = time.monotonic()
        return sorted({p.version for p in self._pins.get(run_id, {}).values() if p.ends_at > now})

    def forget(self, run_id: str) -> None:
        """Drop what is remembered of a deleted run."""
        self._pins.pop(run_id, None)

    def _drop_expired(self, draft: Draft, run_id: str) -> None:
        now = time.monotonic()
        for pin_id, pin in self._of(run_id).items():
            if pin.ends_at <= now:
                self.remove(draft, run_id, pin_id)

    def _pop(self, run_id: str, pin_id: str) -> None:
        self._of(run_id).pop(pin_id, None)

    def _of(self, run_id: str) -> dict[str, Pin]:
        return self._pins.setdefault(run_id, {})

"""Spans of work, the source of the Chrome trace timeline.

A span is (track, name, start, end, arguments). Spans go into a bounded ring; `flush` appends them
to a JSONL file. A full ring drops the oldest and counts them: a timeline must not stop a run.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from flexmarl.core.call_context import current_ids

FLUSH_EVERY_S: Final = 2.0
"""A killed process loses at most so much of its timeline."""

SpanValue = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work.

    Attributes:
        track: What did it, such as `instance/3` or `device/0`.
        name: What was done, such as `solver` or `optimizer_step`.
        start_s: Seconds since the epoch.
        end_s: Seconds since the epoch; equal to `start_s` for an instant.
        args: Ids and counts shown beside it.
    """

    track: str
    name: str
    start_s: float
    end_s: float
    args: Mapping[str, SpanValue] = field(default_factory=dict)

    def to_json(self) -> str:
        """One JSON line without the newline."""
        return json.dumps(
            {
                "track": self.track,
                "name": self.name,
                "start_s": self.start_s,
                "end_s": self.end_s,
                "args": dict(self.args),
            },
            separators=(",", ":"),
        )


class SpanRecorder:
    """Ring of the newest spans of one process; thread-safe, since deque operations are atomic."""

    def __init__(
        self,
        *,
        service: str,
        capacity: int = 100_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._service = service
        self._clock = clock
        self._ring: deque[Span] = deque(maxlen=capacity)
        self._recorded = 0
        self._flushed = 0

    def add(self, track: str, name: str, start_s: float, end_s: float, **args: SpanValue) -> None:
        """Record a span whose times the caller measured (seconds since the epoch)."""
        self._ring.append(Span(track, name, start_s, end_s, {**current_ids(), **args}))
        self._recorded += 1

    @contextmanager
    def span(self, track: str, name: str, **args: SpanValue) -> Iterator[None]:
        """Record the block as a span, also when it raises."""
        start_s = self._clock()
        try:
            yield
        finally:
            self.add(track, name, start_s, self._clock(), **args)

    @property
    def dropped(self) -> int:
        """Spans lost because nobody flushed in time."""
        return self._recorded - self._flushed - len(self._ring)

    def flush(self, folder: Path) -> Path:
        """Append what is in the ring to `folder/spans-<service>-<pid>.jsonl`.

        Blocks for the write; call it from a thread when the loop must not wait.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"spans-{self._service}-{os.getpid()}.jsonl"
        with path.open("a", encoding="utf-8") as file:
            for _ in range(len(self._ring)):
                try:
                    span = self._ring.popleft()
                except IndexError:  # another thread flushes, too
                    break
                file.write(span.to_json() + "\n")
                self._flushed += 1
        return path

    async def keep_flushing(self, folder: Path) -> None:
        """Flush until cancelled; waits `FLUSH_EVERY_S` between two writes."""
        while True:
            await asyncio.sleep(FLUSH_EVERY_S)
            await asyncio.to_thread(self.flush, folder)


def read_spans(folder: Path) -> Iterator[tuple[str, Span]]:
    """Spans of all processes that flushed into a folder, as (file stem, span)."""
    for path in sorted(folder.glob("spans-*.jsonl")):
        with path.open(encoding="utf-8") as file:
            for line in file:
                try:
                    data = json.loads(line)
                except ValueError:  # the torn last line of a killed process
                    continue
                yield path.stem, Span(**data)

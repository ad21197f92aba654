"""TransferQueue's rows per second: a peer's data plane, in memory, to compare the store with.

It is no dependency of this project. Where it is installed (`pip install transferqueue`), it takes
and gives as many rows of as many bytes per call as ours, as many calls at once, with its own
default storage (two units on ZeroMQ, on this host's Ray). Nothing of it is durable. It is a process
of its own that works when it is told to, so that its rounds and ours come in turns on one machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

NUM_CPUS = 16
"""What Ray is told: TransferQueue's actors reserve more than a small machine has."""

PARTITION = "bench"


def is_installed() -> bool:
    """Whether TransferQueue and what it stands on are there."""
    names = ("transfer_queue", "ray", "tensordict", "torch")
    return all(importlib.util.find_spec(name) for name in names)


@contextlib.contextmanager
def peer(*, rows: int, row_bytes: int, in_flight: int) -> Iterator[Peer]:
    """Starts TransferQueue.

    Args:
        rows: Rows per call.
        row_bytes: Bytes per row, a multiple of 4.
        in_flight: Calls at once.
    """
    arguments = [str(number) for number in (rows, row_bytes, in_flight)]
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.store_transfer_queue", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
    ) as process:  # fmt: skip
        try:
            yield Peer(process)
        finally:
            assert process.stdin is not None, "it is a pipe"
            process.stdin.close()  # it ends Ray, which has processes of its own
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


class Peer:
    """The process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        self._asked, self._told = process.stdin, process.stdout

    def put(self, seconds: float) -> float:
        """Has it take rows for a time, in place of those before; returns rows per second."""
        return self._do("put", seconds)

    def get(self, seconds: float) -> float:
        """Has it give rows that it took last, at random; returns rows per second."""
        return self._do("get", seconds)

    def _do(self, what: str, seconds: float) -> float:
        self._asked.write(f"{what} {seconds}\n")
        self._asked.flush()
        answer = self._told.readline()
        if not answer:
            raise RuntimeError(
                "TransferQueue ended: run `python -m benchmarks.store_transfer_queue 256 4096 4`"
            )
        return float(answer)


class _Queue:
    """TransferQueue inside of its process."""

    def __init__(self, *, rows: int, row_bytes: int, in_flight: int) -> None:
        import torch
        import transfer_queue  # pyright: ignore[reportMissingImports] - optional
        from tensordict import TensorDict  # pyright: ignore[reportMissingImports] - optional

        self._api: Any = transfer_queue
        self._rows, self._in_flight = rows, in_flight
        tokens = torch.randint(0, 1 << 15, (rows, row_bytes // 4), dtype=torch.int32)
        self._fields: Any = TensorDict({"tokens": tokens}, batch_size=rows)
        self._calls = itertools.count()
        self._known: list[list[str]] = []
        self._rng = random.Random(7)

    async def put(self, end: float) -> int:
        """Puts until then; returns rows."""
        done = 0
        while time.perf_counter() < end:
            call = next(self._calls)
            keys = [f"{call}-{row}" for row in range(self._rows)]
            await self._api.async_kv_batch_put(
                keys=keys, partition_id=PARTITION, fields=self._fields
            )
            self._known.append(keys)
            done += self._rows
        return done

    async def get(self, end: float) -> int:
        """Gets until then; returns rows."""
        done = 0
        while time.perf_counter() < end:
            keys = [self._rng.choice(self._rng.choice(self._known)) for _ in range(self._rows)]
            keys = list(dict.fromkeys(keys))
            await self._api.async_kv_batch_get(keys=keys, partition_id=PARTITION)
            done += len(keys)
        return done

    async def clear(self) -> None:
        """Forgets all rows."""
        known, self._known = self._known, []
        for keys in known:
            await self._api.async_kv_clear(keys=keys, partition_id=PARTITION)

    async def serve(self, asked: TextIO, told: TextIO) -> None:
        """A round per line that comes in, its rows per second to `told`."""
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, asked.readline):
            what, seconds = line.split()
            if what == "put":
                await self.clear()
            started = time.perf_counter()
            work = self.put if what == "put" else self.get
            end = started + float(seconds)
            rows = sum(await asyncio.gather(*(work(end) for _ in range(self._in_flight))))
            told.write(f"{rows / (time.perf_counter() - started)}\n")
            told.flush()


def main(rows: int, row_bytes: int, in_flight: int, told: TextIO) -> None:
    """What the process does."""
    import ray  # pyright: ignore[reportMissingImports] - optional
    import transfer_queue  # pyright: ignore[reportMissingImports] - optional

    ray.init(
        num_cpus=NUM_CPUS, include_dashboard=False, log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )  # fmt: skip
    try:
        transfer_queue.init()
        queue = _Queue(rows=rows, row_bytes=row_bytes, in_flight=in_flight)
        asyncio.run(queue.serve(sys.stdin, told))
        transfer_queue.close()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    real, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    num_rows, num_bytes, num_calls = (int(number) for number in sys.argv[1:])
    main(num_rows, num_bytes, num_calls, real)

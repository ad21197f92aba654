"""Threads of tools that hang: counted, told when there are too many, forgotten when they end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from flexmarl.rollout.worker import tool_threads
from flexmarl.rollout.worker.tool_threads import ToolThreads


@pytest.fixture(autouse=True)
def few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_threads, "MAX_RUNNING", 1)
    monkeypatch.setattr(tool_threads, "MAX_HANGING", 2)


async def hang(threads: ToolThreads, go: threading.Event, name: str) -> None:
    """Gives up a tool that has begun, and does not end before `go`."""
    begun = threading.Event()

    def tool() -> bool:
        begun.set()
        return go.wait(20)

    run = threads.run(tool, sample_id=f"s-{name}", what=f"tool {name!r}")
    call = asyncio.create_task(run)
    assert await asyncio.to_thread(begun.wait, 20)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_what_a_function_returns_and_raises_comes_back() -> None:
    threads = ToolThreads(lambda *_: None)
    assert await threads.run(lambda: 3, sample_id="s", what="tool") == 3
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0, sample_id="s", what="tool")


async def test_a_tool_that_hangs_keeps_nobody_waiting_and_too_many_are_told() -> None:
    told: list[tuple[str, str]] = []
    go = threading.Event()
    threads = ToolThreads(lambda sample_id, message: told.append((sample_id, message)))
    await hang(threads, go, "a")
    assert told == []
    # Its place is free again, though its thread is not.
    assert await threads.run(lambda: 3, sample_id="s", what="tool") == 3
    await hang(threads, go, "b")
    assert told == [("s-b", "tool 'b' keeps 2 threads that never end")]
    go.set()
    async with asyncio.timeout(20):
        while threads.num_hanging:  # noqa: ASYNC110 - threads end
            await asyncio.sleep(0.01)


async def test_a_call_that_had_no_thread_yet_hangs_nowhere() -> None:
    go = threading.Event()
    threads = ToolThreads(lambda *_: None)
    first = asyncio.create_task(threads.run(lambda: go.wait(20), sample_id="s", what="tool"))
    await asyncio.sleep(0)
    waits = asyncio.create_task(threads.run(lambda: 3, sample_id="s-waits", what="tool"))
    await asyncio.sleep(0)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert threads.num_hanging == 0
    go.set()
    assert await first

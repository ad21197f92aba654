"""Background tasks have an owner; the coalescer batches, bounds and fails by the item."""

import asyncio
import threading

import pytest

from flexmarl.core.call_context import bind_ids, current_deadline, current_ids, set_deadline
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.aio import Background, Coalescer, in_thread


async def test_a_failed_task_is_surfaced_once_by_name():
    failures = []
    told = asyncio.Event()

    def on_failure(name, error):
        failures.append((name, error))
        told.set()

    async def fail():
        raise ValueError("broken")

    async with Background(on_failure) as background:
        background.start("poller", fail())
        await told.wait()
    assert [(name, str(error)) for name, error in failures] == [("poller", "broken")]


async def test_close_cancels_and_is_no_failure():
    failures = []
    background = Background(lambda *failure: failures.append(failure))
    task = background.start("forever", asyncio.Event().wait())
    await asyncio.sleep(0)
    await background.close()
    assert task.cancelled()
    assert failures == []
    with pytest.raises(RuntimeError, match="after close"):
        background.start("late", asyncio.sleep(0))


async def test_background_work_keeps_ids_and_drops_the_callers_deadline():
    set_deadline(1.0)
    bind_ids(run="r1")
    seen = []

    async def look():
        seen.append((current_deadline(), dict(current_ids())))

    async with Background(lambda *_: None) as background:
        await background.start("look", look())
    assert seen == [(None, {"run": "r1"})]


class Sink:
    """Records batches and lets the test say when each one ends."""

    def __init__(self):
        self.batches = []
        self.gates = []
        self.deadlines = []

    async def __call__(self, items):
        gate = asyncio.get_running_loop().create_future()
        self.batches.append(items)
        self.gates.append(gate)
        self.deadlines.append(current_deadline())
        await gate
        return [item * 10 for item in items]

    async def release_until(self, tasks):
        while not all(task.done() for task in tasks):
            for gate in self.gates:
                if not gate.done():
                    gate.set_result(None)
            await asyncio.sleep(0)

    async def until(self, count):
        while len(self.batches) < count:  # noqa: ASYNC110 - turn by turn is the point
            await asyncio.sleep(0)


async def test_who_is_cancelled_waits_for_the_thread_that_uses_what_it_holds():
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def use(word: str) -> None:
        begun.set()
        assert may_end.wait(30)
        ended.set()
        raise ValueError(word)

    using = asyncio.create_task(in_thread(use, "nobody is told"))
    await asyncio.to_thread(begun.wait, 30)
    using.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not using.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await using
    assert ended.is_set()


async def test_a_thread_answers_and_fails_as_its_function_does():
    assert await in_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await in_thread(divmod, 7, 0)


async def test_sends_at_once_when_idle_and_coalesces_while_busy():
    sink = Sink()
    coalescer = Coalescer(sink, name="writes")
    set_deadline(1.0)
    first = await coalescer.put(1)
    await sink.until(1)
    rest = [await coalescer.put(item) for item in (2, 3, 4)]
    await asyncio.sleep(0)
    assert sink.batches == [[1]]
    sink.gates[0].set_result(None)
    await sink.until(2)
    sink.gates[1].set_result(None)
    assert await asyncio.gather(first, *rest) == [10, 20, 30, 40]
    assert sink.batches == [[1], [2, 3, 4]]
    assert sink.deadlines == [None, None]  # a batch has no caller's deadline


async def test_items_of_one_turn_share_a_batch():
    sink = Sink()
    coalescer = Coalescer(sink, name="writes")
    tasks = [asyncio.create_task(coalescer.submit(item)) for item in range(5)]
    await sink.until(1)
    sink.gates[0].set_result(None)
    assert await asyncio.gather(*tasks) == [0, 10, 20, 30, 40]
    assert sink.batches == [[0, 1, 2, 3, 4]]


async def test_batches_are_cut_by_items_and_bytes_and_limited_in_flight():
    sink = Sink()
    coalescer = Coalescer(sink, name="w", max_batch_items=3, max_batch_bytes=100, max_in_flight=2)
    sizes = [60, 30, 20, 200, 1, 1, 1, 1]
    results = [await coalescer.put(n, size_bytes=size) for n, size in enumerate(sizes)]
    await sink.until(2)
    await asyncio.sleep(0)
    assert sink.batches == [[0, 1], [2]]
    await sink.release_until(results)
    await asyncio.gather(*results)
    assert sink.batches == [[0, 1], [2], [3], [4, 5, 6], [7]]


async def test_a_full_queue_pushes_back_in_order():
    sink = Sink()
    coalescer = Coalescer(sink, name="w", max_batch_items=2, max_queued_items=2)
    await coalescer.put(0)
    await sink.until(1)
    await coalescer.put(1)
    await coalescer.put(2)
    waiting = [asyncio.create_task(coalescer.submit(item)) for item in (3, 4, 5)]
    await asyncio.sleep(0.01)
    assert coalescer.queued == 2
    await sink.release_until(waiting)
    assert [item for batch in sink.batches for item in batch] == [0, 1, 2, 3, 4, 5]


async def test_no_room_in_time_is_queue_full_and_frees_the_place_in_line():
    sink = Sink()
    coalescer = Coalescer(sink, name="w", max_queued_items=1, put_timeout_s=0.02)
    await coalescer.put(0)
    await sink.until(1)
    await coalescer.put(1)
    with pytest.raises(DomainError) as caught:
        await coalescer.put(2)
    assert caught.value.reason is ErrorReason.QUEUE_FULL
    sink.gates[0].set_result(None)
    await sink.until(2)
    third = await coalescer.put(3)
    sink.gates[1].set_result(None)
    await sink.until(3)
    sink.gates[2].set_result(None)
    assert await third == 30


async def test_a_failed_batch_fails_its_items_only():
    async def sink(items):
        if 13 in items:
            raise DomainError(ErrorReason.DISK_FULL, "no space")
        return items

    coalescer = Coalescer(sink, name="w", max_batch_items=1)
    results = await asyncio.gather(
        *(coalescer.submit(item) for item in (12, 13, 14)), return_exceptions=True
    )
    assert results[0] == 12
    assert isinstance(results[1], DomainError)
    assert results[2] == 14


async def test_a_sink_that_loses_results_fails_the_batch():
    async def sink(items):
        return items[1:]

    with pytest.raises(RuntimeError, match="1 items, 0 results"):
        await Coalescer(sink, name="w").submit(1)


async def test_close_sends_what_is_queued_and_refuses_more():
    done = []

    async def sink(items):
        await asyncio.sleep(0)
        done.extend(items)
        return items

    coalescer = Coalescer(sink, name="w", max_batch_items=1)
    for item in range(4):
        await coalescer.put(item)
    await coalescer.close()
    assert done == [0, 1, 2, 3]
    with pytest.raises(DomainError, match="closed"):
        await coalescer.put(5)


async def test_close_of_a_stuck_sink_ends_and_cancels_the_items():
    sink = Sink()
    coalescer = Coalescer(sink, name="w", max_batch_items=1)
    first, second = await coalescer.put(1), await coalescer.put(2)
    await coalescer.close(timeout_s=0.02)
    await asyncio.wait([first, second])
    assert first.cancelled()
    assert second.cancelled()


async def test_nothing_is_lost_or_doubled_under_load():
    seen = []

    async def sink(items):
        await asyncio.sleep(0)
        seen.extend(items)
        return [-item for item in items]

    coalescer = Coalescer(sink, name="w", max_batch_items=7, max_queued_items=20, max_in_flight=3)
    results = await asyncio.gather(
        *(coalescer.submit(item, size_bytes=item % 5) for item in range(2000))
    )
    assert results == [-item for item in range(2000)]
    assert sorted(seen) == list(range(2000))

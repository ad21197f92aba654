"""What user code may do to its worker: each sample ends by name, and those beside it go on."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio
from rollout.worker_harness import SAMPLE, Bench, WorkerHarness, spec

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.rollout.v1.worker_pb2 import (
    CallAnswer,
    SampleEnd,
    WorkerCommand,
    WorkerSample,
)
from flexmarl.rollout.worker.exchange import MAX_OPEN

DONE = common_pb2.SAMPLE_STATUS_DONE
FAILED = common_pb2.SAMPLE_STATUS_FAILED
CANCELLED = common_pb2.SAMPLE_STATUS_CANCELLED

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEAM = """
import asyncio
import sys
from dataclasses import replace
from flexmarl.rollout.workflow import CallError

class Mute:
    def __repr__(self):
        raise ValueError("no repr")

class MuteError(Exception):
    def __str__(self):
        raise ValueError("no text")

class OddError(BaseException):
    pass

def leave():
    sys.exit(2)

def make(n):
    return "x" * n

def complain():
    raise CallError("5", "too much to say", {str(n): "z" * 4000 for n in range(99)})

async def leaves():
    raise SystemExit(4)

def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value

async def odd(ctx, what):
    match what:
        case "no repr": return Mute()
        case "deep": return nested(100_000)
        case "many digits": return 10 ** 6000
        case "no text": raise MuteError
        case "odd": raise OddError("it")
        case "odd call": raise CallError(5, None, {7: Mute()})
        case "long text": raise ValueError("y" * (8 << 20))
        case "exit": sys.exit(3)
        case "interrupt": raise KeyboardInterrupt
        case "exit in a task": await asyncio.create_task(leaves())
        case "exit in a tool": await ctx.tool("leave")
        case "large value": await ctx.tool("make", n=4 << 20)
        case "large argument": await ctx.tool("make", n="z" * (4 << 20))
        case "large output": return "x" * (4 << 20)
        case "many outputs":
            one = await ctx.tool("make", n=1)
            sample = one.vertex_id.rpartition("/")[0]
            many = [replace(one, vertex_id=f"{sample}/0:{n}") for n in range(7000)]
            await ctx.tool("make", n=1, after=many)
        case "many facts":
            await ctx.tool("complain")
        case "large calls":
            for number in range(23):
                await ctx.tool("make", n=(3 << 20) - 9)
        case "simulated": await ctx.call("echo", text=1, simulated="x")
        case "stops the loop": asyncio.get_running_loop().stop()
    await asyncio.sleep(0)
    return "went on"

async def team(ctx, query):
    if "what" in query:
        return await odd(ctx, query["what"])
    return await ctx.call("echo", text="beside")

def reward(sample):
    return 1.0
"""
TOOLS = {"tools": {"leave": "team:leave", "make": "team:make", "complain": "team:complain"}}

CASES = {
    "no repr": ("WORKFLOW_RAISED", ["returned a Mute"]),
    "deep": ("WORKFLOW_RAISED", ["returned a list"]),
    "many digits": ("WORKFLOW_RAISED", ["cannot be passed on", "digits"]),
    "no text": ("WORKFLOW_RAISED", ["MuteError: (a MuteError that cannot be shown)", "team.py:"]),
    "odd": ("WORKFLOW_RAISED", ["OddError: it"]),
    "odd call": ("5", ["None"]),
    "long text": ("WORKFLOW_RAISED", ["yyy", "characters)"]),
    "exit": ("WORKFLOW_RAISED", ["SystemExit: 3", "in odd"]),
    "interrupt": ("WORKFLOW_RAISED", ["KeyboardInterrupt"]),
    "exit in a task": ("WORKFLOW_RAISED", ["SystemExit: 4", "in leaves"]),
    "exit in a tool": ("TOOL_RAISED", ["tool 'leave' raised SystemExit: 2", "in leave"]),
    "large value": ("ROW_TOO_LARGE", ["value of tool 'make'", "4194306 bytes", "3145728"]),
    "large argument": ("ROW_TOO_LARGE", ["arguments of tool 'make'", "3145728"]),
    "large output": ("ROW_TOO_LARGE", ["its output", "3145728; keep it in a file"]),
    "many outputs": ("ROW_TOO_LARGE", ["tool 'make'", "ids of the 7000 outputs", "in steps"]),
    "many facts": ("5", ["too much to say"]),
    "large calls": ("WORKFLOW_RAISED", ["with its calls", "more than 67108864"]),
    "simulated": ("WORKFLOW_RAISED", ["simulated= takes a Simulated, not str"]),
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(children, tmp_path_factory):
    """One worker for all: whatever a sample does, the next one finds it as it was."""
    return await Bench(children, tmp_path_factory.mktemp("shared")).worker(TEAM, workflow=TOOLS)


def numbered(number: int) -> str:
    return f"b000000a0-g{number:04d}-s000a0"


async def run_beside(worker: WorkerHarness, what: str, number: int) -> SampleEnd:
    """Runs the odd sample while another one waits for its call; that one must end as ever."""
    odd, beside = numbered(2 * number), numbered(2 * number + 1)
    await worker.send(WorkerCommand(start=[WorkerSample(spec=spec(beside))]))
    while not any(call.sample_id == beside for call in worker.calls):
        await worker.step(lambda _: None)
    sample = WorkerSample(spec=spec(odd, query={"what": what}))
    ends = await worker.run(sample)
    await worker.send(
        WorkerCommand(
            answers=[CallAnswer(vertex_id=f"{beside}/0:0", tokens=[1], finish_reason="stop")]
        )
    )
    others = await worker.until_ended([beside])
    assert others[beside].status == DONE, others[beside].failure
    return ends[odd]


@pytest.mark.parametrize("what", CASES)
async def test_whatever_a_workflow_does_its_sample_ends_by_name_and_others_go_on(shared, what):
    reason, words = CASES[what]
    end = await run_beside(shared, what, list(CASES).index(what))
    assert (end.status, end.failure.reason) == (FAILED, reason), end.failure
    for word in words:
        assert word in end.failure.message
    assert len(end.failure.message) < 5000
    assert end.failure.ByteSize() < 32 << 10
    assert not any(call.vertex_id.startswith(end.sample_id) for call in shared.calls)


async def test_a_loop_that_a_workflow_stops_goes_on(shared):
    end = await run_beside(shared, "stops the loop", len(CASES))
    assert (end.status, end.output_json) == (DONE, b'"went on"')


async def test_an_async_reward_may_raise_anything(bench):
    source = """
import asyncio
class OddError(BaseException):
    pass
class MuteError(BaseException):
    def __str__(self):
        raise OddError("no text")
class Mapping(dict):
    def items(self):
        raise asyncio.CancelledError
async def leaves():
    raise SystemExit(3)
async def team(ctx, query): pass
async def reward(sample):
    match sample.query["n"]:
        case 0: raise OddError("it")
        case 1: raise asyncio.CancelledError
        case 2: raise SystemExit(3)
        case 3: raise KeyboardInterrupt
        case 4: raise GeneratorExit
        case 5: raise MuteError
        case 6: return Mapping(echo=1.0)
        case 7: await asyncio.create_task(leaves())
        case 8:
            asyncio.current_task().cancel()
            await asyncio.sleep(9)
    return 1.0
"""
    words = [
        "OddError: it", "CancelledError", "SystemExit: 3", "KeyboardInterrupt", "GeneratorExit",
        "MuteError: (a MuteError that cannot be shown)", "CancelledError", "SystemExit: 3",
        "CancelledError",
    ]  # fmt: skip
    worker = await bench.worker(source)
    *odd, last = [numbered(n) for n in range(len(words) + 1)]
    samples = [WorkerSample(spec=spec(i, query={"n": n})) for n, i in enumerate([*odd, last])]
    ends = await worker.run(*samples)
    for sample_id, word in zip(odd, words, strict=True):
        end = ends[sample_id]
        assert (end.status, end.failure.reason) == (FAILED, "REWARD_RAISED"), end
        assert f"reward team:reward raised {word}" in end.failure.message
        assert not end.HasField("rewards")
    assert ends[last].status == DONE


@pytest.mark.parametrize("heeds", [True, False])
async def test_a_sample_that_is_cut_while_an_async_reward_runs_ends_as_cut(bench, tmp_path, heeds):
    source = """
import asyncio
from pathlib import Path
async def team(ctx, query):
    return "said"
async def reward(sample):
    Path(sample.query["begun"]).touch()
    while True:
        try:
            await asyncio.sleep(99)
        except BaseException:
            Path(sample.query["cut"]).touch()
            if sample.query["heeds"]:
                return 1.0
"""
    worker = await bench.worker(source)
    begun, cut = tmp_path / "begun", tmp_path / "cut"
    query = {"begun": str(begun), "cut": str(cut), "heeds": heeds}
    await worker.send(WorkerCommand(start=[WorkerSample(spec=spec(query=query))]))
    async with asyncio.timeout(20):
        while not begun.exists():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)
    await worker.send(WorkerCommand(cancel_sample_ids=[SAMPLE]))
    (end,) = (await worker.until_ended([SAMPLE])).values()
    assert end.status == CANCELLED
    assert not end.HasField("rewards")
    assert cut.exists()


async def test_what_a_reward_starts_for_all_of_them_outlives_it(bench):
    """Such as a task that asks a reward model about several samples at once."""
    source = """
import asyncio
asked = asyncio.Queue()
async def serve():
    while True:
        (await asked.get()).set_result(2.0)
server = None
async def team(ctx, query): pass
async def reward(sample):
    global server
    server = server or asyncio.create_task(serve())
    score = asyncio.get_running_loop().create_future()
    asked.put_nowait(score)
    return await score
"""
    worker = await bench.worker(source, workflow={"reward_timeout_s": 10})
    for number in range(2):
        sample_id = numbered(number)
        end = (await worker.run(WorkerSample(spec=spec(sample_id))))[sample_id]
        assert (end.status, end.rewards.team) == (DONE, 2.0), end.failure


async def test_a_sample_is_cut_whether_its_workflow_heeds_it_or_not(bench):
    source = """
import asyncio
async def team(ctx, query):
    while True:
        try:
            await ctx.call("echo", text="again")
        except BaseException:
            await asyncio.sleep(0.01)

def reward(sample):
    return 1.0
"""
    worker = await bench.worker(source)
    await worker.send(WorkerCommand(start=[WorkerSample(spec=spec())]))
    await worker.step(lambda _: None)
    await worker.send(WorkerCommand(cancel_sample_ids=[SAMPLE]))
    (end,) = (await worker.until_ended([SAMPLE], answer=lambda _: None)).values()
    assert end.status == CANCELLED
    # What it still tries is refused where it is tried, and asks nobody.
    num_calls = len(worker.calls)
    other = numbered(1)
    await worker.send(WorkerCommand(start=[WorkerSample(spec=spec(other))]))
    while not any(call.sample_id == other for call in worker.calls):
        await worker.step(lambda _: None)
    assert [call.sample_id for call in worker.calls[num_calls:]] == [other]


async def test_a_workflow_that_is_cut_may_clean_up(bench):
    source = """
TOLD = []
def tell(what):
    TOLD.append(what)
    return len(TOLD)
async def team(ctx, query):
    try:
        await ctx.call("echo", text="x")
    finally:
        await ctx.tool("tell", what="over")

def reward(sample):
    return 1.0
"""
    worker = await bench.worker(source, workflow={"tools": {"tell": "team:tell"}})
    await worker.send(WorkerCommand(start=[WorkerSample(spec=spec())]))
    await worker.step(lambda _: None)
    await worker.send(WorkerCommand(cancel_sample_ids=[SAMPLE]))
    (end,) = (await worker.until_ended([SAMPLE])).values()
    assert end.status == CANCELLED
    assert [row.payload.output for row in worker.tools] == [b"1"]


async def test_a_workflow_that_calls_without_end_fails_before_it_fills_its_service(bench):
    source = """
import asyncio
async def team(ctx, query):
    while True:
        asyncio.create_task(ctx.call("echo", text="more"))
        await asyncio.sleep(0)

def reward(sample):
    return 1.0
"""
    worker = await bench.worker(source)
    await worker.send(WorkerCommand(start=[WorkerSample(spec=spec())]))
    (end,) = (await worker.until_ended([SAMPLE], answer=lambda _: None)).values()
    assert (end.status, end.failure.reason) == (FAILED, "WORKFLOW_RAISED")
    assert f"{MAX_OPEN} calls in progress" in end.failure.message
    assert len(worker.calls) == MAX_OPEN
    assert len(worker.cut) == MAX_OPEN  # and nothing of it is left at the service

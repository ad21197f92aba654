"""What a row of the store does not take fails its call or its sample by name, and nothing else."""

from __future__ import annotations

import os
import signal

import pytest
from rollout.dispatcher_harness import user_code_of
from rollout.team_kit import AGENTS, opened
from rollout.worker_harness import write_model

from flexmarl.api.common.v1 import common_pb2
from flexmarl.core.errors import ErrorReason
from flexmarl.core.keepalive import MAX_MESSAGE_BYTES
from flexmarl.core.row_limits import MAX_VALUE_BYTES

DONE = common_pb2.SAMPLE_STATUS_DONE
FAILED = common_pb2.SAMPLE_STATUS_FAILED

pytestmark = pytest.mark.asyncio(loop_scope="module")


LARGE = """
def make(text):
    return text

async def team(ctx, query):
    said = await ctx.tool("make", text="x" * query["n"])
    return said.text

def reward(sample):
    return 1.0
"""


async def test_the_largest_values_are_stored_and_larger_ones_end_their_sample_alone(make, tmp_path):
    largest = MAX_VALUE_BYTES - len('{"text":""}')
    async with make(LARGE, workflow={"tools": {"make": "team:make"}}) as cluster:
        await opened(cluster, tmp_path)
        ids = await cluster.admit(0, queries=[{"n": largest}, {"n": largest + 1}, {"n": 1}])
        status = await cluster.until_ended()
        assert not status.HasField("fatal"), status.fatal
        samples = await cluster.samples()
        assert [samples[i].status for i in ids] == [DONE, FAILED, DONE]
        assert "arguments of tool 'make'" in samples[ids[1]].failure.message
        assert len(samples[ids[0]].output_json) == largest + 2


ANSWERS = """
import asyncio
async def team(ctx, query):
    calls = [ctx.call("plan", text=query["n"]) for _ in range(query["n"])]
    return (await asyncio.gather(*calls))[0]

def reward(sample):
    return 1.0
"""


async def test_an_answer_that_no_row_takes_fails_its_sample_alone(make, tmp_path):
    async with make(ANSWERS) as cluster:
        long = [7 << 16] * 800_000  # as engines of long contexts may give, where max_tokens allows
        await opened(cluster, tmp_path, answer=lambda r: long if r.prompt_tokens[0] == 1 else [1])
        ids = await cluster.admit(0, queries=[{"n": 1}, {"n": 2}])
        status = await cluster.until_ended()
        assert not status.HasField("fatal"), status.fatal
        samples = await cluster.samples()
        assert [samples[i].status for i in ids] == [FAILED, DONE]
        failure = samples[ids[0]].failure
        assert failure.reason == ErrorReason.ROW_TOO_LARGE
        assert "agent 'plan'" in failure.message
        assert "8800023 bytes, more than 8388608; lower its max_tokens" in failure.message
        row = (await cluster.graph(ids[0])).vertices[0]
        assert row.meta.failure == failure
        assert len(row.payload.prompt_tokens) == 2
        # It is not asked for again, and not kept by its host.
        await cluster.until(lambda _: len(cluster.hosts[0].stored) == 3)
        assert len(cluster.hosts[0].requests) == 3


CUTS = """
import asyncio
async def team(ctx, query):
    calls = [asyncio.create_task(ctx.call("plan", text="x" * 20_000)) for _ in range(400)]
    await ctx.call("work", text="go")
    return "done"

def reward(sample):
    return 1.0
"""


async def test_all_calls_that_are_cut_with_their_sample_fit_its_last_write(make, tmp_path):
    """What does not fit, beside the rows themselves, are prompts that nobody reads again."""
    model = {"p": {"model": {"path": str(write_model(tmp_path / "long", max_context=1 << 16))}}}
    # Eight million tokens on their way: on a busy machine longer than other calls may take.
    agents = {name: {**agent, "timeout_s": 300} for name, agent in AGENTS.items()}
    async with make(CUTS, policies=model, agents=agents) as cluster:
        await opened(cluster, tmp_path, answer=lambda r: None if r.policy == "p" else [1])
        (only,) = await cluster.admit(0)
        status = await cluster.until_ended(timeout_s=100)
        assert not status.HasField("fatal"), status.fatal
        assert (await cluster.samples())[only].status == DONE
        cut = [v for v in (await cluster.graph(only)).vertices if v.meta.agent == "plan"]
        assert len(cut) == 400
        assert {v.meta.num_prompt_tokens for v in cut} == {20_001}
        kept = [v for v in cut if v.payload.prompt_tokens]
        assert 200 < len(kept) < 220  # 4 MiB


MANY = """
def make(n):
    return "x" * n

async def team(ctx, query):
    for _ in range(query["tools"]):
        await ctx.tool("make", n=query["n"])
    return await ctx.call("plan", text="a")

async def reward(sample):
    return float(len(sample.tools))
"""


async def test_a_sample_of_which_more_is_stored_than_a_message_holds_is_replayed(make, tmp_path):
    """Its worker is killed: what is read of it is more than one answer of the store may be."""
    num_tools = MAX_MESSAGE_BYTES // MAX_VALUE_BYTES + 2
    async with make(MANY, workflow={"tools": {"make": "team:make"}}) as cluster:
        await opened(cluster, tmp_path, answer=lambda _: None)
        host = cluster.hosts[0]
        query = {"tools": num_tools, "n": MAX_VALUE_BYTES - 2}
        (sample_id,) = await cluster.admit(0, queries=[query])
        await cluster.until(lambda _: len(host.requests) == 1)
        os.kill(await user_code_of(cluster, "worker"), signal.SIGKILL)
        await cluster.until(lambda s: s.counters["reattached"] == 1)
        host.finish(host.requests[0], [1, 2])
        status = await cluster.until_ended()
        assert not status.HasField("fatal"), status.fatal
        assert (await cluster.samples())[sample_id].status == DONE
        assert status.counters["replayed"] == status.counters["tools"] == num_tools

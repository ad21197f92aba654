"""Long prompts: others go on while they become tokens, and nothing else of a call changes."""

from __future__ import annotations

import json

import pytest
from rollout.worker_harness import (
    ALPHABET,
    EOS,
    Bench,
    echo_tokens,
    run_config,
    spec,
    text_of,
    tokens_of,
    write_model,
)
from tokenizers import Tokenizer

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.rollout.v1.worker_pb2 import CallAnswer, WorkerCommand, WorkerSample
from flexmarl.rollout.prompting import LONG_CHARS, ModelText, build_agents
from flexmarl.rollout.worker.exchange import MAX_OPEN
from flexmarl.rollout.workflow import Output

DONE = common_pb2.SAMPLE_STATUS_DONE
FAILED = common_pb2.SAMPLE_STATUS_FAILED
LIMIT = 1 << 20

in_worker = pytest.mark.asyncio(loop_scope="module")

TEAM = f"""
LONG = "abcdefgh" * {LONG_CHARS}
async def team(ctx, query):
    texts = [LONG if text == "long" else text for text in query["texts"]]
    said = await ctx.any(*(ctx.call("echo", text=text) for text in texts))
    return str(said), len(said.inputs["text"])

def reward(sample):
    return 1.0
"""


@pytest.mark.parametrize("piece", ["ab<eos>c", "a\ud800b", "a ", "\u00e9"])
@pytest.mark.parametrize("length", [LONG_CHARS - 1, LONG_CHARS, LONG_CHARS + 1])
def test_tokens_of_a_text_are_the_tokenizers_whatever_its_length(tmp_path, piece, length):
    folder = write_model(tmp_path / "model")
    text = (piece * length)[:length]
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = plain.encode(text.replace("\ud800", "\ufffd"), add_special_tokens=True).ids
    assert ModelText(folder, policy="p").encode(text, add_special_tokens=True) == expected


@pytest.mark.parametrize("num_chars", [10, LONG_CHARS])
def test_a_length_that_training_left_in_the_tokenizers_file_cuts_and_fills_nothing(
    tmp_path, num_chars
):
    folder = write_model(tmp_path / "model")
    left = Tokenizer.from_file(str(folder / "tokenizer.json"))
    left.enable_truncation(8)
    left.enable_padding(length=16)
    left.save(str(folder / "tokenizer.json"))
    model = ModelText(folder, policy="p")
    assert model.encode("a" * num_chars, add_special_tokens=True) == tokens_of("a" * num_chars)


@in_worker
async def test_others_ask_while_a_long_prompt_becomes_tokens(bench):
    worker = await bench.worker(TEAM, max_context=LIMIT)
    long, short = "b000000a0-g0000-s000a0", "b000000a0-g0001-s000a0"
    ends = await worker.run(
        WorkerSample(spec=spec(long, query={"texts": ["long"]})),
        WorkerSample(spec=spec(short, query={"texts": ["short"]})),
    )
    assert {end.status for end in ends.values()} == {DONE}
    assert [call.sample_id for call in worker.calls] == [short, long]
    assert text_of(worker.calls[1].prompt_tokens) == "abcdefgh" * LONG_CHARS + ">"


@in_worker
async def test_a_repeated_run_counts_a_long_prompts_answer_in_its_turn(bench):
    """Both calls had ended when the worker died: the one that was the first is so again."""
    query = {"texts": ["short", "long"]}
    first = await bench.worker(TEAM, max_context=LIMIT)
    await first.send(WorkerCommand(start=[WorkerSample(spec=spec(query=query))]))
    while len(first.calls) < 2:
        await first.step(lambda _: None)
    for call in first.calls:
        at = 1 if len(call.prompt_tokens) > LONG_CHARS else 2
        stop = CallAnswer(tokens=echo_tokens(call), finish_reason="stop", finished_unix_ns=at)
        first.store(call, stop)
    second = await bench.worker(TEAM, max_context=LIMIT)
    (stored,) = first.stored.values()
    (end,) = (await second.run(WorkerSample(spec=spec(query=query), stored=stored))).values()
    assert end.status == DONE, end.failure
    assert json.loads(end.output_json) == ["dcba", 8 * LONG_CHARS]
    assert second.calls == []


@in_worker
async def test_a_prompt_that_is_too_long_fails_its_call_by_name(bench):
    _, end = await bench.one(TEAM, query={"texts": ["long"]})
    assert (end.status, end.failure.reason) == (FAILED, "PROMPT_TOO_LONG")
    assert f"prompt of {8 * LONG_CHARS + 1} tokens" in end.failure.message


@in_worker
async def test_long_prompts_without_end_fail_their_sample_as_short_ones_do(bench: Bench):
    source = f"""
import asyncio
async def team(ctx, query):
    while True:
        asyncio.create_task(ctx.call("echo", text="a" * {LONG_CHARS}))
        await asyncio.sleep(0)

def reward(sample):
    return 1.0
"""
    worker = await bench.worker(source, max_context=LIMIT)
    await worker.send(WorkerCommand(start=[WorkerSample(spec=spec())]))
    (end,) = (await worker.until_ended([spec().sample_id], answer=lambda _: None)).values()
    assert (end.status, end.failure.reason) == (FAILED, "WORKFLOW_RAISED")
    assert f"{MAX_OPEN} calls in progress" in end.failure.message


def test_a_long_conversation_keeps_what_was_sampled(tmp_path):
    chat = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{{ eos_token }}{% endfor %}a"
    model = write_model(tmp_path / "model", max_context=LIMIT, chat_template=chat)
    agents = {"echo": {"policy": "p", "max_tokens": 4}}
    config = run_config(model, tmp_path, agents=agents)
    agent = build_agents(config, {"p": str(model)})["echo"]
    hi, said = "hi" * LONG_CHARS, [*tokens_of("a"), ALPHABET.index("."), EOS]
    output = Output("a.", tuple(said), "stop", "v", "echo", "0:0", value="a.")
    messages = [{"role": "user", "content": hi}, {"role": "assistant", "content": output}]
    prompt = agent.prompt({}, messages, is_own=lambda _: True)
    assert prompt.is_long
    assert prompt.tokens() == [*tokens_of(f"u{hi}"), EOS, *tokens_of("a"), *said, *tokens_of("a")]

"""What a sample holds while it waits: thousands of them do."""

from __future__ import annotations

import asyncio
import hashlib
import struct
import weakref

import pytest
from rollout.worker_harness import SAMPLE, run_config, spec, tokens_of, write_model

from flexmarl.api.rollout.v1.worker_pb2 import CallAnswer, WorkerSample
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.rollout.prompting import build_agents, check_prompt_fits
from flexmarl.rollout.worker.caller import AgentCaller
from flexmarl.rollout.worker.calls import CallForm, CallForms
from flexmarl.rollout.worker.exchange import Exchange
from flexmarl.rollout.worker.long_prompts import LongPrompts
from flexmarl.rollout.worker.outbox import Outbox
from flexmarl.rollout.workflow import Simulated


class Prompt(list):
    """A list that can be watched."""


async def nobody(frame: bytes) -> None:
    raise AssertionError("nothing is sent here")


@pytest.mark.parametrize("merge_turns", [False, True])
async def test_who_waits_for_an_answer_holds_no_prompt_but_one_that_goes_on(tmp_path, merge_turns):
    model = write_model(tmp_path / "model")
    echo = {"policy": "p", "prompt": "{text}>", "max_tokens": 4, "merge_turns": merge_turns}
    config = run_config(model, tmp_path, agents={"echo": echo})
    agents = build_agents(config, {"p": str(model)})
    made: list[weakref.ref[Prompt]] = []

    def encode(text: str, *, add_special_tokens: bool) -> Prompt:
        prompt = Prompt(tokens_of(text))
        made.append(weakref.ref(prompt))
        return prompt

    agents["echo"].model.encode = encode
    outbox = Outbox(nobody)
    exchange = Exchange(WorkerSample(spec=spec()), outbox=outbox, stop=lambda: None)
    caller = AgentCaller(agents, forms=CallForms(), long_prompts=LongPrompts(), exchange=exchange)
    call = caller.call(
        "echo", path="0:0", after=None, messages=None, tools=None, simulated=None,
        args={"text": "abc"},
    )  # fmt: skip
    waiting = asyncio.create_task(call)
    await asyncio.sleep(0)
    (asked,) = outbox.event().calls
    assert list(asked.prompt_tokens) == tokens_of("abc>")
    assert (made[0]() is not None) == merge_turns
    answer = CallAnswer(vertex_id=f"{SAMPLE}/0:0", tokens=tokens_of("ok"), finish_reason="stop")
    exchange.answer(answer)
    assert (await waiting).text == "ok"


def test_the_hash_of_a_call_is_that_of_its_parts_each_with_its_length(tmp_path):
    model = write_model(tmp_path / "model")
    echo = {"policy": "p", "prompt": "{text}>", "max_tokens": 4}
    config = run_config(model, tmp_path, agents={"echo": echo})
    agent = build_agents(config, {"p": str(model)})["echo"]
    told = Simulated(output_tokens=3)
    draws = (4, agent.temperature, agent.top_p, agent.top_k, agent.stop_token_ids)
    parts = [b"echo", repr(draws).encode(), struct.pack("<2I", 7, 300)]
    for simulated, more in ((None, []), (told, [repr(told).encode()])):
        whole = [*parts, *more]
        text = b"agent" + b"".join(struct.pack("<I", len(part)) + part for part in whole)
        form = CallForm(agent, greedy=False)
        for _ in range(2):  # what is begun once serves many calls
            assert form.input_hash([7, 300], simulated) == hashlib.sha256(text).digest()
    assert CallForms().of(agent, greedy=True).input_hash([7], None) != form.input_hash([7], None)


@pytest.mark.parametrize(
    ("told", "error"),
    [
        ({"output_tokens": -1}, ValueError),
        ({"output_tokens": 2**32}, ValueError),
        ({"output_tokens": 1.5}, TypeError),
        ({"tool_s": -0.1}, ValueError),
        ({"tool_s": float("nan")}, ValueError),
    ],
)
def test_what_no_call_can_say_is_refused_before_a_call_is_begun(told, error):
    with pytest.raises(error):
        Simulated(**told)


def test_a_prompt_that_no_row_takes_is_refused_where_it_is_made():
    check_prompt_fits([1] * 3_000_000, what="agent 'echo'")  # many, and small
    with pytest.raises(
        DomainError, match=r"agent 'echo': its prompt of 2100000 tokens: 8400"
    ) as told:
        check_prompt_fits([1 << 21] * 2_100_000, what="agent 'echo'")
    assert told.value.reason is ErrorReason.ROW_TOO_LARGE

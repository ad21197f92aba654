"""I4 and D1 before any rank is asked: what may be trained on, said by name."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.trainer.rows import pack_rows

HASH = "sha256:w"


def vertex(name: str, *, prompt: list[int], response: list[int]) -> graph_pb2.Vertex:
    meta = graph_pb2.VertexMeta(
        vertex_id=name,
        policy="p",
        policy_version=4,
        weights_hash=HASH,
        version_runs=[common_pb2.VersionRun(version=4, num_tokens=len(response))],
        advantage=0.5,
    )
    payload = graph_pb2.VertexPayload(
        prompt_tokens=prompt,
        response_tokens=response,
        logprobs=[-1.0] * len(response),
        temperature=1.0,
    )
    return graph_pb2.Vertex(meta=meta, payload=payload)


def pack(*vertices: graph_pb2.Vertex):
    return pack_rows(
        vertices,
        micro_batch=graph_pb2.MicroBatch(micro_batch_id="m1", policy="p", batch=4),
        version=4,
        weights_hash=HASH,
        num_updates=3,
    )


def test_columns_hold_row_after_row():
    packed = pack(
        vertex("a", prompt=[1, 2], response=[3]),
        vertex("silent", prompt=[9], response=[]),
        vertex("b", prompt=[4], response=[5, 6]),
    )
    command = packed.command
    assert np.frombuffer(command.tokens, "<i4").tolist() == [1, 2, 3, 9, 4, 5, 6]
    assert np.frombuffer(command.prompt_lengths, "<i4").tolist() == [2, 1, 1]
    assert np.frombuffer(command.response_lengths, "<i4").tolist() == [1, 0, 2]
    assert np.frombuffer(command.advantages, "<f8").tolist() == [0.5] * 3
    assert len(np.frombuffer(command.logprobs, "<f8")) == 3
    assert command.num_updates == 3
    assert (packed.counts.num_rows, packed.counts.num_tokens) == (2, 3)


CASES: list[tuple[str, Callable[[graph_pb2.Vertex], object], ErrorReason]] = [
    ("policy", lambda v: setattr(v.meta, "policy", "q"), ErrorReason.WEIGHTS_MISMATCH),
    ("version", lambda v: setattr(v.meta, "policy_version", 3), ErrorReason.WEIGHTS_MISMATCH),
    ("hash", lambda v: setattr(v.meta, "weights_hash", "x"), ErrorReason.WEIGHTS_MISMATCH),
    ("run", lambda v: setattr(v.meta.version_runs[0], "version", 5), ErrorReason.WEIGHTS_MISMATCH),
    ("more log-probs", lambda v: v.payload.logprobs.append(-1), ErrorReason.INVALID_ARGUMENT),
    ("fewer log-probs", lambda v: v.payload.logprobs.pop(), ErrorReason.INVALID_ARGUMENT),
    *(
        (
            f"log-prob {number}",
            lambda v, number=number: v.payload.logprobs.__setitem__(1, number),
            ErrorReason.INVALID_ARGUMENT,
        )
        for number in (-math.inf, math.nan)
    ),
    (
        "short run",
        lambda v: setattr(v.meta.version_runs[0], "num_tokens", 1),
        ErrorReason.INVALID_ARGUMENT,
    ),
    ("no prompt", lambda v: v.payload.ClearField("prompt_tokens"), ErrorReason.INVALID_ARGUMENT),
    ("open group", lambda v: v.meta.ClearField("advantage"), ErrorReason.INVALID_ARGUMENT),
    ("greedy", lambda v: setattr(v.payload, "temperature", 0.0), ErrorReason.INVALID_ARGUMENT),
    (
        "no temperature",
        lambda v: setattr(v.payload, "temperature", float("nan")),
        ErrorReason.INVALID_ARGUMENT,
    ),
]


@pytest.mark.parametrize(("name", "edit", "reason"), CASES, ids=[case[0] for case in CASES])
def test_a_row_that_may_not_be_trained_on_is_named(name, edit, reason):
    bad = vertex("bad-row", prompt=[1], response=[2, 3])
    edit(bad)
    with pytest.raises(DomainError, match="bad-row") as caught:
        pack(vertex("good", prompt=[1], response=[2]), bad)
    assert caught.value.reason is reason
    assert "m1" in caught.value.message


def test_a_micro_batch_of_nothing_is_refused():
    with pytest.raises(DomainError, match="m1 has no rows") as caught:
        pack()
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT


def test_a_row_that_comes_twice_is_refused_also_within_a_chain():
    last = turn("c", [1, 2, 3], [4], into="c")
    first = turn("a", [1], [2], into="c")
    for rows in ([vertex("a", prompt=[1], response=[])] * 2, [first, last, first]):
        with pytest.raises(DomainError, match="m1: row a: it comes twice") as caught:
            pack(*rows)
        assert caught.value.reason is ErrorReason.INVALID_ARGUMENT


def test_a_record_of_another_batch_is_refused():
    record = graph_pb2.MicroBatch(micro_batch_id="m1", policy="p", batch=5)
    with pytest.raises(DomainError, match=r"m1 is of batch 5, .* of version 4") as caught:
        pack_rows(
            [vertex("a", prompt=[1], response=[2])],
            micro_batch=record,
            version=4,
            weights_hash=HASH,
            num_updates=3,
        )
    assert caught.value.reason is ErrorReason.VERSION_MISMATCH


def test_many_bad_rows_are_counted():
    bad = [vertex(f"v{number}", prompt=[1], response=[2]) for number in range(8)]
    for item in bad:
        item.meta.policy_version = 9
    with pytest.raises(DomainError, match="v0, v1, v2, v3, v4 and 3 more") as caught:
        pack(*bad)
    assert caught.value.metadata["vertex_ids"].count(",") == 7


def turn(name: str, prompt: list[int], response: list[int], *, into: str = "", advantage=0.5):
    made = vertex(name, prompt=prompt, response=response)
    made.meta.merged_into = into
    made.meta.advantage = advantage
    made.payload.logprobs[:] = [-float(token) for token in response]
    return made


def test_turns_of_a_chain_are_one_row_that_marks_what_was_sampled():
    # Cases D1, D7: lengths agree, nothing is cut, what stands between the turns is not trained on.
    packed = pack(
        turn("a", [1, 2], [3, 4], into="c", advantage=0.25),
        turn("b", [1, 2, 3, 4, 9], [5], into="c", advantage=-1.0),
        turn("c", [1, 2, 3, 4, 9, 5, 8, 7], [6, 6], advantage=2.0),
        turn("alone", [4], [2]),
    )
    command = packed.command
    tokens = [1, 2, 3, 4, 9, 5, 8, 7, 6, 6, 4, 2]
    assert np.frombuffer(command.tokens, "<i4").tolist() == tokens
    assert np.frombuffer(command.prompt_lengths, "<i4").tolist() == [2, 1]
    assert np.frombuffer(command.response_lengths, "<i4").tolist() == [8, 1]
    assert list(command.sampled) == [1, 1, 0, 1, 0, 0, 1, 1, 1]
    logprobs = [-3.0, -4.0, 0.0, -5.0, 0.0, 0.0, -6.0, -6.0, -2.0]
    assert np.frombuffer(command.logprobs, "<f8").tolist() == logprobs
    advantages = [0.25, 0.25, 0.0, -1.0, 0.0, 0.0, 2.0, 2.0, 0.5]
    assert np.frombuffer(command.token_advantages, "<f8").tolist() == advantages
    assert (packed.counts.num_rows, packed.counts.num_tokens) == (2, 6)


def test_a_chain_that_does_not_go_on_is_refused():
    with pytest.raises(DomainError, match="row a: the last turn of its chain") as caught:
        pack(turn("a", [1], [2], into="b"), turn("b", [1, 3, 4], [5]))
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT

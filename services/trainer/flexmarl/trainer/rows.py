"""Rows of a micro-batch: checked against what may be trained on, packed for the ranks."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ledger import Counts

_MAX_NAMED = 5

_Turn: TypeAlias = tuple[graph_pb2.VertexMeta, graph_pb2.VertexPayload]
"""A vertex, taken apart once: each look at a part of a message makes an object."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """A micro-batch for the ranks, the denominators that it adds, and all its tokens."""

    command: rank_pb2.RankGradients
    counts: Counts
    num_model_tokens: int


def pack_rows(
    vertices: Sequence[graph_pb2.Vertex],
    *,
    micro_batch: graph_pb2.MicroBatch,
    version: int,
    weights_hash: str,
    num_updates: int,
) -> PackedRows:
    """Checks and packs rows.

    Vertices of one chain (`merged_into`) are one row: the last one's tokens, of which those that
    some turn sampled are trained on, each with its own log-probability and advantage.

    I4: every token of every row was sampled at `version` by the weights of `weights_hash`; rows of
    anything else are refused by name, and with them the micro-batch.

    Raises:
        DomainError: VERSION_MISMATCH when the record is of another batch; WEIGHTS_MISMATCH;
            INVALID_ARGUMENT for rows that are not whole, come twice, or are none.
    """
    if micro_batch.batch != version:
        raise DomainError(
            ErrorReason.VERSION_MISMATCH,
            f"{micro_batch.micro_batch_id} is of batch {micro_batch.batch}, its rows are of "
            f"version {version}",
            {"expected": str(micro_batch.batch), "actual": str(version)},
        )
    if not vertices:
        raise DomainError(
            ErrorReason.INVALID_ARGUMENT,
            f"{micro_batch.micro_batch_id} has no rows: record a micro-batch of at least one",
            {"micro_batch_id": micro_batch.micro_batch_id},
        )
    turns = [(vertex.meta, vertex.payload) for vertex in vertices]
    _refuse_twice(turns, micro_batch)
    _refuse_others(turns, micro_batch, version, weights_hash)
    for meta, payload in turns:
        _check_whole(meta, payload, micro_batch)
    chains = _chains(turns)
    merged = len(chains) < len(turns)
    tokens, prompts, responses = array("i"), array("i"), array("i")
    advantages, temperatures, logprobs = array("d"), array("d"), array("d")
    sampled, token_advantages = bytearray(), array("d")
    rows = num_sampled = 0
    for chain in chains:
        meta, last = chain[-1]
        prompt, response = last.prompt_tokens, last.response_tokens
        begin = len(chain[0][1].prompt_tokens)
        length = len(prompt) + len(response) - begin
        tokens.extend(prompt)
        tokens.extend(response)
        prompts.append(begin)
        responses.append(length)
        advantages.append(meta.advantage)
        temperatures.append(last.temperature)
        if merged:
            _lay(_spans(chain, micro_batch), length, logprobs, sampled, token_advantages)
            in_row = sum(len(payload.response_tokens) for _, payload in chain)
        else:
            logprobs.extend(last.logprobs)
            in_row = length
        num_sampled += in_row
        rows += in_row > 0
    command = rank_pb2.RankGradients(
        micro_batch_id=micro_batch.micro_batch_id,
        tokens=tokens.tobytes(),
        prompt_lengths=prompts.tobytes(),
        response_lengths=responses.tobytes(),
        advantages=advantages.tobytes(),
        temperatures=temperatures.tobytes(),
        logprobs=logprobs.tobytes(),
        num_updates=num_updates,
        sampled=bytes(sampled),
        token_advantages=token_advantages.tobytes(),
    )
    counts = Counts(num_rows=rows, num_tokens=num_sampled)
    return PackedRows(command, counts, num_model_tokens=len(tokens))


def _chains(turns: Iterable[_Turn]) -> list[list[_Turn]]:
    """Vertices by the rows that they make, each in the order of its turns."""
    chains: dict[str, list[_Turn]] = {}
    for turn in turns:
        chains.setdefault(turn[0].merged_into or turn[0].vertex_id, []).append(turn)
    for chain in chains.values():
        if len(chain) > 1:
            chain.sort(key=lambda turn: len(turn[1].prompt_tokens))
    return list(chains.values())


def _spans(chain: Sequence[_Turn], micro_batch: graph_pb2.MicroBatch) -> list[tuple[int, _Turn]]:
    """Where each turn's response begins, counted from the end of the first prompt.

    Raises:
        DomainError: INVALID_ARGUMENT, the last prompt does not begin with a turn of its chain.
    """
    begin, last = len(chain[0][1].prompt_tokens), chain[-1][1].prompt_tokens
    for meta, payload in chain[:-1]:
        turn = [*payload.prompt_tokens, *payload.response_tokens]
        if list(last[: len(turn)]) != turn:
            raise _unfit(meta, "the last turn of its chain does not go on from it", micro_batch)
    return [(len(turn[1].prompt_tokens) - begin, turn) for turn in chain]


def _lay(
    spans: Sequence[tuple[int, _Turn]],
    length: int,
    logprobs: array[float],
    sampled: bytearray,
    advantages: array[float],
) -> None:
    """Appends the columns of one row; what stands between its turns has zeros and no mask."""
    row_logprobs, row_advantages = array("d", bytes(8 * length)), array("d", bytes(8 * length))
    mask = bytearray(length)
    for start, (meta, payload) in spans:
        count = len(payload.response_tokens)
        stop = start + count
        row_logprobs[start:stop] = array("d", payload.logprobs)
        row_advantages[start:stop] = array("d", [meta.advantage]) * count
        mask[start:stop] = b"\1" * count
    logprobs.extend(row_logprobs)
    advantages.extend(row_advantages)
    sampled.extend(mask)


def _refuse_twice(turns: Iterable[_Turn], micro_batch: graph_pb2.MicroBatch) -> None:
    seen = set[str]()
    for meta, _ in turns:
        if meta.vertex_id in seen:
            raise _unfit(meta, "it comes twice, and would count twice", micro_batch)
        seen.add(meta.vertex_id)


def _refuse_others(
    turns: Sequence[_Turn],
    micro_batch: graph_pb2.MicroBatch,
    version: int,
    weights_hash: str,
) -> None:
    sampled_by = (micro_batch.policy, version, weights_hash)
    others = [
        meta.vertex_id
        for meta, _ in turns
        if (meta.policy, meta.policy_version, meta.weights_hash) != sampled_by
        or [run for run in meta.version_runs if run.version != version]
    ]
    if others:
        named = ", ".join(others[:_MAX_NAMED])
        more = f" and {len(others) - _MAX_NAMED} more" if len(others) > _MAX_NAMED else ""
        raise DomainError(
            ErrorReason.WEIGHTS_MISMATCH,
            f"{micro_batch.micro_batch_id}: rows that version {version} of {micro_batch.policy} "
            f"({weights_hash}) did not sample: {named}{more}",
            {"micro_batch_id": micro_batch.micro_batch_id, "vertex_ids": ",".join(others)},
        )


def _check_whole(
    meta: graph_pb2.VertexMeta,
    payload: graph_pb2.VertexPayload,
    micro_batch: graph_pb2.MicroBatch,
) -> None:
    count = len(payload.response_tokens)
    wrong = None
    if len(payload.logprobs) != count:
        wrong = f"{len(payload.logprobs)} log-probs for {count} sampled tokens"
    elif not math.isfinite(sum(payload.logprobs)):
        wrong = "a log-prob that is not finite"
    elif sum([run.num_tokens for run in meta.version_runs]) != count:
        wrong = f"its version runs do not add up to {count} sampled tokens"
    elif not payload.prompt_tokens:
        wrong = "no prompt token"
    elif not meta.HasField("advantage"):
        wrong = "no advantage: its group is not closed"
    elif not payload.temperature > 0:
        wrong = f"sampled at temperature {payload.temperature:g}, which cannot be trained on"
    if wrong is not None:
        raise _unfit(meta, wrong, micro_batch)


def _unfit(
    meta: graph_pb2.VertexMeta, wrong: str, micro_batch: graph_pb2.MicroBatch
) -> DomainError:
    return DomainError(
        ErrorReason.INVALID_ARGUMENT,
        f"{micro_batch.micro_batch_id}: row {meta.vertex_id}: {wrong}",
        {"micro_batch_id": micro_batch.micro_batch_id, "vertex_id": meta.vertex_id},
    )

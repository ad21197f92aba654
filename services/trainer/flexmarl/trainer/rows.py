"""Rows of a micro-batch: checked against what may be trained on, packed for the ranks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ledger import Counts

_MAX_NAMED = 5


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
        DomainError: WEIGHTS_MISMATCH, or INVALID_ARGUMENT for rows that are not whole, or none.
    """
    if not vertices:
        raise DomainError(
            ErrorReason.INVALID_ARGUMENT,
            f"{micro_batch.micro_batch_id} has no rows: record a micro-batch of at least one",
            {"micro_batch_id": micro_batch.micro_batch_id},
        )
    _refuse_others(vertices, micro_batch, version, weights_hash)
    for vertex in vertices:
        _check_whole(vertex.meta, vertex.payload, micro_batch)
    chains = _chains(vertices)
    merged = len(chains) < len(vertices)
    tokens, prompts, responses = array("i"), array("i"), array("i")
    advantages, temperatures, logprobs = array("d"), array("d"), array("d")
    sampled, token_advantages = bytearray(), array("d")
    rows = num_sampled = 0
    for chain in chains:
        first, last = chain[0].payload, chain[-1].payload
        tokens.extend(last.prompt_tokens)
        tokens.extend(last.response_tokens)
        prompts.append(len(first.prompt_tokens))
        length = len(last.prompt_tokens) + len(last.response_tokens) - len(first.prompt_tokens)
        responses.append(length)
        advantages.append(chain[-1].meta.advantage)
        temperatures.append(last.temperature)
        if merged:
            spans = _spans(chain, micro_batch)
            _lay(spans, length, logprobs, sampled, token_advantages)
        else:
            logprobs.extend(last.logprobs)
        num_sampled += sum(len(vertex.payload.response_tokens) for vertex in chain)
        rows += any(vertex.payload.response_tokens for vertex in chain)
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


def _chains(vertices: Sequence[graph_pb2.Vertex]) -> list[list[graph_pb2.Vertex]]:
    """Vertices by the rows that they make, each in the order of its turns."""
    chains: dict[str, list[graph_pb2.Vertex]] = {}
    for vertex in vertices:
        chains.setdefault(vertex.meta.merged_into or vertex.meta.vertex_id, []).append(vertex)
    for chain in chains.values():
        chain.sort(key=lambda vertex: len(vertex.payload.prompt_tokens))
    return list(chains.values())


def _spans(
    chain: Sequence[graph_pb2.Vertex], micro_batch: graph_pb2.MicroBatch
) -> list[tuple[int, graph_pb2.Vertex]]:
    """Where each turn's response begins, counted from the end of the first prompt.

    Raises:
        DomainError: INVALID_ARGUMENT, the last prompt does not begin with a turn of its chain.
    """
    begin, last = len(chain[0].payload.prompt_tokens), chain[-1].payload.prompt_tokens
    for vertex in chain[:-1]:
        turn = [*vertex.payload.prompt_tokens, *vertex.payload.response_tokens]
        if list(last[: len(turn)]) != turn:
            raise _unfit(
                vertex.meta, "the last turn of its chain does not go on from it", micro_batch
            )
    return [(len(vertex.payload.prompt_tokens) - begin, vertex) for vertex in chain]


def _lay(
    spans: Sequence[tuple[int, graph_pb2.Vertex]],
    length: int,
    logprobs: array[float],
    sampled: bytearray,
    advantages: array[float],
) -> None:
    """Appends the columns of one row; what stands between its turns has zeros and no mask."""
    row_logprobs, row_advantages = array("d", bytes(8 * length)), array("d", bytes(8 * length))
    mask = bytearray(length)
    for start, vertex in spans:
        count = len(vertex.payload.response_tokens)
        stop = start + count
        row_logprobs[start:stop] = array("d", vertex.payload.logprobs)
        row_advantages[start:stop] = array("d", [vertex.meta.advantage]) * count
        mask[start:stop] = b"\1" * count
    logprobs.extend(row_logprobs)
    advantages.extend(row_advantages)
    sampled.extend(mask)


def _refuse_others(
    vertices: Sequence[graph_pb2.Vertex],
    micro_batch: graph_pb2.MicroBatch,
    version: int,
    weights_hash: str,
) -> None:
    others = [
        vertex.meta.vertex_id
        for vertex in vertices
        if vertex.meta.policy != micro_batch.policy
        or vertex.meta.policy_version != version
        or vertex.meta.weights_hash != weights_hash
        or any(run.version != version for run in vertex.meta.version_runs)
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
    elif sum(run.num_tokens for run in meta.version_runs) != count:
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

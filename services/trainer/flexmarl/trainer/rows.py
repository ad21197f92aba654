"""Rows of a micro-batch: checked against what may be trained on, packed for the ranks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from flexmarl.api.meg_store.v1alpha1 import graph_pb2
from flexmarl.api.trainer.v1alpha1 import rank_pb2
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

    I4: every token of every row was sampled at `version` by the weights of `weights_hash`; rows of
    anything else are refused by name, and with them the micro-batch.

    Raises:
        DomainError: WEIGHTS_MISMATCH, or INVALID_ARGUMENT for rows that are not whole.
    """
    _refuse_others(vertices, micro_batch, version, weights_hash)
    tokens, prompts, responses = array("i"), array("i"), array("i")
    advantages, temperatures, logprobs = array("d"), array("d"), array("d")
    rows = 0
    for vertex in vertices:
        meta, payload = vertex.meta, vertex.payload
        response = payload.response_tokens
        _check_whole(meta, payload, micro_batch)
        tokens.extend(payload.prompt_tokens)
        tokens.extend(response)
        prompts.append(len(payload.prompt_tokens))
        responses.append(len(response))
        logprobs.extend(payload.logprobs)
        advantages.append(meta.advantage)
        temperatures.append(payload.temperature)
        rows += bool(response)
    command = rank_pb2.RankGradients(
        micro_batch_id=micro_batch.micro_batch_id,
        tokens=tokens.tobytes(),
        prompt_lengths=prompts.tobytes(),
        response_lengths=responses.tobytes(),
        advantages=advantages.tobytes(),
        temperatures=temperatures.tobytes(),
        logprobs=logprobs.tobytes(),
        num_updates=num_updates,
    )
    counts = Counts(num_rows=rows, num_tokens=len(logprobs))
    return PackedRows(command, counts, num_model_tokens=len(tokens))


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
        raise DomainError(
            ErrorReason.INVALID_ARGUMENT,
            f"{micro_batch.micro_batch_id}: row {meta.vertex_id}: {wrong}",
            {"micro_batch_id": micro_batch.micro_batch_id, "vertex_id": meta.vertex_id},
        )

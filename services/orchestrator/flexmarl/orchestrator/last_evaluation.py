"""The evaluation of a run's last version, which no later commit carries."""

from __future__ import annotations

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.api.orchestrator.v1 import orchestrator_pb2
from flexmarl.client.store import StoreClient
from flexmarl.core.evaluation import Evaluation
from flexmarl.core.training_rows import Row
from flexmarl.orchestrator.convert import DONE, row_of, sample_fact
from flexmarl.orchestrator.rules import rules_of
from flexmarl.runtime.run_config import RunConfig


def evaluation_report(evaluation: Evaluation) -> orchestrator_pb2.VersionReport:
    """The report of a version that has numbers of its evaluation alone."""
    record = graph_pb2.BatchRecord(batch=evaluation.version, metrics=evaluation.metrics())
    return orchestrator_pb2.VersionReport(version=evaluation.version, batch=record)


async def stored_evaluation(
    store: StoreClient, run_id: str, config: RunConfig, *, version: int
) -> orchestrator_pb2.VersionReport | None:
    """The same of a finished run, made anew of what is stored; None where nothing was evaluated."""
    samples = await store.list_samples(run_id, batch=version, evaluation=True)
    facts = [sample_fact(sample) for sample in samples]
    if not facts:
        return None
    attempt = max(fact.sample_id.group.batch.attempt for fact in facts)
    ids = [fact.sample_id.group for fact in facts]
    groups = {str(group_id) for group_id in ids if group_id.batch.attempt == attempt}
    rules = rules_of(config, trainers=(), num_held_out=len(groups)).evaluation
    evaluation = Evaluation(version, rules, facts, attempt=attempt)
    rows: dict[str, list[Row]] = {group_id: [] for group_id in sorted(groups)}
    chosen = pb.VertexFilter(batch=version, group_ids=rows, status=DONE)
    async for vertex in store.list_vertices(run_id, chosen):
        rows[vertex.meta.group_id].append(row_of(vertex.meta, shard=""))
    for group_id, found in rows.items():
        evaluation.rows_read(group_id, tuple(found))
    return evaluation_report(evaluation)

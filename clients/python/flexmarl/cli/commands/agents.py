"""`flexmarl agents`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.cli.cluster.folder import ClusterFolder
from flexmarl.cli.connect import with_run
from flexmarl.cli.output import print_json, print_table
from flexmarl.client.store import StoreClient

_COLUMNS: Final = (
    "agent", "policy", "calls", "share", "calls_per_sample", "max_per_sample", "in_degree",
    "max_in_degree", "out_degree", "max_out_degree", "queued_s", "running_s", "critical",
)  # fmt: skip


def agents(
    run_id: str, *, batch: int | None, data_dir: Path, cluster: Sequence[str], as_json: bool
) -> None:
    """Show statistics per agent.

    Raises:
        DomainError: No such run.
    """

    async def read(
        store: StoreClient, _folder: ClusterFolder, _run: graph_pb2.Run
    ) -> list[dict[str, Any]]:
        answer = await store.describe_agents(run_id, batch=batch)
        total = sum(agent.num_vertices for agent in answer.agents)
        return [_row(agent, answer.num_samples, total) for agent in answer.agents]

    rows = with_run(read, run_id, data_dir=data_dir, cluster=cluster)
    if as_json:
        print_json(rows)
    else:
        print_table(rows, _COLUMNS)


def _row(agent: pb.AgentStatistics, num_samples: int, total: int) -> dict[str, Any]:
    calls = agent.num_vertices
    return {
        "agent": agent.agent,
        "policy": agent.policy or None,
        "calls": calls,
        "share": calls / total,
        "samples": agent.num_samples,
        "calls_per_sample": calls / num_samples,
        "max_per_sample": agent.max_per_sample,
        "in_degree": agent.in_degree / calls,
        "max_in_degree": agent.max_in_degree,
        "out_degree": agent.out_degree / calls,
        "max_out_degree": agent.max_out_degree,
        "response_tokens": agent.num_response_tokens,
        "queued_s": agent.queued_ns / 1e9,
        "running_s": agent.running_ns / 1e9,
        "critical": agent.num_critical,
    }

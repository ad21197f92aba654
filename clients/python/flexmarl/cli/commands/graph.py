"""`flexmarl graph`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flexmarl.api.meg_store.v1 import graph_pb2, meg_store_pb2
from flexmarl.cli.cluster.folder import ClusterFolder
from flexmarl.cli.connect import with_run
from flexmarl.cli.errors import CliError
from flexmarl.cli.graph.draw import DRAWINGS
from flexmarl.cli.graph.tokens import TokenTexts
from flexmarl.cli.graph.view import SampleView, sample_view
from flexmarl.cli.output import print_line
from flexmarl.client.bundle import materialise
from flexmarl.client.store import StoreClient


def graph(
    run_id: str,
    sample_id: str,
    *,
    format_: str,
    critical_path: bool,
    around: str,
    hops: int,
    data_dir: Path,
    cluster: Sequence[str],
) -> None:
    """Draw a sample, or the neighbours of one of its calls.

    Raises:
        CliError: No such format.
        DomainError: No such run, sample or call.
    """
    if format_ not in DRAWINGS:
        raise CliError(f"--format {format_!r}: use one of {', '.join(DRAWINGS)}")

    async def read(store: StoreClient, folder: ClusterFolder, run: graph_pb2.Run) -> SampleView:
        answer = await store.get_sample_graph(
            run_id, sample_id, view=meg_store_pb2.VERTEX_VIEW_FULL, critical_path=critical_path
        )
        if around:
            vertex_id = f"{answer.sample.sample_id}/{around}"
            near = await store.get_neighbourhood(run_id, vertex_id, hops=hops)
            names = {vertex.meta.vertex_id for vertex in near}
            kept = [vertex for vertex in answer.vertices if vertex.meta.vertex_id in names]
            del answer.vertices[:]
            answer.vertices.extend(kept)
        return await _view(store, folder, run, answer)

    print_line(DRAWINGS[format_](with_run(read, run_id, data_dir=data_dir, cluster=cluster)))


async def _view(
    store: StoreClient,
    folder: ClusterFolder,
    run: graph_pb2.Run,
    answer: meg_store_pb2.GetSampleGraphResponse,
) -> SampleView:
    policies = {vertex.meta.policy for vertex in answer.vertices if vertex.meta.policy}
    models = {name: await materialise(store, run.models[name], folder.cache) for name in policies}
    return sample_view(
        answer.sample,
        answer.vertices,
        query_json=await _query_of(store, run.run_id, answer.sample),
        decode=TokenTexts(models),
        critical_path=answer.critical_path,
    )


async def _query_of(store: StoreClient, run_id: str, sample: graph_pb2.Sample) -> bytes:
    groups = await store.list_groups(run_id, batch=sample.batch)
    return next((group.query_json for group in groups if group.group_id == sample.group_id), b"")

"""A run's graph as tables that pandas, DuckDB and others read; see docs/trajectories.md."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.store import StoreClient
from flexmarl.client.trajectory_files import FORMATS, TableFile, check_format
from flexmarl.client.trajectory_rows import (
    Decode,
    Row,
    edge_rows,
    group_row,
    sample_row,
    vertex_row,
)
from flexmarl.client.trajectory_schema import TABLES
from flexmarl.core.errors import DomainError, ErrorReason

_ROWS_AT_A_TIME = 1000


@dataclass(slots=True)
class _Table:
    """Rows on their way into a file."""

    file: TableFile
    rows: list[Row] = field(default_factory=list)
    num_rows: int = 0

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if len(self.rows) >= _ROWS_AT_A_TIME:
            self.flush()

    def flush(self) -> None:
        self.file.write(self.rows)
        self.num_rows += len(self.rows)
        self.rows = []


async def export_trajectories(
    store: StoreClient,
    run_id: str,
    *,
    out: Path,
    format_: str,
    decode: Decode,
    batch: int | None = None,
) -> dict[str, int]:
    """Write the tables of a run, or of one of its batches; the folder appears whole or not at all.

    Args:
        store: Where the run is.
        run_id: Run.
        out: Folder to make.
        format_: "parquet" or "jsonl".
        decode: Makes texts of a policy's tokens.
        batch: Batch; None means all.

    Returns:
        Number of rows by table.

    Raises:
        DomainError: ALREADY_EXISTS for the folder, INVALID_ARGUMENT or NOT_BUILT for the format,
            RUN_NOT_FOUND.
    """
    check_format(format_)
    _refuse_existing(out)
    await store.get_run(run_id)
    with _folder(out) as building, ExitStack() as files:
        tables = {}
        for name, columns in TABLES.items():
            file = FORMATS[format_](building, name, columns)
            files.callback(file.close)
            tables[name] = _Table(file)
        await _fill(tables, store, run_id, batch=batch, decode=decode)
    return {name: table.num_rows for name, table in tables.items()}


def _refuse_existing(out: Path) -> None:
    if os.path.lexists(out):
        raise DomainError(ErrorReason.ALREADY_EXISTS, f"{out}: exists already; give another folder")


@contextmanager
def _folder(out: Path) -> Iterator[Path]:
    """A folder that takes its name once it is complete."""
    out.parent.mkdir(parents=True, exist_ok=True)
    building = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}")
    building.mkdir()
    try:
        yield building
        building.rename(out)
    finally:
        shutil.rmtree(building, ignore_errors=True)


async def _fill(
    tables: dict[str, _Table],
    store: StoreClient,
    run_id: str,
    *,
    batch: int | None,
    decode: Decode,
) -> None:
    for group in await store.list_groups(run_id, batch=batch):
        tables["groups"].add(group_row(run_id, group))
    for sample in await store.list_samples(run_id, batch=batch):
        tables["samples"].add(sample_row(run_id, sample))
    consumed = _consumed(await store.list_manifests(run_id))
    chosen = pb.VertexFilter(batch=batch)
    async for vertex in store.list_vertices(run_id, chosen, view=pb.VERTEX_VIEW_FULL):
        tables["vertices"].add(vertex_row(run_id, vertex, consumed=consumed, decode=decode))
        for row in edge_rows(run_id, vertex):
            tables["edges"].add(row)
    for table in tables.values():
        table.flush()


def _consumed(manifests: list[graph_pb2.Manifest]) -> dict[str, int]:
    return {
        name: manifest.version
        for manifest in manifests
        for name in manifest.batch.consumed_micro_batch_ids
    }

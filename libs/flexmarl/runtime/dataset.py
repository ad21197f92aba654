"""Reading queries: JSONL or Parquet, filtered, split, and checked whole before a sample runs.

Command line and Orchestrator read alike, so what is checked before a run is what it takes later.
Every complaint names the file and, where there is one, the line or column.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flexmarl.core.dataset_rows import RowFilter, first_overlap, is_held_out
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.row_limits import MAX_QUERY_BYTES
from flexmarl.runtime.run_config import RunConfig

_PARQUET_MAGIC = b"PAR1"


@dataclass(frozen=True, slots=True)
class Queries:
    """Queries, each as the JSON object that a workflow gets; held-out ones are not trained on."""

    training: Sequence[bytes] = ()
    held_out: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryFile:
    """A file of queries: what a person calls it, and what is in it."""

    name: str
    content: bytes


def read_queries(
    config: RunConfig, dataset: QueryFile, held_out: QueryFile | None = None
) -> Queries:
    """Reads and checks the queries of a run.

    Args:
        config: The run's configuration.
        dataset: Its dataset.
        held_out: Queries of the evaluation, where they are a file of their own.

    Raises:
        DomainError: DATASET_INVALID.
    """
    evaluation, fraction = config.evaluation, config.evaluation.fraction
    rows = [row for _, row in _rows(config, dataset)]
    tested: list[bytes] = []
    if evaluation.every and fraction is not None:
        seed = config.seed
        tested = [row for row in rows if is_held_out(row, seed=seed, fraction=fraction)]
        rows = [row for row in rows if not is_held_out(row, seed=seed, fraction=fraction)]
    elif evaluation.every and held_out is not None:
        tested = [row for _, row in _rows(config, held_out)]
        _refuse_overlap(rows, tested, dataset, held_out)
    rows = rows[: config.dataset.limit]
    tested = tested[: evaluation.limit]
    _check_sizes(config, dataset, rows, tested)
    return Queries(rows, tested)


def _refuse_overlap(
    rows: list[bytes], tested: list[bytes], dataset: QueryFile, held_out: QueryFile
) -> None:
    found = first_overlap(rows, tested)
    if found is not None:
        raise _invalid(
            held_out,
            f"its query {found[1] + 1} is query {found[0] + 1} of {dataset.name}, too: what is "
            "trained on cannot be held out; remove it from one of the two, or use "
            "evaluation.fraction",
        )


def _check_sizes(
    config: RunConfig, dataset: QueryFile, rows: list[bytes], tested: list[bytes]
) -> None:
    filtered = " that pass dataset.filters" if config.dataset.filters else ""
    limit = config.dataset.limit
    limited = "" if limit is None else f" (dataset.limit = {limit})"
    if not rows:
        raise _invalid(dataset, f"it has no rows{filtered}")
    if len(rows) < config.batch.groups:
        raise _invalid(
            dataset,
            f"it has only {len(rows)} rows{filtered}{limited}, fewer than batch.groups = "
            f"{config.batch.groups}; give more rows or lower batch.groups",
        )
    if config.evaluation.every and not tested:
        raise _invalid(dataset, "no query is left for the evaluation; hold out a larger share")


def _rows(config: RunConfig, file: QueryFile) -> Iterator[tuple[str, bytes]]:
    filters = [RowFilter(f.column, f.op, f.value) for f in config.dataset.filters]
    is_parquet = file.content.startswith(_PARQUET_MAGIC)
    columns = config.dataset.columns
    found = _parquet_rows(file, columns) if is_parquet else _json_rows(file)
    for place, row in found:
        try:
            kept = all(one.keeps(row) for one in filters)
        except ValueError as error:
            raise _invalid(file, f"{place}: {error}") from None
        if kept:
            yield place, _query(file, place, row, columns)


def _json_rows(file: QueryFile) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(file.content.splitlines(), start=1):
        if not line.strip():
            continue
        place = f"line {number}"
        try:
            row = json.loads(line, object_pairs_hook=_each_key_once)
        except _RepeatedKeyError as error:
            raise _invalid(
                file, f"{place} has the key {error.key!r} twice; which one counts is not known"
            ) from None
        except (ValueError, RecursionError) as error:  # bad JSON, not UTF-8, or nested endlessly
            raise _invalid(file, f"{place} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise _invalid(file, f"{place} is not a JSON object")
        yield place, row


class _RepeatedKeyError(Exception):
    """An object names a key twice: JSON readers keep either, and what is asked would differ."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _RepeatedKeyError(next(key for key in keys if keys.count(key) > 1))
    return found


def _parquet_rows(file: QueryFile, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet as pq
    except ImportError:
        raise _invalid(
            file, "it is a Parquet file, and pyarrow is not installed: flexmarl[orchestrator]"
        ) from None
    try:
        table = pq.read_table(io.BytesIO(file.content))
    except pyarrow.ArrowException as error:
        raise _invalid(file, f"it cannot be read as Parquet: {error}") from None
    _check_columns(file, "the file", table.column_names, columns)
    for number, row in enumerate(table.to_pylist(), start=1):
        yield f"row {number}", row


def _query(file: QueryFile, place: str, row: dict[str, Any], columns: Sequence[str]) -> bytes:
    _check_columns(file, place, list(row), columns)
    try:
        query = json.dumps(row, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise _invalid(file, f"{place} cannot be written as JSON: {error}") from None
    if len(query) > MAX_QUERY_BYTES:
        raise _invalid(
            file,
            f"{place} has {len(query)} bytes as JSON, and a query at most {MAX_QUERY_BYTES}: name "
            "a file in it that the workflow reads",
            place=place,
        )
    return query


def _check_columns(file: QueryFile, place: str, has: Sequence[str], wanted: Sequence[str]) -> None:
    for column in wanted:
        if column not in has:
            raise _invalid(
                file,
                f"{place} has no column {column!r} (dataset.columns); it has: "
                f"{', '.join(sorted(has)) or 'none'}",
                column=column,
                place=place,
            )


def _invalid(file: QueryFile, message: str, **metadata: str) -> DomainError:
    return DomainError(
        ErrorReason.DATASET_INVALID,
        f"dataset {file.name}: {message}",
        {"file": file.name, **metadata},
    )

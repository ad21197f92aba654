"""Reading the dataset: JSONL or Parquet, checked whole before the first sample runs.

Every complaint names the file and, where there is one, the line or column.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flexmarl.core.errors import DomainError, ErrorReason

_PARQUET_MAGIC = b"PAR1"


@dataclass(frozen=True, slots=True)
class Dataset:
    """Queries, each as the JSON object that a workflow gets."""

    queries: Sequence[bytes]

    def __len__(self) -> int:
        return len(self.queries)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRules:
    """What a dataset must look like.

    Attributes:
        name: File, for messages.
        columns: Columns that every row must have.
        limit: Use only the first rows.
        min_rows: Groups per batch: a batch must not hold one query twice.
    """

    name: str
    columns: tuple[str, ...] = ()
    limit: int | None = None
    min_rows: int = 1


def read_dataset(content: bytes, rules: DatasetRules) -> Dataset:
    """Reads and checks a dataset.

    Raises:
        DomainError: DATASET_INVALID.
    """
    is_parquet = content.startswith(_PARQUET_MAGIC)
    rows = _parquet_rows(content, rules) if is_parquet else _json_rows(content, rules)
    queries = [_query(place, row, rules) for place, row in _first(rows, rules.limit)]
    if not queries:
        raise _invalid(rules, "it has no rows")
    if len(queries) < rules.min_rows:
        raise _invalid(
            rules,
            f"it has {len(queries)} row(s), fewer than batch.groups = {rules.min_rows}; "
            "add rows or make the batch smaller",
        )
    return Dataset(queries)


def _first(
    rows: Iterable[tuple[str, dict[str, Any]]], limit: int | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    for count, row in enumerate(rows):
        if count == limit:
            return
        yield row


def _json_rows(content: bytes, rules: DatasetRules) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        place = f"line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:  # bad JSON, or not UTF-8
            raise _invalid(rules, f"{place} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise _invalid(rules, f"{place} is not a JSON object")
        yield place, row


def _parquet_rows(content: bytes, rules: DatasetRules) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet as pq
    except ImportError:
        raise _invalid(
            rules, "it is a Parquet file, and pyarrow is not installed: flexmarl[orchestrator]"
        ) from None
    try:
        table = pq.read_table(io.BytesIO(content))
    except pyarrow.ArrowException as error:
        raise _invalid(rules, f"it cannot be read as Parquet: {error}") from None
    missing = [column for column in rules.columns if column not in table.column_names]
    if missing:
        raise _missing(rules, missing[0], "the file")
    for number, row in enumerate(table.to_pylist(), start=1):
        yield f"row {number}", row


def _query(place: str, row: dict[str, Any], rules: DatasetRules) -> bytes:
    for column in rules.columns:
        if column not in row:
            raise _missing(rules, column, place)
    try:
        text = json.dumps(row, allow_nan=False, separators=(",", ":"))
        return text.encode()
    except (TypeError, ValueError) as error:
        raise _invalid(rules, f"{place} cannot be written as JSON: {error}") from None


def _missing(rules: DatasetRules, column: str, place: str) -> DomainError:
    return _invalid(
        rules, f"{place} lacks column {column!r} (dataset.columns)", column=column, place=place
    )


def _invalid(rules: DatasetRules, message: str, **metadata: str) -> DomainError:
    return DomainError(
        ErrorReason.DATASET_INVALID,
        f"dataset {rules.name}: {message}",
        {"file": rules.name, **metadata},
    )

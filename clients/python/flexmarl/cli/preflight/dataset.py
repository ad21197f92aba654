"""Is the dataset one that a run can sample from?

Every row is looked at: a missing column in row 90,000 would otherwise end the run hours later.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from flexmarl.cli.errors import CliError
from flexmarl.runtime.run_config import RunConfig

_PARQUET_MAGIC: Final = b"PAR1"


def check_dataset(config: RunConfig) -> int:
    """Returns the number of rows that the run uses.

    Raises:
        CliError: The file is missing, broken, empty, smaller than a batch, or lacks a column.
    """
    dataset = config.dataset
    path = dataset.path
    if not path.is_file():
        raise CliError(f"dataset.path: no file {path}")
    count = 0
    for place, row in _rows(path):
        missing = [name for name in dataset.columns if name not in row]
        if missing:
            has = ", ".join(sorted(row)) or "none"
            raise CliError(
                f"dataset.columns: {path}, {place}: no column {missing[0]!r}; it has: {has}"
            )
        count += 1
        if dataset.limit is not None and count >= dataset.limit:
            break
    if count == 0:
        raise CliError(f"dataset.path: {path} has no rows")
    if count < config.batch.groups:
        limit = "" if dataset.limit is None else f" (dataset.limit = {dataset.limit})"
        raise CliError(
            f"batch.groups = {config.batch.groups}, but {path} has only {count} rows{limit}; "
            "give more rows or lower batch.groups"
        )
    return count


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as file:
        is_parquet = file.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC
    return _parquet_rows(path) if is_parquet else _jsonl_rows(path)


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise CliError(f"dataset.path: {path}, line {number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise CliError(f"dataset.path: {path}, line {number}: not a JSON object")
            yield f"line {number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise CliError(
            f"dataset.path: {path}: Parquet needs pyarrow; install flexmarl[train]"
        ) from None
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise CliError(f"dataset.path: {path}: not a Parquet file: {error}") from None
    # The schema holds for every row, so names are enough.
    row = dict.fromkeys(file.schema_arrow.names)
    for number in range(1, file.metadata.num_rows + 1):
        yield f"row {number}", row

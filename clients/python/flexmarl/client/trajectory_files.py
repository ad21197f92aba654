"""Files of exported tables: Parquet, or one JSON object a line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flexmarl.client.trajectory_rows import Row
from flexmarl.client.trajectory_schema import ColumnKind, TrajectoryColumn
from flexmarl.core.errors import DomainError, ErrorReason

if TYPE_CHECKING:
    import pyarrow as pa


class TableFile(Protocol):
    """One table that is being written."""

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows."""
        ...

    def close(self) -> None:
        """Finish the file."""
        ...


class JsonLines:
    """One object a line; a map is an object, and a number that is not finite is null."""

    def __init__(self, folder: Path, name: str, _: Sequence[TrajectoryColumn]) -> None:
        self._file = (folder / f"{name}.jsonl").open("w", encoding="utf-8")

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows."""
        for row in rows:
            self._file.write(json.dumps(_finite(row), ensure_ascii=False, allow_nan=False) + "\n")

    def close(self) -> None:
        """Finish the file."""
        self._file.close()


class Parquet:
    """One row group per call; needs pyarrow."""

    def __init__(self, folder: Path, name: str, columns: Sequence[TrajectoryColumn]) -> None:
        import pyarrow.parquet as pq

        self._schema = _arrow_schema(columns)
        self._maps = [c.name for c in columns if c.kind is ColumnKind.BY_NAME]
        self._writer = pq.ParquetWriter(folder / f"{name}.parquet", self._schema)

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows."""
        import pyarrow as pa

        if rows:
            # A map is given to Arrow as its pairs.
            given = [
                {**row, **{name: sorted(row[name].items()) for name in self._maps}} for row in rows
            ]
            self._writer.write_table(pa.Table.from_pylist(given, schema=self._schema))

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()


FORMATS: Mapping[str, type[JsonLines] | type[Parquet]] = {"parquet": Parquet, "jsonl": JsonLines}
"""Files by the name of their format."""


def check_format(name: str) -> None:
    """Refuses a format that cannot be written here.

    Raises:
        DomainError: INVALID_ARGUMENT for an unknown one, NOT_BUILT where pyarrow is missing.
    """
    if name not in FORMATS:
        raise DomainError(
            ErrorReason.INVALID_ARGUMENT, f"format {name!r}: use one of {', '.join(FORMATS)}"
        )
    if name == "parquet":
        try:
            import pyarrow as _  # noqa: F401 - only whether it is there
        except ImportError:
            raise DomainError(
                ErrorReason.NOT_BUILT,
                "format 'parquet' needs pyarrow: pip install pyarrow, or use --format jsonl",
            ) from None


def _arrow_schema(columns: Sequence[TrajectoryColumn]) -> pa.Schema:
    import pyarrow as pa

    types = {
        ColumnKind.TEXT: pa.string(),
        ColumnKind.INTEGER: pa.int64(),
        ColumnKind.NUMBER: pa.float64(),
        ColumnKind.FLAG: pa.bool_(),
        ColumnKind.TOKENS: pa.list_(pa.uint32()),
        ColumnKind.NUMBERS: pa.list_(pa.float64()),
        ColumnKind.BY_NAME: pa.map_(pa.string(), pa.float64()),
    }
    return pa.schema([(column.name, types[column.kind]) for column in columns])


def _finite(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value

"""Declared columns: what a run declares, and what a value must look like."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ids import check_name

BUILT_IN: Final = frozenset(
    ("prompt_tokens", "response_tokens", "logprobs", "output", "tool_input")
)
"""Data columns that every vertex table has."""

MAX_STRING_BYTES: Final = 4096
"""Longer strings are objects."""

_FIELD_OF_TYPE: Final[Mapping[int, str]] = MappingProxyType(
    {
        graph_pb2.COLUMN_TYPE_INT: "int_value",
        graph_pb2.COLUMN_TYPE_FLOAT: "float_value",
        graph_pb2.COLUMN_TYPE_BOOL: "bool_value",
        graph_pb2.COLUMN_TYPE_STRING: "string_value",
        graph_pb2.COLUMN_TYPE_OBJECT: "object_value",
    }
)


def check_columns(columns: Iterable[graph_pb2.Column]) -> None:
    """Checks the columns that a run declares.

    Raises:
        ValueError: A name is malformed, built in or given twice, or a type is missing or unknown.
    """
    seen: set[str] = set(BUILT_IN)
    for column in columns:
        name = check_name(column.name, what="column")
        if name in seen:
            raise ValueError(f"run.columns: column {name!r} is built in or declared twice")
        if column.type not in _FIELD_OF_TYPE:
            raise ValueError(f"run.columns: column {name!r} has no known type")
        seen.add(name)


def check_values(
    vertex_id: str, values: Mapping[str, graph_pb2.ColumnValue], declared: Mapping[str, int]
) -> list[str]:
    """Checks values against the declaration.

    Returns:
        Keys of the objects that they refer to.

    Raises:
        DomainError: MESSAGE_TOO_LARGE for a string.
        ValueError: A column is not declared, or its value is of another type.
    """
    objects: list[str] = []
    for name, value in values.items():
        expected = _FIELD_OF_TYPE.get(declared.get(name, 0))
        if expected is None:
            raise ValueError(f"vertex {vertex_id!r}: the run declares no column {name!r}")
        if value.WhichOneof("value") != expected:
            raise ValueError(f"vertex {vertex_id!r}: column {name!r} takes {expected}")
        if expected == "object_value":
            objects.append(value.object_value.key)
        elif expected == "string_value" and len(value.string_value.encode()) > MAX_STRING_BYTES:
            raise DomainError(
                ErrorReason.MESSAGE_TOO_LARGE,
                f"vertex {vertex_id!r}: column {name!r} takes strings of at most "
                f"{MAX_STRING_BYTES} bytes; declare it as an object",
                {"vertex": vertex_id, "column": name},
            )
    return objects


def check_ready(
    meta: graph_pb2.VertexMeta, values: Collection[str], declared: Mapping[str, int]
) -> None:
    """Checks the names of ready columns; declared ones with a value are added to them.

    Raises:
        ValueError: A name is not a column, or is a declared one without a value.
    """
    ready = meta.ready_columns
    if not values and (not ready or _all_built_in(tuple(ready))):
        return
    given = set(values)
    for name in ready:
        if name not in BUILT_IN and name not in given:
            what = "has no value" if name in declared else "is not declared"
            raise ValueError(f"vertex {meta.vertex_id!r}: ready column {name!r} {what}")
    ready.extend(sorted(given - set(ready)))


@lru_cache(maxsize=256)
def _all_built_in(names: tuple[str, ...]) -> bool:
    return BUILT_IN.issuperset(names)

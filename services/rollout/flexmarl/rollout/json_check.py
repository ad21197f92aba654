"""Is a value what a JSON Schema describes? The common keywords; an unknown one is an error.

A keyword that is silently passed over would let everything through, so a schema is read once, and
whatever it holds beyond these keywords is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

_TYPES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: _is_number(v) and (isinstance(v, int) or v.is_integer()),
    "number": lambda v: _is_number(v),
    "string": lambda v: isinstance(v, str),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}
_NOTES: Final = frozenset({"$schema", "$id", "title", "description", "default", "examples"})


def check_schema(schema: Any, *, where: str = "schema") -> None:  # noqa: ANN401 - the user's
    """Refuses a schema that `conforms` cannot decide by.

    Raises:
        ValueError: Names the place and the keyword.
        TypeError: A part is no schema.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise TypeError(f"{where}: a schema is an object or a boolean")
    unknown = sorted(schema.keys() - _KEYWORDS.keys() - _NOTES)
    if unknown:
        known = ", ".join(sorted(_KEYWORDS))
        raise ValueError(f"{where}: keyword {unknown[0]!r} is not built; there are: {known}")
    types = schema.get("type", [])
    for name in [types] if isinstance(types, str) else types:
        if name not in _TYPES:
            raise ValueError(f"{where}.type: no type {name!r}")
    for name, part in schema.get("properties", {}).items():
        check_schema(part, where=f"{where}.properties.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            check_schema(schema[key], where=f"{where}.{key}")
    for key in ("anyOf", "allOf"):
        for place, part in enumerate(schema.get(key, [])):
            check_schema(part, where=f"{where}.{key}[{place}]")


def conforms(value: Any, schema: Any) -> bool:  # noqa: ANN401
    """Whether a value is what a (checked) schema describes."""
    if isinstance(schema, bool):
        return schema
    return all(
        _KEYWORDS[key](value, wanted, schema) for key, wanted in schema.items() if key not in _NOTES
    )


def _is_number(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _same(left: Any, right: Any) -> bool:  # noqa: ANN401
    # JSON tells true from 1, Python does not.
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def _type(value: Any, wanted: Any, _: Any) -> bool:  # noqa: ANN401
    names = [wanted] if isinstance(wanted, str) else wanted
    return any(_TYPES[name](value) for name in names)


def _properties(value: Any, wanted: Any, _: Any) -> bool:  # noqa: ANN401
    if not isinstance(value, dict):
        return True
    return all(conforms(value[name], part) for name, part in wanted.items() if name in value)


def _additional(value: Any, wanted: Any, schema: Any) -> bool:  # noqa: ANN401
    if not isinstance(value, dict):
        return True
    named = schema.get("properties", {})
    return all(conforms(item, wanted) for name, item in value.items() if name not in named)


def _required(value: Any, wanted: Any, _: Any) -> bool:  # noqa: ANN401
    return not isinstance(value, dict) or all(name in value for name in wanted)


def _items(value: Any, wanted: Any, _: Any) -> bool:  # noqa: ANN401
    return not isinstance(value, list) or all(conforms(item, wanted) for item in value)


def _pattern(value: Any, wanted: Any, _: Any) -> bool:  # noqa: ANN401
    return not isinstance(value, str) or re.search(wanted, value) is not None


def _bound(of: Callable[[Any], Any], holds: Callable[[Any, Any], bool]) -> Callable[..., bool]:
    def check(value: Any, wanted: Any, _: Any) -> bool:  # noqa: ANN401
        measured = of(value)
        return measured is None or holds(measured, wanted)

    return check


def _number(value: Any) -> Any:  # noqa: ANN401
    return value if _is_number(value) else None


def _length(value: Any) -> int | None:  # noqa: ANN401
    return len(value) if isinstance(value, str) else None


def _count(value: Any) -> int | None:  # noqa: ANN401
    return len(value) if isinstance(value, list) else None


def _at_least(value: Any, bound: Any) -> bool:  # noqa: ANN401
    return bool(value >= bound)


def _at_most(value: Any, bound: Any) -> bool:  # noqa: ANN401
    return bool(value <= bound)


_KEYWORDS: Final[Mapping[str, Callable[[Any, Any, Any], bool]]] = {
    "type": _type,
    "enum": lambda value, wanted, _: any(_same(value, item) for item in wanted),
    "const": lambda value, wanted, _: _same(value, wanted),
    "properties": _properties,
    "additionalProperties": _additional,
    "required": _required,
    "items": _items,
    "pattern": _pattern,
    "minimum": _bound(_number, _at_least),
    "maximum": _bound(_number, _at_most),
    "minLength": _bound(_length, _at_least),
    "maxLength": _bound(_length, _at_most),
    "minItems": _bound(_count, _at_least),
    "maxItems": _bound(_count, _at_most),
    "anyOf": lambda value, wanted, _: any(conforms(value, part) for part in wanted),
    "allOf": lambda value, wanted, _: all(conforms(value, part) for part in wanted),
}

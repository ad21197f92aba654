"""The little TOML that service configurations need: sections of plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

Value = str | int | float | bool | Path | Sequence[str] | Mapping[str, "Value"]


def dump_toml(values: Mapping[str, Value], *, section: str = "") -> str:
    """TOML text of nested mappings; values first, then the sections."""
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    lines = [f"[{section}]"] if section and plain else []
    lines += [f"{key} = {_value(value)}" for key, value in plain.items()]
    text = "".join(f"{line}\n" for line in lines)
    for key, value in values.items():
        if isinstance(value, Mapping):
            text += dump_toml(value, section=f"{section}.{key}" if section else key)
    return text


def _value(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, Path)):
        # A JSON string is a TOML basic string as long as nothing is escaped as a surrogate pair.
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, (int, float)):
        return repr(value)
    return "[" + ", ".join(_value(item) for item in value) + "]"

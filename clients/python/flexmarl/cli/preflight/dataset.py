"""The queries of a run: where they are read from, and whether a run can sample from them.

Every row is looked at: a missing column in row 90,000 would otherwise end the run hours later.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from flexmarl.cli.errors import CliError
from flexmarl.core.errors import DomainError
from flexmarl.runtime.dataset import Queries, QueryFile, read_queries
from flexmarl.runtime.run_config import RunConfig

_SAVED: Final = ("dataset_dict.json", "dataset_info.json", "state.json")


def check_dataset(config: RunConfig) -> Queries:
    """Returns the queries that the run uses.

    Raises:
        CliError: There is no such file or folder, it cannot be read, or it is not what a run needs:
            broken, too small, a missing column, an overlap.
    """
    try:
        return _read(config)
    except DomainError as error:
        raise CliError(error.message) from None


def _read(config: RunConfig) -> Queries:
    dataset = QueryFile(name=str(config.dataset.path), content=dataset_content(config))
    held_out = held_out_content(config)
    if held_out is None:
        return read_queries(config, dataset)
    name = str(config.evaluation.path or config.dataset.path)
    return read_queries(config, dataset, QueryFile(name=name, content=held_out))


def dataset_content(config: RunConfig) -> bytes:
    """The dataset as it is stored with the run: the file, or a split of a folder as JSONL.

    Raises:
        CliError: See `check_dataset`.
    """
    return _content(config.dataset.path, config.dataset.split, key="dataset")


def held_out_content(config: RunConfig) -> bytes | None:
    """The same of the evaluation; None where it has no queries of its own.

    Raises:
        CliError: See `check_dataset`.
    """
    evaluation = config.evaluation
    if not evaluation.every or evaluation.fraction is not None:
        return None
    path = evaluation.path or config.dataset.path
    return _content(path, evaluation.split or config.dataset.split, key="evaluation")


def _content(path: Path, split: str, *, key: str) -> bytes:
    if path.is_dir():
        return _folder_content(path, split, key=key)
    if not path.is_file():
        raise CliError(f"{key}.path: no file {path}")
    return path.read_bytes()


def _folder_content(path: Path, split: str, *, key: str) -> bytes:
    try:
        import datasets  # pyright: ignore[reportMissingImports] - optional
    except ImportError:
        raise CliError(
            f"{key}.path: {path} is a folder, which Hugging Face datasets reads: pip install "
            "datasets, or name a JSONL or Parquet file"
        ) from None
    try:
        if any((path / name).is_file() for name in _SAVED):
            loaded: Any = datasets.load_from_disk(str(path))
        else:
            # Streamed: its cache would be a second copy of files that are here.
            loaded = datasets.load_dataset(str(path), streaming=True)
    except (OSError, ValueError) as error:
        raise CliError(f"{key}.path: {path}: datasets cannot read it: {error}") from None
    if isinstance(loaded, dict):
        if split not in loaded:
            known = ", ".join(sorted(loaded)) or "none"
            raise CliError(f"{key}.split: {path} has no split {split!r}; it has: {known}")
        loaded = loaded[split]
    # Values that JSON cannot hold are told with their row by whoever reads the lines.
    return b"".join(json.dumps(row, default=repr).encode() + b"\n" for row in loaded)

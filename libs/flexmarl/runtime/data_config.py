"""Queries of a run and the batches that are made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from flexmarl.runtime.config_section import Section


class FilterConfig(Section):
    """Rows to keep: those whose column compares so with the value."""

    column: str
    """Column; a row without it is left out."""
    op: Literal["==", "!=", "<", "<=", ">", ">=", "in", "not in"] = "=="
    """Comparison; with "in" and "not in" the value is a list."""
    value: str | int | float | bool | list[str | int | float | bool]
    """What it is compared with."""

    @model_validator(mode="after")
    def _list_where_needed(self) -> FilterConfig:
        if (self.op in ("in", "not in")) != isinstance(self.value, list):
            raise ValueError(f'op = "{self.op}" with value = {self.value!r}: "in" takes a list')
        return self


class DatasetConfig(Section):
    """The queries."""

    path: Path
    """JSONL or Parquet file, or a folder that Hugging Face `datasets` reads; relative to the
    config."""
    split: str = "train"
    """Split of a Hugging Face folder; a file has none."""
    filters: tuple[FilterConfig, ...] = ()
    """Rows must pass all of them."""
    epochs: Annotated[int, Field(ge=1)] | None = None
    """Most passes over the rows; the run ends there, though `versions` be more."""
    columns: tuple[str, ...] = ()
    """Columns that every row must have; named in the error when one is missing."""
    shuffle: bool = True
    """Shuffle each pass by the run's seed."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Use only the first rows that pass the filters."""


class EvaluationConfig(Section):
    """Held-out queries, sampled at every k-th version and never trained on."""

    every: Annotated[int, Field(ge=0)] = 0
    """Versions from one evaluation to the next; the last version is always one. 0: never."""
    path: Path | None = None
    """File or folder of the queries; unset: the dataset's."""
    split: str | None = None
    """Split of a Hugging Face folder."""
    fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the dataset's rows that is held out, chosen by seed and content."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Use only the first rows."""
    greedy: bool = True
    """Draw one sample of each query from the most likely tokens."""
    samples: Annotated[int, Field(ge=0)] = 1
    """Samples of each query that are drawn as in training."""

    @model_validator(mode="after")
    def _has_queries(self) -> EvaluationConfig:
        if not self.every:
            return self
        if not self.greedy and not self.samples:
            raise ValueError("greedy = false and samples = 0: nothing would be sampled")
        other = self.path is not None or self.split is not None
        if other == (self.fraction is not None):
            raise ValueError(
                "set fraction, or path and split of the held-out queries: one of the two"
            )
        return self


class BatchConfig(Section):
    """Size of a batch and what happens when parts of it fail."""

    groups: Annotated[int, Field(ge=1)]
    """Queries per batch (B)."""
    samples_per_group: Annotated[int, Field(ge=1)]
    """Samples per query (G)."""
    redundant_samples: Annotated[int, Field(ge=0)] = 0
    """Further samples per query: its group closes when G are done, and the slowest are cut. Short
    answers are then a little more likely to be trained on than long ones."""
    staleness: Annotated[int, Field(ge=0)] = 0
    """Versions that a token may be older than its trainer; only 0 is built."""
    on_sample_failure: Literal["refill", "drop_sample", "drop_group", "fail"] = "refill"
    """What a failed sample does to its group."""
    refill_max: Annotated[int, Field(ge=0)] = 2
    """Most samples added to one group in place of failed ones."""
    replace_max: Annotated[int, Field(ge=0)] = 4
    """Most groups added to one batch in place of dropped ones."""
    on_replace_exhausted: Literal["smaller", "fail"] = "smaller"
    """What happens when no further group may be added."""
    filter_zero_variance: bool = False
    """Drop groups whose samples all have the same reward."""

    @field_validator("staleness")
    @classmethod
    def _only_on_policy(cls, value: int) -> int:
        if value:
            raise ValueError("staleness above 0 is not built yet; use 0")
        return value

"""A table of a run's configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One table: unknown keys are refused, values do not change, docstrings describe fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

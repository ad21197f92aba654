"""A table of a configuration, a run's or a service's."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

MOST: Final = (1 << 31) - 1
"""Largest number of things: contracts have 32 bits for them."""

Count = Annotated[int, Field(ge=1, le=MOST)]
"""How many of something, at least one."""


class Section(BaseModel):
    """One table: unknown keys are refused, values do not change, docstrings describe fields."""

    # Without bound is no number: JSON, as which a run's config is stored, has none for it.
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

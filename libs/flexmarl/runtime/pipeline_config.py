"""How a run shares devices: calls among instances, slots among policies, both in a step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from flexmarl.core.balance import BalanceConfig
from flexmarl.runtime.config_section import Section


class BalanceSection(Section):
    """Moving inference instances between policies."""

    rule: Literal["drain_time", "queue_gap", "off"] = "drain_time"
    """Move when the longest time to drain a queue, or the rest of a batch, falls by more than the
    move costs; when queues differ by more than `queue_gap`; or never."""
    interval_s: Annotated[float, Field(gt=0)] = 0.1
    """Time between two looks at the queues."""
    queue_gap: Annotated[int, Field(ge=0)] = 5
    """Waiting calls by which two queues must differ, for the rule of that name."""
    gain_margin: Annotated[float, Field(ge=0)] = 0.5
    """Share of its cost that a move must gain beyond its cost, for `drain_time`."""
    residence_s: Annotated[float, Field(ge=0)] = 2.0
    """A policy that received an instance gives none away for so long."""
    confirm: Annotated[int, Field(ge=1)] = 2
    """Looks in a row that must agree on a move."""
    forecast: bool = True
    """After a batch move instances to where the next one is expected to need them."""

    def decisions(self) -> BalanceConfig:
        """Returns the numbers of the rule."""
        return BalanceConfig(
            rule=self.rule,
            queue_gap=self.queue_gap,
            gain_margin=self.gain_margin,
            residence_s=self.residence_s,
            confirm=self.confirm,
        )


class RolloutSection(Section):
    """How queries are worked on in parallel."""

    max_concurrent_queries: Annotated[int, Field(ge=1)] | None = None
    """Most groups in progress at once; unset means all, as far as the workers have room."""
    max_concurrent_samples_per_query: Annotated[int, Field(ge=1)] | None = None
    """Most samples of one group in progress at once; unset means all of them."""
    balance: BalanceSection = BalanceSection()
    """Moving inference instances between policies."""


class TrainerPoolConfig(Section):
    """Devices for training."""

    slots: Annotated[int, Field(ge=1)] = 1
    """Device slots that `flexmarl train` gives its local trainer."""
    min_residence_s: Annotated[float, Field(ge=0)] = 0.0
    """A bound policy that still has rows keeps its slots at least this long."""
    ledger_every_s: Annotated[float, Field(gt=0)] = 30.0
    """Longest time that computed gradients stay unsaved."""
    prefetch_from_s: Annotated[float, Field(ge=0)] = 0.2
    """State of the policy that gets slots next is loaded ahead, beside what they compute now, where
    binding it takes this long: a hint costs its calls whatever it loads."""


class PipelineConfig(Section):
    """How rollout and training share a step."""

    overlap: bool = True
    """Train groups as they close; false: when the whole batch is there."""
    allocation: Literal["on_demand", "static"] = "on_demand"
    """Slots go where work is, or each trained policy keeps slots of its own for the whole run."""
    colocated: bool = False
    """Rollout and training take turns on the same devices: nothing is bound while samples run, and
    training starts when the whole batch is there."""

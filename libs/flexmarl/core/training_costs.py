"""How long training work takes on devices that are not there: the model of the simulated backend.

Seconds are emulated ones; whoever carries the times out scales them. The rules: a micro-batch on k
units takes tokens / (rate x k x efficiency^(k - 1)); a unit that takes a policy first moves out the
one that it held, if that was another, then moves the new one in, and neither is divided by k; an
update and a publication cost once per policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flexmarl.core.errors import DomainError, ErrorReason


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCosts:
    """One policy's size and speed.

    Attributes:
        params_b: Parameters in billions; swaps, updates and publications cost per billion.
        tokens_per_s: Prompt and response tokens that one unit trains per emulated second.
    """

    params_b: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCosts:
    """The model; every `_s_per_b` is emulated seconds per billion parameters.

    Attributes:
        policies: By name.
        scaling_efficiency: Share of its speed that a unit keeps per further unit beside it.
    """

    policies: Mapping[str, PolicyCosts]
    scaling_efficiency: float
    swap_out_s_per_b: float
    swap_in_s_per_b: float
    apply_s_per_b: float
    publish_s_per_b: float

    def gradients_s(self, policy: str, *, num_tokens: int, num_units: int) -> float:
        """Returns the seconds of one micro-batch."""
        speedup = num_units * self.scaling_efficiency ** (num_units - 1)
        return num_tokens / (self._costs(policy).tokens_per_s * speedup)

    def take_s(self, policy: str, *, held: str | None) -> float:
        """Returns the seconds until a unit has the policy that held another, or none, before."""
        out_s = 0.0 if held is None else self.swap_out_s_per_b * self._costs(held).params_b
        return out_s + self.swap_in_s_per_b * self._costs(policy).params_b

    def apply_s(self, policy: str) -> float:
        """Returns the seconds of an update, publication left aside."""
        return self.apply_s_per_b * self._costs(policy).params_b

    def publish_s(self, policy: str) -> float:
        """Returns the seconds that publishing weights takes the trainer."""
        return self.publish_s_per_b * self._costs(policy).params_b

    def _costs(self, policy: str) -> PolicyCosts:
        costs = self.policies.get(policy)
        if costs is None:
            known = ", ".join(sorted(self.policies)) or "none"
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT,
                f"no simulated costs for policy {policy!r}; there are some for: {known}",
                {"policy": policy},
            )
        return costs

"""What a reward function returned, checked and brought into one form."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from typing import Any, Final

from flexmarl.api.meg_store.v1.graph_pb2 import RewardSet
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.training_rows import MAX_REWARD, is_usable
from flexmarl.rollout.workflow import FinishedSample, Output, Rewards

MAX_REWARD_BYTES: Final = 512 << 10
"""Most that the rewards of one sample take: they are in its row, beside its output."""


def to_reward_set(
    returned: Any,  # noqa: ANN401 - whatever the user's function returns
    *,
    sample: FinishedSample,
    agents: Collection[str],
    what: str,
) -> RewardSet:
    """The stored form of what a reward function returned.

    Args:
        returned: A number (the team's), a dict (per agent), a list (per call, in their order), or
            `Rewards`.
        sample: The sample it was given.
        agents: Names of the run's agents.
        what: Names the function, such as "reward team:reward".

    Raises:
        DomainError: REWARD_INVALID; names the value and the entry.
    """
    check = _Checker(what=what, agents=agents, sample=sample)
    rewards = _reward_set(returned, check)
    if (size_bytes := rewards.ByteSize()) > MAX_REWARD_BYTES:
        raise check.invalid(f"{size_bytes} bytes of rewards, more than {MAX_REWARD_BYTES}")
    return rewards


def _reward_set(returned: Any, check: _Checker) -> RewardSet:  # noqa: ANN401
    if isinstance(returned, Rewards):
        return RewardSet(
            team=None if returned.team is None else check.number(returned.team, "the team"),
            agents=check.agents(returned.agents),
            vertices=check.vertices(returned.vertices),
            metrics=check.metrics(returned.metrics),
        )
    if isinstance(returned, Mapping):
        return RewardSet(agents=check.agents(returned))
    if isinstance(returned, Sequence) and not isinstance(returned, (str, bytes)):
        return RewardSet(vertices=check.in_order(returned))
    return RewardSet(team=check.number(returned, "the team"))


class _Checker:
    """Checks the parts of one return value."""

    def __init__(self, *, what: str, agents: Collection[str], sample: FinishedSample) -> None:
        self._what = what
        self._agents = agents
        self._calls = {call.vertex_id for call in sample.calls}
        self._sample = sample

    def number(self, value: Any, whose: str) -> float:  # noqa: ANN401
        """A usable number; whatever floats easily (bool, NumPy and torch scalars) is one."""
        scalar = hasattr(value, "item") and getattr(value, "ndim", 1) == 0
        if not isinstance(value, Real) and not scalar:
            raise self.invalid(
                f"for {whose} {type(value).__name__} ({_short(value)}), not a number"
            )
        try:
            number = float(value if isinstance(value, Real) else value.item())
        except (OverflowError, TypeError, ValueError) as error:
            raise self.invalid(f"for {whose} {_short(value)}, not a number: {error}") from None
        if not is_usable(number):
            raise self.invalid(
                f"for {whose} {number}, not a finite number of at most {MAX_REWARD:g}"
            )
        return number

    def agents(self, rewards: Mapping[Any, Any]) -> dict[str, float]:
        """Rewards per agent."""
        for name in rewards:
            if name not in self._agents:
                known = ", ".join(sorted(self._agents))
                raise self.invalid(f"for agent {name!r}, which is none of the run's: {known}")
        return {
            name: self.number(value, f"agent {name!r}")
            for name, value in rewards.items()
            if value is not None
        }

    def vertices(self, rewards: Mapping[Any, Any]) -> dict[str, float]:
        """Rewards per call."""
        found: dict[str, float] = {}
        for key, value in rewards.items():
            vertex_id = key.vertex_id if isinstance(key, Output) else key
            if vertex_id not in self._calls:
                raise self.invalid(
                    f"for vertex {_short(vertex_id)}, no finished call of the sample"
                )
            found[vertex_id] = self.number(value, f"vertex {vertex_id}")
        return found

    def metrics(self, numbers: Mapping[Any, Any]) -> dict[str, float]:
        """Further numbers; their names stand in tables, lines and columns."""
        for name in numbers:
            if not isinstance(name, str) or not name or not name.isprintable():
                raise self.invalid(f"a metric named {_short(name)}; names are printable text")
        return {name: self.number(value, f"metric {name!r}") for name, value in numbers.items()}

    def in_order(self, rewards: Sequence[Any]) -> dict[str, float]:
        """Rewards per call, as a list in the order of `sample.calls`."""
        calls = self._sample.calls
        if len(rewards) != len(calls):
            raise self.invalid(f"{len(rewards)} rewards for {len(calls)} finished calls")
        return {
            call.vertex_id: self.number(value, f"{call.agent!r} at {call.path}")
            for call, value in zip(calls, rewards, strict=True)
        }

    def invalid(self, problem: str) -> DomainError:
        """What is told of a value that cannot be used."""
        return DomainError(
            ErrorReason.REWARD_INVALID,
            f"{self._what} returned {problem}",
            {"what": self._what},
        )


def _short(value: Any) -> str:  # noqa: ANN401
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

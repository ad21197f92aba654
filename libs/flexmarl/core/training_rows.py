"""What training looks at: finished vertices as rows, ended samples with their rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from flexmarl.core.ids import SampleId
from flexmarl.core.states import SampleStatus, VoidReason

MAX_REWARD: Final = 1e30
"""Largest size of a reward: squares and sums of such numbers stay far within a float."""


def is_usable(number: float) -> bool:
    """Whether a number of a reward function can be compared with others; NaN cannot."""
    return abs(number) <= MAX_REWARD


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Meta columns of one finished vertex.

    Attributes:
        vertex_id: Its id.
        sample_id: Its sample attempt.
        agent: Agent that was called.
        policy: Policy that served it.
        path: Path of the call: the call site.
        num_prompt_tokens: Tokens of the prompt.
        num_response_tokens: Sampled tokens.
        trainable: Whether the policy is trained, so that the row must end consumed or void.
        shard: Store shard that holds it.
        finished_unix_ns: When it finished.
        extends: Earlier vertex whose prompt and response its prompt begins with; empty if none.
        merged_into: Last vertex of the chain that it is trained with; empty for a row of its own.
        earlier: Of the last vertex of a chain, the others in order: they are one row with it.
    """

    vertex_id: str
    sample_id: str
    agent: str
    policy: str
    path: str
    num_prompt_tokens: int = 0
    num_response_tokens: int = 0
    trainable: bool = True
    shard: str = ""
    finished_unix_ns: int = 0
    extends: str = ""
    merged_into: str = ""
    earlier: tuple[Row, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the trainer has to pass through the model; a chain has its last vertex's."""
        return self.num_prompt_tokens + self.num_response_tokens

    @property
    def vertices(self) -> tuple[Row, ...]:
        """The vertices that it is made of, each of which ends consumed or void."""
        return (*self.earlier, self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """What the reward function returned for one sample.

    Attributes:
        team: Reward of the whole team.
        agents: Reward per agent.
        vertices: Reward per vertex id.
        metrics: Further numbers to be averaged and shown.
    """

    team: float | None = None
    agents: Mapping[str, float] = field(default_factory=dict)
    vertices: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFailure:
    """Why something did not work: an entry of the error catalogue and one line for a person."""

    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFact:
    """One sample attempt in the state that the store holds.

    Attributes:
        sample_id: Its id.
        status: Its state.
        rewards: What the reward function returned, once it is done.
        failure: Why it failed.
        left: Policies that it will not call again, while it is open.
        used: Policies that finished a vertex of it; known with `left` and at its end.
    """

    sample_id: SampleId
    status: SampleStatus
    rewards: Rewards | None = None
    failure: RunFailure | None = None
    left: frozenset[str] = frozenset()
    used: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RowAdvantage:
    """A row to release."""

    row: Row
    reward: float
    advantage: float


@dataclass(frozen=True, slots=True)
class RowVoid:
    """A row that will not be trained on."""

    row: Row
    reason: VoidReason

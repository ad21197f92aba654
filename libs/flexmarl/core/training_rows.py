"""What training looks at: finished vertices as rows, ended samples with their rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flexmarl.core.ids import SampleId
from flexmarl.core.states import SampleStatus, VoidReason


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

    @property
    def num_tokens(self) -> int:
        """Tokens that the trainer has to pass through the model."""
        return self.num_prompt_tokens + self.num_response_tokens


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
    """One sample attempt in the state that the store holds."""

    sample_id: SampleId
    status: SampleStatus
    rewards: Rewards | None = None
    failure: RunFailure | None = None


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

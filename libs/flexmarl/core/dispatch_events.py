"""What the dispatcher is told (events) and what it wants done (effects): data, never callables.

What every vertex needs is a named tuple, made in a fifth of the time of a frozen dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchConfig:
    """Numbers of the dispatcher.

    Attributes:
        retry_initial_s: Pause before the second try after a failure of the infrastructure.
        retry_max_s: Longest such pause; it doubles from one to the next.
        learning_rate: Weight of the newest value in what is learnt per agent.
        ageing_tokens_per_s: What a second of waiting counts against a longer remaining path.
        prefix_margin_tokens: How much more load than the least loaded an instance may have that
            holds a prompt's prefix, and still be chosen for it.
        handover_s: Longest wait for what an instance gives back that shall serve another policy.
        suspect_deaths: Deaths of instances under a vertex after which it has one for itself.
        poison_deaths: Deaths of instances that it had for itself after which it fails.
    """

    retry_initial_s: float = 0.05
    retry_max_s: float = 5.0
    learning_rate: float = 0.1
    ageing_tokens_per_s: float = 20.0
    prefix_margin_tokens: int = 512
    handover_s: float = 5.0
    suspect_deaths: int = 3
    poison_deaths: int = 3


class InstanceUse(Enum):
    """What an instance can be used for."""

    SERVING = "serving"
    """It serves its version."""
    PAUSED = "paused"
    """It takes no requests now (starts, loads weights, its host is away); its attempts go on."""
    GONE = "gone"
    """It is lost, and with it its attempts."""


class VertexReady(NamedTuple):
    """A call whose inputs are there.

    Attributes:
        vertex_id: Vertex.
        agent: Agent, whose response length is learnt.
        policy: Policy that must serve it.
        version: Version that must serve it.
        group_order: (batch, position of the group in it): smaller is older and goes first.
        num_prompt_tokens: Length of the prompt.
        max_tokens: Longest response; the expected one until some were seen.
        timeout_s: Deadline of the vertex, all attempts included, from now.
        max_attempts: Bound on failures of the request.
        infra_attempts: Bound on failures of the infrastructure.
        sample_id: Its sample; empty for a vertex that nothing is learnt from.
        upstream_ids: Vertices whose output it needed.
        prefix_keys: Keys of its prompt's blocks, see `prefix_index`; empty where engines keep none.
        resumable: Whether another instance may go on from what one has drawn. A grammar, penalties
            or a shortest length depend on all of a response: those start from nothing.
    """

    vertex_id: str
    agent: str
    policy: str
    version: int
    group_order: tuple[int, int]
    num_prompt_tokens: int
    max_tokens: int
    timeout_s: float
    max_attempts: int
    infra_attempts: int
    sample_id: str = ""
    upstream_ids: tuple[str, ...] = ()
    prefix_keys: tuple[int, ...] = ()
    resumable: bool = True
    input_hash: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceChanged:
    """An instance came, changed, or went.

    Attributes:
        instance_id: Instance.
        policies: Policies it serves.
        use: What it can be used for.
        capacity: Most requests at once.
        version: Version it serves; meaningless unless SERVING.
        weights_hash: Content hash of the weights that it holds.
    """

    instance_id: str
    policies: tuple[str, ...]
    use: InstanceUse
    capacity: int = 0
    version: int = 0
    weights_hash: str = ""


@dataclass(frozen=True, slots=True)
class WeightsKnown:
    """The weights of a policy at a version have this content; versions below are forgotten."""

    policy: str
    version: int
    weights_hash: str
    forget_below: int = 0


class AttemptSucceeded(NamedTuple):
    """An attempt returned tokens.

    Attributes:
        attempt_id: Attempt.
        version: The one version that sampled all of its tokens; -1 when several did.
        weights_hash: Content hash of the weights that did.
        num_tokens: Length of the response.
        input_hash: Of what was asked; empty where its host does not say.
    """

    attempt_id: str
    version: int
    weights_hash: str
    num_tokens: int
    input_hash: bytes = b""


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """An attempt failed, for a fault of the request or of the infrastructure."""

    attempt_id: str
    infrastructure: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class AttemptAborted:
    """An attempt was ended before its end; these are the tokens that it had drawn.

    Attributes:
        attempt_id: Attempt.
        version: The one version that sampled all of them; -1 when several did.
        weights_hash: Content hash of the weights that did.
        num_tokens: How many.
        input_hash: Of what was asked; empty where its host does not say.
    """

    attempt_id: str
    version: int
    weights_hash: str
    num_tokens: int
    input_hash: bytes = b""


@dataclass(frozen=True, slots=True)
class HeldAttempt:
    """An attempt, in progress or ended, of which nobody waits for the result just now.

    Attributes:
        attempt_id: Attempt.
        instance_id: Instance it was sent to.
        version: Version it was pinned to.
        input_hash: Of agent, prompt and sampling.
    """

    attempt_id: str
    instance_id: str
    version: int
    input_hash: bytes


@dataclass(frozen=True, slots=True)
class AttemptsHeld:
    """A host holds these of a dispatcher before this one; all of them started from nothing."""

    attempts: tuple[HeldAttempt, ...]


@dataclass(frozen=True, slots=True)
class InstanceVacating:
    """An instance shall serve another policy: its requests are handed over first."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class SampleEnded:
    """No vertex of the sample comes any more; `whole` when its workflow returned."""

    sample_id: str
    whole: bool


@dataclass(frozen=True, slots=True)
class VertexCancelled:
    """Nobody waits for the vertex any more."""

    vertex_id: str


@dataclass(frozen=True, slots=True)
class VertexDetached:
    """Who waited for the vertex died, and will ask again: its attempt goes on until then."""

    vertex_id: str


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The time that the last SetTimer named has come."""


Event = (
    VertexReady
    | InstanceChanged
    | WeightsKnown
    | AttemptSucceeded
    | AttemptFailed
    | AttemptAborted
    | AttemptsHeld
    | VertexCancelled
    | VertexDetached
    | InstanceVacating
    | SampleEnded
    | TimerFired
)


class Send(NamedTuple):
    """Send an attempt to an instance, pinned to a version.

    Attributes:
        attempt_id: Attempt.
        vertex_id: Its vertex.
        attempt: Its number.
        instance_id: Instance.
        version: Version that must serve it.
        reason: Why there.
        num_kept: Tokens of moved attempts that it goes on from; 0 starts from nothing.
    """

    attempt_id: str
    vertex_id: str
    attempt: int
    instance_id: str
    version: int
    reason: str
    num_kept: int = 0


@dataclass(frozen=True, slots=True)
class Attach:
    """A held attempt is the vertex' own: it counts as one that was sent now."""

    attempt_id: str
    vertex_id: str
    attempt: int
    instance_id: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep the result of a held attempt, unacknowledged: its vertex is not ready yet."""

    attempt_id: str


@dataclass(frozen=True, slots=True)
class Release:
    """Nobody will ask for a held attempt: end it, and forget its result."""

    attempt_id: str
    instance_id: str


class Accept(NamedTuple):
    """The attempt is the vertex' one success: store its result, then answer the call."""

    attempt_id: str
    vertex_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep the tokens of an aborted attempt: the vertex' next one goes on from them."""

    attempt_id: str
    vertex_id: str


@dataclass(frozen=True, slots=True)
class Vacated:
    """The instance works on nothing any more, and takes nothing until its policies change."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The result came after the vertex had ended, or after it was counted: never used."""

    attempt_id: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Tell the instance to stop working on the attempt."""

    attempt_id: str
    instance_id: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The vertex failed for good."""

    vertex_id: str
    attempt: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Send TimerFired at this time; replaces an earlier timer."""

    at: float


Effect = (
    Send | Attach | Hold | Release | Accept | Keep | Duplicate | Abort | Fail | Vacated | SetTimer
)


def attempt_id(vertex_id: str, attempt: int) -> str:
    """Id of an attempt of a vertex; attempts count from 1."""
    return f"{vertex_id}#{attempt}"


def split_attempt_id(text: str) -> tuple[str, int]:
    """Vertex id and number of an attempt.

    Raises:
        ValueError: `text` is not an attempt id.
    """
    vertex_id, mark, attempt = text.rpartition("#")
    if not mark or not attempt.isdecimal():
        raise ValueError(f"not an attempt id: {text!r}")
    return vertex_id, int(attempt)

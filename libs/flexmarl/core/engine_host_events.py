"""What an engine host is told and what it does: events, effects, and the views of its instances."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class InstancePhase(Enum):
    """State of one instance."""

    STARTING = "starting"
    EMPTY = "empty"
    LOADING = "loading"
    SERVING = "serving"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHostConfig:
    """Times of an engine host, in seconds.

    Attributes:
        start_timeout_s: Longest from the start of a process to its readiness.
        load_timeout_s: Longest takeover of weights, fetching included.
        backoff_initial_s: Delay before the first restart; doubles with each failure in a row.
        backoff_max_s: Longest delay.
        stable_s: A process that lived this long was no failure in a row.
    """

    start_timeout_s: float = 600.0
    load_timeout_s: float = 180.0
    backoff_initial_s: float = 0.1
    backoff_max_s: float = 10.0
    stable_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceWanted:
    """One instance of a plan; under the same id, all but its policies says which engine it is.

    Attributes:
        options: What only its engine understands; compared and passed on.
    """

    instance_id: str
    run_id: str
    policies: tuple[str, ...]
    engine: str
    model_path: str
    model_hash: str
    max_concurrency: int
    dtype: str
    max_context: int
    options: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """Weights that an instance shall serve.

    Attributes:
        policy: Policy they belong to.
        version: Version they are served under.
        weights_hash: Content hash.
        key: Key of the sealed segment.
    """

    policy: str
    version: int
    weights_hash: str
    key: str


@dataclass(frozen=True, slots=True)
class Problem:
    """Why something failed: reason of the catalogue, and a line for people."""

    reason: str
    message: str


# Events.


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReceived:
    """The dispatcher said which instances there shall be."""

    run_id: str
    term: int
    instances: tuple[InstanceWanted, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrdered:
    """The dispatcher told instances to take weights over."""

    instance_ids: tuple[str, ...]
    order: LoadOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReadied:
    """The process has built its model."""

    instance_id: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEnded:
    """The process ended, could not be started, or refused its model."""

    instance_id: str
    generation: int
    problem: Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEnded:
    """The process answered a load, or the weights could not be fetched.

    Attributes:
        problem: None on success.
    """

    instance_id: str
    generation: int
    load_id: int
    problem: Problem | None


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The time of the newest `SetTimer` has come."""


Event: TypeAlias = PlanReceived | LoadOrdered | EngineReadied | EngineEnded | LoadEnded | TimerFired

# Effects.


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEngine:
    """Start a process for the instance."""

    wanted: InstanceWanted
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopEngine:
    """End the instance's process, at once; its end is reported as usual."""

    instance_id: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEngine:
    """Make the process take weights over.

    Attributes:
        fetch: False when the process holds the content and only the version moves.
    """

    instance_id: str
    generation: int
    load_id: int
    order: LoadOrder
    run_id: str
    fetch: bool


@dataclass(frozen=True, slots=True)
class ReportInstance:
    """Tell the dispatcher the state of an instance."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Call back at this time, instead of at any earlier named one."""

    at: float


Effect: TypeAlias = StartEngine | StopEngine | LoadEngine | ReportInstance | SetTimer


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """State of one instance as the dispatcher is told."""

    wanted: InstanceWanted
    phase: InstancePhase
    version: int
    weights_hash: str
    num_restarts: int
    problem: Problem | None

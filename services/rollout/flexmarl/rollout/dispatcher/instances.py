"""The run's instances as the hosts tell of them: what they hold, what they were told, how busy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from flexmarl.api.rollout.v1.engine_pb2 import (
    INSTANCE_STATE_DEAD,
    INSTANCE_STATE_EMPTY,
    INSTANCE_STATE_LOADING,
    INSTANCE_STATE_SERVING,
    INSTANCE_STATE_STARTING,
    InstanceSpec,
    InstanceStatus,
)
from flexmarl.core.dispatch_events import InstanceChanged, InstanceUse
from flexmarl.core.weight_loads import InstanceWeights, Load

LOAD_RETRY_S: Final = 1.0
"""Pause before a refused load is ordered again."""
LOAD_PATIENCE_S: Final = 60.0
"""An order that was not answered for so long is given again."""

_USES: Final[Mapping[int, InstanceUse]] = {
    INSTANCE_STATE_STARTING: InstanceUse.PAUSED,
    INSTANCE_STATE_EMPTY: InstanceUse.PAUSED,
    INSTANCE_STATE_LOADING: InstanceUse.PAUSED,
    INSTANCE_STATE_SERVING: InstanceUse.SERVING,
    INSTANCE_STATE_DEAD: InstanceUse.GONE,
}


@dataclass(slots=True)
class Instance:
    """One instance.

    Attributes:
        spec: What the host was asked to run.
        host_id: Host that runs it.
        status: What the host said last.
        reachable: Whether its host is connected.
        requested: Version and content it was told to load and has not answered about.
        requested_at: When.
        not_before: Time before which a refused load is not repeated.
        has_died: Whether that is what the host said last, for the first time.
        has_refused: Whether the host said last that it did not load what it was told to, and had
            not said so before.
        busy_since: Since when it has had a request; None while idle.
        busy_s: Busy time since `sampled_at`.
        all_busy_s: Busy time since it was placed, up to when it was idle last.
        sampled_at: When the busy share was read last.
        heard_at: When it ended a request, was given its first one, or changed its state.
    """

    spec: InstanceSpec
    host_id: str
    status: InstanceStatus = field(default_factory=InstanceStatus)
    reachable: bool = True
    requested: tuple[int, str] | None = None
    requested_at: float = 0.0
    not_before: float = 0.0
    has_died: bool = False
    has_refused: bool = False
    busy_since: float | None = None
    busy_s: float = 0.0
    all_busy_s: float = 0.0
    sampled_at: float = 0.0
    heard_at: float = 0.0

    @property
    def instance_id(self) -> str:
        """Id."""
        return self.spec.instance_id

    @property
    def serving(self) -> bool:
        """Whether it takes requests."""
        return self.reachable and self.status.state == INSTANCE_STATE_SERVING

    def change(self) -> InstanceChanged:
        """What the dispatcher core is told."""
        use = _USES.get(self.status.state, InstanceUse.PAUSED)
        if not self.reachable and use is not InstanceUse.GONE:
            use = InstanceUse.PAUSED
        return InstanceChanged(
            instance_id=self.instance_id,
            policies=tuple(self.spec.policies),
            use=use,
            capacity=self.spec.max_concurrency,
            version=self.status.version,
            weights_hash=self.status.weights_hash,
        )

    def note_load(self, running: int, now: float) -> None:
        """Accounts busy time; called when the number of requests changes."""
        if running and self.busy_since is None:
            self.busy_since = self.heard_at = now
        elif not running and self.busy_since is not None:
            self.busy_s += now - max(self.busy_since, self.sampled_at)
            self.all_busy_s += now - self.busy_since
            self.busy_since = None

    def busy_seconds(self, now: float) -> float:
        """Busy time since it was placed."""
        return self.all_busy_s + (0.0 if self.busy_since is None else now - self.busy_since)

    def silent_s(self, now: float) -> float:
        """Since when something is waited for from it; 0 when nothing is."""
        waited_for = self.busy_since is not None or not self.serving
        return now - self.heard_at if waited_for else 0.0

    def take_busy_fraction(self, now: float) -> float:
        """Share of the time since the last call with at least one request."""
        busy_s = self.busy_s
        if self.busy_since is not None:
            busy_s += now - max(self.busy_since, self.sampled_at)
        passed_s = now - self.sampled_at
        self.busy_s, self.sampled_at = 0.0, now
        return min(busy_s / passed_s, 1.0) if passed_s > 0 else 0.0


class InstanceBook:
    """All instances of a run."""

    def __init__(self) -> None:
        self._instances: dict[str, Instance] = {}

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._instances.values())

    def get(self, instance_id: str) -> Instance | None:
        """An instance by id."""
        return self._instances.get(instance_id)

    def on_host(self, host_id: str) -> list[Instance]:
        """Instances of one host."""
        return [i for i in self._instances.values() if i.host_id == host_id]

    def hosts(self) -> dict[str, str]:
        """Host by instance id."""
        return {i.instance_id: i.host_id for i in self._instances.values()}

    def set(self, spec: InstanceSpec, host_id: str, now: float) -> None:
        """Places an instance on a host; one that is there already stays as it is."""
        known = self._instances.get(spec.instance_id)
        if known is None or known.host_id != host_id:
            self._instances[spec.instance_id] = Instance(
                spec, host_id, sampled_at=now, heard_at=now
            )

    def reassign(self, spec: InstanceSpec) -> Instance | None:
        """Gives an instance another policy; None for one that is not placed."""
        instance = self._instances.get(spec.instance_id)
        if instance is None:
            return None
        same = InstanceSpec()
        same.CopyFrom(spec)
        same.policies[:] = instance.spec.policies
        if same != instance.spec:
            # Its engine ends: what was heard of it is true no longer.
            state = INSTANCE_STATE_STARTING
            instance.status = InstanceStatus(instance_id=spec.instance_id, state=state)
        instance.spec = spec
        instance.requested = None
        instance.not_before = 0.0
        return instance

    def remove(self, instance_id: str) -> None:
        """Forgets an instance."""
        self._instances.pop(instance_id, None)

    def heard(self, status: InstanceStatus, host_id: str, now: float) -> Instance | None:
        """Takes what a host says; None for an instance that is not placed there."""
        instance = self._instances.get(status.instance_id)
        if instance is None or instance.host_id != host_id:
            return None
        before, instance.status = instance.status, status
        if status.state != before.state:
            instance.heard_at = now
        restarted = status.state in (INSTANCE_STATE_STARTING, INSTANCE_STATE_DEAD)
        served = (
            status.state == INSTANCE_STATE_SERVING
            and (status.version, status.weights_hash) == instance.requested
        )
        # What fails is said until something succeeds: while the next try is made, too.
        instance.has_died = status.state == INSTANCE_STATE_DEAD != before.state
        is_news = (status.state, status.failure) != (before.state, before.failure)
        instance.has_refused = (
            status.HasField("failure")
            and status.state in (INSTANCE_STATE_EMPTY, INSTANCE_STATE_SERVING)
            and (instance.requested is not None or is_news)
            and not served
        )
        if restarted or served or instance.has_refused:
            instance.requested = None
        if instance.has_refused:
            instance.not_before = now + LOAD_RETRY_S
        return instance

    def ordered(self, load: Load, now: float) -> None:
        """Notes that a load was ordered."""
        for instance_id in load.instance_ids:
            instance = self._instances[instance_id]
            instance.requested = (load.version, load.weights_hash)
            instance.requested_at = now

    def weights(self, now: float) -> list[InstanceWeights]:
        """What instances that could load now hold."""
        found: list[InstanceWeights] = []
        for instance in self._instances.values():
            state = instance.status.state
            if not instance.reachable or state not in (
                INSTANCE_STATE_EMPTY,
                INSTANCE_STATE_SERVING,
                INSTANCE_STATE_LOADING,
            ):
                continue
            if instance.requested is not None and now - instance.requested_at > LOAD_PATIENCE_S:
                instance.requested = None
            serving = state == INSTANCE_STATE_SERVING
            found.append(
                InstanceWeights(
                    instance_id=instance.instance_id,
                    policy=instance.spec.policies[0],
                    version=instance.status.version if serving else None,
                    weights_hash=instance.status.weights_hash,
                    requested=instance.requested,
                    not_before=instance.not_before,
                )
            )
        return found

"""The run's instances: which host runs what, and which weights are loaded when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

from flexmarl.api.common.v1alpha1.common_pb2 import ShardAddress
from flexmarl.api.meg_store.v1alpha1.graph_pb2 import ModelRef, PolicyManifest
from flexmarl.api.rollout.v1alpha1.engine_pb2 import (
    GenerateResult,
    HostHello,
    InstancePlan,
    InstanceSpec,
    InstanceStatus,
    LoadWeights,
)
from flexmarl.core.dispatch_events import InstanceChanged, InstanceUse, WeightsKnown
from flexmarl.core.errors import DomainError
from flexmarl.core.placement import HostRoom, check_capacity, instance_id, place
from flexmarl.core.weight_loads import Load, decide_loads
from flexmarl.rollout.dispatcher.call_desk import CallDesk
from flexmarl.rollout.dispatcher.engine_options import engine_options
from flexmarl.rollout.dispatcher.hosts import Hosts, HostSession
from flexmarl.rollout.dispatcher.instances import Instance, InstanceBook
from flexmarl.runtime.logging import get_logger
from flexmarl.runtime.run_config import RunConfig
from flexmarl.runtime.spans import SpanRecorder

_log = get_logger(__name__)


class Fleet:
    """Instances of one run; the listener of all hosts.

    Args:
        run_id: Run.
        config: Its config.
        models: Base model of each policy, as the run stores it.
        shards: Shards that hosts fetch from.
        term: Current orchestrator term.
        engine: Replaces the engine that policies name; for measurements.
        open_versions: Number of open samples by version.
    """

    def __init__(
        self,
        run_id: str,
        *,
        config: RunConfig,
        models: Mapping[str, ModelRef],
        shards: Iterable[ShardAddress],
        term: Callable[[], int],
        engine: str | None,
        hosts: Hosts,
        instances: InstanceBook,
        spans: SpanRecorder,
        open_versions: Callable[[], Mapping[int, int]],
    ) -> None:
        self.instances = instances
        self.weights: dict[tuple[str, int], PolicyManifest] = {}
        self._run_id = run_id
        self._config = config
        self._models = models
        self._shards = list(shards)
        self._term = term
        self._hosts = hosts
        self._spans = spans
        self._open_versions = open_versions
        self._specs = _instance_specs(config, models, engine)
        self._wanted = {name: p.rollout.instances for name, p in config.policies.items()}
        self._desk: CallDesk | None = None
        self._loading_since: dict[str, int] = {}

    def start(self, desk: CallDesk) -> None:
        """Asks the connected hosts for instances.

        Raises:
            DomainError: NOT_ENOUGH_INSTANCES.
        """
        check_capacity(self._wanted, self._rooms())
        self._desk = desk
        self._hosts.listen(self)

    def close(self) -> None:
        """Ends the instances and stops listening."""
        self._hosts.listen(None)
        for session in self._hosts.sessions:
            session.outgoing.add().plan.CopyFrom(self._plan([]))

    def send_plan(self) -> None:
        """Tells every host its part again, under the current term."""
        for session in self._hosts.sessions:
            self._send_plan(session)

    def shortage(self) -> DomainError | None:
        """Why the connected hosts cannot give each policy an instance, if they cannot."""
        try:
            check_capacity(self._wanted, self._rooms())
        except DomainError as error:
            return error
        return None

    def is_serving(self, version: int) -> dict[str, bool]:
        """Whether each policy has an instance that serves a version."""
        served = dict.fromkeys(self._wanted, False)
        for instance in self.instances:
            for policy in instance.spec.policies:
                served[policy] |= instance.serving and instance.status.version == version
        return served

    # Weights.

    def announce(
        self, policy: str, version: int, manifest: PolicyManifest, *, forget_below: int
    ) -> None:
        """Weights of a policy at a version may be loaded from now on."""
        assert self._desk is not None
        self.weights[(policy, version)] = manifest
        for key in [key for key in self.weights if key[0] == policy and key[1] < forget_below]:
            del self.weights[key]
        self._desk.weights_known(WeightsKnown(policy, version, manifest.weights_hash, forget_below))

    def order_loads(self) -> None:
        """Orders what is due; called whenever something that decides it has changed."""
        now = asyncio.get_running_loop().time()
        loads = decide_loads(
            self.instances.weights(now),
            open_versions=self._open_versions(),
            weights={key: manifest.weights_hash for key, manifest in self.weights.items()},
            now=now,
        )
        for load in loads:
            self._order(load, now)

    def _order(self, load: Load, now: float) -> None:
        _log.info(
            "weights_ordered",
            policy=load.policy,
            version=load.version,
            instances=load.instance_ids,
            reason=load.reason,
        )
        manifest = self.weights[(load.policy, load.version)]
        by_host: dict[str, list[str]] = {}
        for name in load.instance_ids:
            instance = self.instances.get(name)
            assert instance is not None
            by_host.setdefault(instance.host_id, []).append(name)
            self._loading_since[name] = time.time_ns()
        for host_id, names in by_host.items():
            session = self._hosts.session(host_id)
            if session is not None:
                session.outgoing.add().loads.append(
                    LoadWeights(
                        run_id=self._run_id,
                        instance_ids=names,
                        policy=load.policy,
                        version=load.version,
                        weights=manifest.weights,
                        weights_hash=manifest.weights_hash,
                    )
                )
        self.instances.ordered(load, now)

    # Hosts.

    def host_connected(self, session: HostSession, hello: HostHello) -> None:
        """A host came, or came back: place instances, and settle what it may have lost."""
        now = asyncio.get_running_loop().time()
        for instance in self.instances.on_host(session.host_id):
            instance.reachable = True
        self._place(now)
        self._send_plan(session)
        self._take_statuses(session.host_id, hello.instances, now)
        known = set(hello.attempt_ids)
        there = {i.instance_id for i in self.instances.on_host(session.host_id)}
        assert self._desk is not None
        sent = self._desk.attempts_at(there)
        self._desk.lost([a for a in sent if a not in known], session.host_id)
        orphans = [a for a in hello.attempt_ids if not self._desk.is_live(a)]
        if orphans:
            session.outgoing.add().aborts.extend(orphans)
        self.order_loads()

    def host_away(self, host_id: str) -> None:
        """A host's stream broke: nothing new goes there, what is there may still come."""
        for instance in self.instances.on_host(host_id):
            instance.reachable = False
            self._changed(instance)

    def host_gone(self, host_id: str) -> None:
        """A host did not come back: its attempts are lost, its instances go elsewhere."""
        assert self._desk is not None
        for instance in self.instances.on_host(host_id):
            self.instances.remove(instance.instance_id)
            self._desk.instance_changed(_gone(instance))
        self._place(asyncio.get_running_loop().time())
        self.send_plan()

    def host_statuses(self, session: HostSession, statuses: list[InstanceStatus]) -> None:
        """Instances changed."""
        self._take_statuses(session.host_id, statuses, asyncio.get_running_loop().time())
        self.order_loads()

    def host_results(self, session: HostSession, results: list[GenerateResult]) -> None:
        """Attempts ended."""
        assert self._desk is not None
        self._desk.results(session, results)

    def _take_statuses(self, host_id: str, statuses: Iterable[InstanceStatus], now: float) -> None:
        for status in statuses:
            instance = self.instances.heard(status, host_id, now)
            if instance is None:
                continue
            if status.HasField("failure"):
                _log.warning(
                    "instance_trouble",
                    instance=status.instance_id,
                    reason=status.failure.reason,
                    message=status.failure.message,
                )
            self._changed(instance)
            started = self._loading_since.get(status.instance_id)
            if started is not None and instance.requested is None:
                del self._loading_since[status.instance_id]
                name = f"load v{status.version}"
                track = f"weights/{status.instance_id}"
                self._spans.add(track, name, started / 1e9, time.time(), run=self._run_id)

    def _changed(self, instance: Instance) -> None:
        assert self._desk is not None
        self._desk.instance_changed(instance.change())

    def _rooms(self) -> list[HostRoom]:
        return [HostRoom(s.host_id, s.max_instances) for s in self._hosts.sessions]

    def _place(self, now: float) -> None:
        assert self._desk is not None
        hosts = self.instances.hosts()
        # A host that is away for a moment keeps its instances until it is given up.
        rooms = self._rooms()
        here = {room.host_id for room in rooms}
        away = {name: host for name, host in hosts.items() if host not in here}
        placed = place(self._wanted, rooms, hosts)
        for name, host_id in placed.items():
            if name in away:
                continue
            self.instances.set(self._specs[name], host_id, now)
        for name in hosts.keys() - placed.keys() - away.keys():
            instance = self.instances.get(name)
            assert instance is not None
            self.instances.remove(name)
            self._desk.instance_changed(_gone(instance))

    def _send_plan(self, session: HostSession) -> None:
        specs = [instance.spec for instance in self.instances.on_host(session.host_id)]
        session.outgoing.add().plan.CopyFrom(self._plan(specs))

    def _plan(self, specs: list[InstanceSpec]) -> InstancePlan:
        return InstancePlan(
            run_id=self._run_id, term=self._term(), shards=self._shards, instances=specs
        )


def _gone(instance: Instance) -> InstanceChanged:
    return InstanceChanged(
        instance_id=instance.instance_id,
        policies=tuple(instance.spec.policies),
        use=InstanceUse.GONE,
    )


def _instance_specs(
    config: RunConfig, models: Mapping[str, ModelRef], engine: str | None
) -> dict[str, InstanceSpec]:
    specs: dict[str, InstanceSpec] = {}
    for name, policy in config.policies.items():
        for ordinal in range(policy.rollout.instances):
            spec = InstanceSpec(
                instance_id=instance_id(name, ordinal),
                policies=[name],
                engine=engine or policy.rollout.engine,
                model_path=models[name].path,
                model_hash=models[name].content_hash,
                max_concurrency=policy.rollout.max_concurrency,
                dtype=policy.rollout.dtype,
                max_context=policy.rollout.max_context or 0,
                options=engine_options(config, name),
            )
            specs[spec.instance_id] = spec
    return specs

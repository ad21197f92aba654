"""The run's instances: which host runs which, for which policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from flexmarl.api.common.v1.common_pb2 import ShardAddress
from flexmarl.api.meg_store.v1.graph_pb2 import ModelRef, PolicyManifest
from flexmarl.api.rollout.v1.engine_pb2 import (
    INSTANCE_STATE_EMPTY,
    INSTANCE_STATE_STARTING,
    GenerateResult,
    HostHello,
    InstancePlan,
    InstanceSpec,
    InstanceStatus,
)
from flexmarl.core.balance_monitor import MoveCosts
from flexmarl.core.dispatch_events import InstanceChanged, InstanceUse, WeightsKnown
from flexmarl.core.errors import DomainError
from flexmarl.core.placement import check_capacity, instance_id, place
from flexmarl.rollout.dispatcher.call_desk import CallDesk
from flexmarl.rollout.dispatcher.engine_options import engine_options
from flexmarl.rollout.dispatcher.hosts import Hosts, HostSession
from flexmarl.rollout.dispatcher.instances import Instance, InstanceBook
from flexmarl.rollout.dispatcher.weight_orders import WeightOrders
from flexmarl.runtime.logging import get_logger
from flexmarl.runtime.run_config import RunConfig
from flexmarl.runtime.spans import SpanRecorder

_log = get_logger(__name__)


class Fleet:
    """Instances of one run; the listener of all hosts.

    Attributes:
        instances: What hosts say of them.
        costs: How long loads and starts take.
        bases: What the instances of each policy are built from.

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
        self.costs = MoveCosts()
        self._run_id = run_id
        self._shards = list(shards)
        self._term = term
        self._hosts = hosts
        self._orders = WeightOrders(
            run_id,
            hosts=hosts,
            instances=instances,
            spans=spans,
            costs=self.costs,
            open_versions=open_versions,
        )
        self._forms = {name: _form(config, name, models[name], engine) for name in config.policies}
        self.bases = {name: _base(form) for name, form in self._forms.items()}
        self._wanted = {name: p.rollout.instances for name, p in config.policies.items()}
        self._assigned = {
            instance_id(name, ordinal): name
            for name, count in self._wanted.items()
            for ordinal in range(count)
        }
        self._desk: CallDesk | None = None
        self._on_serving: Callable[[Instance], None] = _ignore
        self._starting_since: dict[str, float] = {}
        self._met: set[str] = set()
        self._left_at: dict[str, str] = {}
        self._succeeds = False
        self._settling: asyncio.TimerHandle | None = None

    @property
    def loads(self) -> Mapping[str, tuple[int, float]]:
        """Weights that instances took over, and the seconds of it, by policy."""
        return self._orders.loads

    def start(self, desk: CallDesk) -> None:
        """Asks the connected hosts for instances.

        Raises:
            DomainError: NOT_ENOUGH_INSTANCES.
        """
        check_capacity(self._wanted, self._hosts.rooms)
        self._desk = desk
        for session in self._hosts.sessions:
            self._find_running(session)
        self._hosts.listen(self)
        loop = asyncio.get_running_loop()
        if (left_s := self._hosts.unsettled_s) > 0:
            self._settling = loop.call_later(left_s, self._settle)

    def close(self) -> None:
        """Ends the instances and stops listening."""
        if self._settling is not None:
            self._settling.cancel()
        self._hosts.dismiss(self._plan([]))

    def send_plan(self) -> None:
        """Tells every host its part again, under the current term."""
        for session in self._hosts.sessions:
            self._send_plan(session)

    def shortage(self) -> DomainError | None:
        """Why the connected hosts cannot give each policy an instance, if they cannot."""
        try:
            check_capacity(self._wanted, self._hosts.rooms)
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
        self._orders.announce(policy, version, manifest, forget_below=forget_below)
        self._desk.weights_known(WeightsKnown(policy, version, manifest.weights_hash, forget_below))

    def order_loads(self) -> None:
        """Orders the loads that are due."""
        self._orders.order()

    # Moves.

    def serving(self, policy: str) -> list[Instance]:
        """Instances of a policy that take requests."""
        return [i for i in self.instances if i.serving and policy in i.spec.policies]

    def on_serving(self, listener: Callable[[Instance], None]) -> None:
        """Names who is told of instances that take requests."""
        self._on_serving = listener

    def reassign(self, instance_id: str, policy: str) -> None:
        """A vacated instance serves another policy from now on.

        One that its host lost meanwhile does so when it is placed again.
        """
        assert self._desk is not None
        self._assigned[instance_id] = policy
        instance = self.instances.reassign(self._spec(instance_id))
        if instance is None:
            return
        session = self._hosts.session(instance.host_id)
        if session is not None:
            self._send_plan(session)
        self._changed(instance)
        self.order_loads()

    # Hosts.

    def host_connected(self, session: HostSession, hello: HostHello) -> None:
        """A host came, or came back: place instances, and settle what it may have lost."""
        assert self._desk is not None
        now = asyncio.get_running_loop().time()
        there = self.instances.on_host(session.host_id)
        # Before anything is sent over the new stream, which its hello cannot know.
        sent = self._desk.attempts_at({instance.instance_id for instance in there})
        for instance in there:
            instance.reachable = True
            instance.requested = None  # the order may have been lost with the stream
        self._find_running(session)
        self._place(now)
        self.send_plan()  # to all: where one comes, others may have to take more, or less
        if hello.run_id == self._run_id:
            self._take_statuses(session.host_id, hello.instances, now)
            if session.host_id not in self._met:
                self._desk.held(hello)
        self._met.add(session.host_id)
        known = set(hello.attempt_ids)
        self._desk.lost([a for a in sent if a not in known], session.host_id)
        orphans = [a for a in hello.attempt_ids if not self._desk.is_wanted(a)]
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
        self._left_at = {name: host for name, host in self._left_at.items() if host != host_id}
        for instance in self.instances.on_host(host_id):
            self.instances.remove(instance.instance_id)
            self._desk.instance_changed(_gone(instance))
        self._place(asyncio.get_running_loop().time())
        self.send_plan()

    def _settle(self) -> None:
        """Whoever runs has dialled by now: what was found nowhere is started."""
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
            if instance.has_died or instance.has_refused:
                self._note_trouble(instance)
            self._changed(instance)
            self._orders.heard(instance)
            self._learn_start(instance, now)
            if instance.serving and self._holds_its_own(instance):
                self._on_serving(instance)

    def _note_trouble(self, instance: Instance) -> None:
        """Tells of a death, or, louder, of weights that are not what they should be."""
        assert self._desk is not None
        died, status = instance.has_died, instance.status
        self._desk.counters["instance_deaths" if died else "weights_refused"] += 1
        log = _log.warning if died else _log.error
        log(
            "instance_trouble" if died else "weights_refused",
            instance=status.instance_id,
            version=status.version,
            reason=status.failure.reason,
            message=status.failure.message,
        )

    def trouble(self, policy: str) -> str:
        """Why a policy's instances do not serve, in brackets; empty when none has said so."""
        for instance in self.instances:
            if policy in instance.spec.policies and instance.status.HasField("failure"):
                failure = instance.status.failure
                return f" ({instance.instance_id}: {failure.message or failure.reason})"
        return ""

    def _learn_start(self, instance: Instance, now: float) -> None:
        """How long engines take to start is what a move to another base model costs."""
        if instance.status.state == INSTANCE_STATE_STARTING:
            self._starting_since[instance.instance_id] = now
        elif instance.status.state == INSTANCE_STATE_EMPTY:
            since = self._starting_since.pop(instance.instance_id, None)
            if since is not None:
                self.costs.started(self.bases[instance.spec.policies[0]], now - since)

    def _holds_its_own(self, instance: Instance) -> bool:
        """Whether it serves weights of its own policy, not yet those of an earlier one."""
        return self._orders.is_known(
            instance.spec.policies[0], instance.status.version, instance.status.weights_hash
        )

    def _changed(self, instance: Instance) -> None:
        assert self._desk is not None
        self._desk.instance_changed(instance.change())

    def _find_running(self, session: HostSession) -> None:
        """Which instances a dispatcher before this one left at a host, and for which policies."""
        if session.hello.run_id != self._run_id:
            return
        self._succeeds |= bool(session.hello.instances)
        left = {
            status.instance_id: status.policies[0]
            for status in session.hello.instances
            if status.instance_id in self._assigned
            and status.policies
            and self.instances.get(status.instance_id) is None
        }
        self._left_at |= dict.fromkeys(left, session.host_id)
        assigned = self._assigned | left
        if set(assigned.values()) == set(self._wanted):  # I10: no policy is left without one
            self._assigned = assigned

    def _place(self, now: float) -> None:
        assert self._desk is not None
        hosts = self._left_at | self.instances.hosts()
        rooms = self._hosts.rooms
        here = {room.host_id for room in rooms}
        # A host that is away for a moment keeps its instances until it is given up.
        away = {name for name, host in hosts.items() if host not in here}
        assigned = {n: policy for n, policy in self._assigned.items() if n not in away}
        if self._succeeds and self._hosts.unsettled_s > 0:
            # What is not found yet may run where nobody has dialled from yet.
            assigned = {name: policy for name, policy in assigned.items() if name in hosts}
        placed = place(assigned, rooms, hosts)
        for name in sorted(hosts.keys() - away):
            instance = self.instances.get(name)  # none: a dispatcher before this one had it
            if instance is not None and placed.get(name) != instance.host_id:
                self.instances.remove(name)
                self._desk.instance_changed(_gone(instance))
        for name, host_id in placed.items():
            self.instances.set(self._spec(name), host_id, now)

    def _spec(self, instance_id: str) -> InstanceSpec:
        spec = InstanceSpec(instance_id=instance_id)
        spec.MergeFrom(self._forms[self._assigned[instance_id]])
        return spec

    def _send_plan(self, session: HostSession) -> None:
        specs = [instance.spec for instance in self.instances.on_host(session.host_id)]
        session.outgoing.add().plan.CopyFrom(self._plan(specs))

    def _plan(self, specs: list[InstanceSpec]) -> InstancePlan:
        return InstancePlan(
            run_id=self._run_id, term=self._term(), shards=self._shards, instances=specs
        )


def _ignore(_: Instance) -> None:
    pass


def _gone(instance: Instance) -> InstanceChanged:
    return InstanceChanged(
        instance_id=instance.instance_id,
        policies=tuple(instance.spec.policies),
        use=InstanceUse.GONE,
    )


def _form(config: RunConfig, name: str, model: ModelRef, engine: str | None) -> InstanceSpec:
    """What every instance of a policy is, but for its id."""
    policy = config.policies[name]
    return InstanceSpec(
        policies=[name],
        engine=engine or policy.rollout.engine,
        model_path=model.path,
        model_hash=model.content_hash,
        max_concurrency=policy.rollout.max_concurrency,
        dtype=policy.rollout.dtype,
        max_context=policy.rollout.max_context or 0,
        options=engine_options(config, name),
    )


def _base(form: InstanceSpec) -> str:
    """What must be alike for an instance to change its policy by a weight load alone."""
    base = InstanceSpec()
    base.CopyFrom(form)
    del base.policies[:]
    return base.SerializeToString(deterministic=True).hex()

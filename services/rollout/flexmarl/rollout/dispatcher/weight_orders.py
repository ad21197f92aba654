"""Weights of the run's policies: what was announced, and which instances are told to load what."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from flexmarl.api.meg_store.v1.graph_pb2 import PolicyManifest
from flexmarl.api.rollout.v1.engine_pb2 import LoadWeights
from flexmarl.core.balance_monitor import MoveCosts
from flexmarl.core.weight_loads import Load, decide_loads
from flexmarl.rollout.dispatcher.hosts import Hosts
from flexmarl.rollout.dispatcher.instances import Instance, InstanceBook
from flexmarl.runtime.logging import get_logger
from flexmarl.runtime.spans import SpanRecorder

_log = get_logger(__name__)


class WeightOrders:
    """See the module.

    Attributes:
        loads: Loads that ended with a serving instance, and their seconds, by policy.

    Args:
        run_id: Run.
        hosts: Connected hosts.
        instances: The run's instances.
        spans: Told of every load.
        costs: Told how long loads take.
        open_versions: Number of open samples by version.
    """

    def __init__(
        self,
        run_id: str,
        *,
        hosts: Hosts,
        instances: InstanceBook,
        spans: SpanRecorder,
        costs: MoveCosts,
        open_versions: Callable[[], Mapping[int, int]],
    ) -> None:
        self.loads: dict[str, tuple[int, float]] = {}
        self._run_id = run_id
        self._hosts = hosts
        self._instances = instances
        self._spans = spans
        self._costs = costs
        self._open_versions = open_versions
        self._weights: dict[tuple[str, int], PolicyManifest] = {}
        self._loading_since: dict[str, float] = {}

    def announce(
        self, policy: str, version: int, manifest: PolicyManifest, *, forget_below: int
    ) -> None:
        """Weights of a policy at a version may be loaded from now on."""
        self._weights[(policy, version)] = manifest
        for key in [key for key in self._weights if key[0] == policy and key[1] < forget_below]:
            del self._weights[key]

    def is_known(self, policy: str, version: int, weights_hash: str) -> bool:
        """Whether these are a policy's weights at a version."""
        manifest = self._weights.get((policy, version))
        return manifest is not None and manifest.weights_hash == weights_hash

    def order(self) -> None:
        """Orders what is due; called whenever something that decides it has changed."""
        now = asyncio.get_running_loop().time()
        loads = decide_loads(
            self._instances.weights(now),
            open_versions=self._open_versions(),
            weights={key: manifest.weights_hash for key, manifest in self._weights.items()},
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
        manifest = self._weights[(load.policy, load.version)]
        by_host: dict[str, list[str]] = {}
        for name in load.instance_ids:
            instance = self._instances.get(name)
            assert instance is not None
            by_host.setdefault(instance.host_id, []).append(name)
            self._loading_since[name] = time.time()
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
        self._instances.ordered(load, now)

    def heard(self, instance: Instance) -> None:
        """A host has said what an instance does: a load may have ended."""
        if instance.requested is not None:
            return
        since = self._loading_since.pop(instance.instance_id, None)
        if since is None:
            return
        now = time.time()
        policy = instance.spec.policies[0]
        if instance.serving:
            self._costs.loaded(policy, now - since)
            count, seconds = self.loads.get(policy, (0, 0.0))
            self.loads[policy] = (count + 1, seconds + now - since)
        track = f"weights/{instance.instance_id}"
        name = f"load {policy} v{instance.status.version}"
        self._spans.add(track, name, since, now, run=self._run_id)

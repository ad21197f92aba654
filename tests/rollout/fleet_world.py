"""A dispatcher's parts around model hosts, in virtual time: what a run's calls go through.

Hosts, fleet, call desk and mover are the real ones; the world stands in for orchestrator, workers
and store. It asks for calls, and checks that every call is answered once, with the whole answer to
what was asked last.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from random import Random

from rollout.model_host import ModelHost, response
from rollout.worker_harness import run_config

from flexmarl.api.common.v1.common_pb2 import ObjectRef
from flexmarl.api.meg_store.v1.graph_pb2 import ModelRef, PolicyManifest, Vertex
from flexmarl.api.meg_store.v1.meg_store_pb2 import WRITE_OUTCOME_ACCEPTED
from flexmarl.api.rollout.v1.engine_pb2 import SamplingParams
from flexmarl.api.rollout.v1.rollout_pb2 import SampleSpec
from flexmarl.api.rollout.v1.worker_pb2 import AgentCall, CallAnswer
from flexmarl.rollout.dispatcher.call_desk import CallDesk
from flexmarl.rollout.dispatcher.fleet import Fleet
from flexmarl.rollout.dispatcher.hosts import Hosts
from flexmarl.rollout.dispatcher.instances import InstanceBook
from flexmarl.rollout.dispatcher.mover import Mover
from flexmarl.rollout.dispatcher.samples import SampleState
from flexmarl.runtime.spans import SpanRecorder

GRACE_S = 5.0
RUN = "r"


class FleetWorld:
    """See the module.

    Args:
        instances: Instances by policy.
        rooms: Most instances by host; 0 for any number.
    """

    def __init__(self, instances: dict[str, int], rooms: dict[str, int], *, seed: int = 0) -> None:
        self.rng = Random(seed)
        self.config = run_config(
            Path("/model"), Path("/package"),
            agents={
                name: {
                    "policy": name, "prompt": "{text}", "max_tokens": 8, "timeout_s": 100_000,
                    "infra_attempts": 1000,
                } for name in instances
            },
            policies={name: {"rollout": {"instances": n}} for name, n in instances.items()},
        )  # fmt: skip
        self.model_hosts = {
            name: ModelHost(name, room=room, rng=self.rng) for name, room in rooms.items()
        }
        self.fleet: Fleet | None = None
        self.version = 0
        self.asked: dict[str, AgentCall] = {}
        self.answered: Counter[str] = Counter()
        self.rows: dict[str, Vertex] = {}
        self.samples: dict[str, SampleState] = {}
        self.all_samples: dict[str, None] = {}
        self.asked_now: set[str] = set()  # of this dispatcher
        self.restart()

    # The dispatcher.

    def restart(self) -> None:
        """Another dispatcher takes the place of the one before, which says nothing any more."""
        if self.fleet is not None:
            self.hosts._listener = None
            self.desk._closed = True
            self.fleet = None
        self.hosts = Hosts(grace_s=GRACE_S)
        self.instances = InstanceBook()
        self.samples.clear()
        self.asked_now.clear()

    def open(self) -> None:
        spans = SpanRecorder(service="rollout")
        parts = {"hosts": self.hosts, "instances": self.instances}
        self.fleet = Fleet(
            RUN, config=self.config, models={n: ModelRef(path="/m") for n in self.config.policies},
            shards=[], term=lambda: 1, engine=None, spans=spans,
            open_versions=self.open_versions, **parts,
        )  # fmt: skip
        self.desk = CallDesk(
            self.config, writer=self, listener=self, seed=self.rng.randrange(99), **parts
        )
        self.mover = Mover(
            RUN, self.config.rollout.balance, desk=self.desk, fleet=self.fleet, spans=spans,
            open_versions=self.open_versions,
        )  # fmt: skip
        self.fleet.start(self.desk)
        self.announce(self.version)

    def open_versions(self) -> Counter[int]:
        return Counter({self.version: len(self.open_calls())})

    def activate(self) -> None:
        """The next version is committed: calls are made under it from now on."""
        self.version += 1
        self.announce(self.version)

    def announce(self, version: int) -> None:
        """Weights of a version are there: of every policy others."""
        assert self.fleet is not None
        for policy in self.config.policies:
            manifest = PolicyManifest(
                weights=ObjectRef(shard="s0", key=f"{policy}.{version}"),
                weights_hash=f"{policy}-{version}",
            )
            forget_below = max(min(self.version, version - 1), 0)
            self.fleet.announce(policy, version, manifest, forget_below=forget_below)
        self.fleet.order_loads()

    def vertex(self, row: Vertex, on_stored) -> None:
        """The store: takes a moment, and forgets nothing."""
        desk = self.desk

        def stored() -> None:
            if desk is self.desk:  # else it was not written before its dispatcher died
                self.rows[row.meta.vertex_id] = row
                on_stored(WRITE_OUTCOME_ACCEPTED)

        asyncio.get_running_loop().call_later(self.rng.random() * 0.02, stored)

    # Workers.

    def ask(self, n: int, policy: str, prompt: list[int]) -> None:
        """A workflow makes a call, or makes it again."""
        sample_id = f"b{self.version:06d}a0-g0000-s{n:03d}a0"
        sample = self.samples.get(sample_id)
        if sample is None:
            spec = SampleSpec(sample_id=sample_id, version=self.version, batch=self.version)
            sample = self.samples[sample_id] = SampleState(spec)
        call = AgentCall(
            vertex_id=f"{sample_id}/0:0", sample_id=sample_id, path="0:0", agent=policy,
            policy=policy, prompt_tokens=prompt, input_hash=bytes(prompt),
            sampling=SamplingParams(max_tokens=8),
        )  # fmt: skip
        self.asked[call.vertex_id] = call
        self.all_samples[sample_id] = None
        self.asked_now.add(call.vertex_id)
        self.desk.call(sample, call)

    def open_calls(self) -> list[AgentCall]:
        return [call for name, call in self.asked.items() if not self.answered[name]]

    def waiting_calls(self) -> list[AgentCall]:
        """Calls without a result that is being stored."""
        return [call for call in self.open_calls() if call.vertex_id in self.desk._calls]

    def ask_again(self, call: AgentCall, prompt: list[int] | None = None) -> None:
        sample_id = call.sample_id
        n = int(sample_id.rpartition("s")[2].partition("a")[0])
        self.ask(n, call.policy, list(call.prompt_tokens) if prompt is None else prompt)

    def call_answered(self, sample: SampleState, answer: CallAnswer) -> None:
        assert not answer.HasField("failure"), answer
        assert not self.answered[answer.vertex_id], "answered once"
        self.answered[answer.vertex_id] += 1
        call = self.asked[answer.vertex_id]
        assert list(answer.tokens) == response(list(call.prompt_tokens), 8)

    def row_stored(self, sample: SampleState) -> None:
        assert sample.writing >= 0

    def row_found(self, sample: SampleState, vertex_id: str, agent: str) -> None:
        raise AssertionError("nothing is stored twice")

    # Hosts.

    def dial(self, *names: str) -> None:
        for name in names or self.model_hosts:
            if self.model_hosts[name].task is None:
                self.model_hosts[name].dial(self.hosts)

    async def hang_up(self, *names: str) -> None:
        for name in names or self.model_hosts:
            await self.model_hosts[name].hang_up()

    def starts(self) -> Counter[str]:
        """How often each instance was started, at all hosts together."""
        return Counter(name for host in self.model_hosts.values() for name in host.starts)

    async def settled(self, timeout_s: float = 60.0) -> None:
        """Waits until each policy has an instance that serves."""
        async with asyncio.timeout(timeout_s):
            while not all(self.fleet.is_serving(self.version).values()):
                await asyncio.sleep(0.1)
                self.fleet.order_loads()

"""The calls of a run under a real event loop: what was decided replays, and is executed once."""

from __future__ import annotations

import asyncio
from random import Random

from rollout.worker_harness import run_config

from flexmarl.api.common.v1.common_pb2 import Failure, VersionRun
from flexmarl.api.meg_store.v1.meg_store_pb2 import WRITE_OUTCOME_ACCEPTED
from flexmarl.api.rollout.v1 import engine_pb2 as eng
from flexmarl.api.rollout.v1.rollout_pb2 import SampleSpec
from flexmarl.api.rollout.v1.worker_pb2 import AgentCall, CallAnswer
from flexmarl.core.dispatch import Dispatcher
from flexmarl.core.dispatch_events import DispatchConfig, WeightsKnown
from flexmarl.rollout.dispatcher.call_desk import CallDesk
from flexmarl.rollout.dispatcher.hosts import Hosts, HostSession
from flexmarl.rollout.dispatcher.instances import InstanceBook
from flexmarl.rollout.dispatcher.samples import SampleState

SEED = 11


class DirectWriter:
    """Stores at once, in the next turn of the loop."""

    def vertex(self, vertex, on_stored) -> None:
        asyncio.get_running_loop().call_soon(on_stored, WRITE_OUTCOME_ACCEPTED)


class Listener:
    def __init__(self) -> None:
        self.answers: dict[str, CallAnswer] = {}

    def call_answered(self, sample, answer) -> None:
        assert answer.vertex_id not in self.answers, "answered twice"
        self.answers[answer.vertex_id] = answer

    def row_stored(self, sample) -> None:
        assert sample.writing >= 0

    def row_found(self, sample, vertex_id, agent) -> None:
        raise AssertionError("nothing was stored before")


class World:
    """One host with three instances that answer after random times, and fail at random."""

    def __init__(self, tmp_path) -> None:
        agents = {"echo": {"policy": "p", "prompt": "{text}", "timeout_s": 9, "max_attempts": 50}}
        self.rng = Random(5)
        self.listener = Listener()
        self.hosts = Hosts(grace_s=1)
        self.session = HostSession(eng.HostHello(host_id="h0"))
        self.hosts._connect(self.session)
        self.instances = InstanceBook()
        self.desk = CallDesk(
            run_config(tmp_path, tmp_path, agents=agents), hosts=self.hosts,
            instances=self.instances, writer=DirectWriter(), listener=self.listener, seed=SEED,
            record=True,
        )  # fmt: skip
        self.desk.weights_known(WeightsKnown("p", 0, "h"))
        for n in range(3):
            spec = eng.InstanceSpec(instance_id=f"i{n}", policies=["p"], max_concurrency=4)
            self.instances.set(spec, "h0", 0.0)
            self.status(f"i{n}", eng.INSTANCE_STATE_SERVING)

    def status(self, name: str, state) -> None:
        status = eng.InstanceStatus(
            instance_id=name, policies=["p"], state=state, version=0, weights_hash="h"
        )
        self.desk.instance_changed(self.instances.heard(status, "h0", 0.0).change())

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        while (message := await self.session.outgoing.take()) is not None:
            for request in message.requests:
                loop.call_later(self.rng.random() * 0.01, self.end, request)

    def end(self, request: eng.GenerateRequest) -> None:
        result = eng.GenerateResult(
            attempt_id=request.attempt_id, instance_id=request.instance_id, version=0,
            weights_hash="h", tokens=[1, 2], logprobs=[-1, -1], finish_reason="length",
            version_runs=[VersionRun(version=0, num_tokens=2)],
        )  # fmt: skip
        dice = self.rng.random()
        if dice < 0.1:
            result.failure.CopyFrom(Failure(reason="INTERNAL", message="broke"))
        elif dice < 0.15:
            result.version_runs[0].version = 3
        elif dice < 0.2:
            result.finish_reason = "abort"
        self.desk.results(self.session, [result, result] if dice > 0.9 else [result])


def ask(desk: CallDesk, sample: SampleState, n: int) -> str:
    vertex_id = f"{sample.spec.sample_id}/0:{n}"
    call = AgentCall(
        vertex_id=vertex_id, sample_id=sample.spec.sample_id, path=f"0:{n}", agent="echo",
        policy="p", prompt_tokens=range(n % 7 + 1), sampling=eng.SamplingParams(max_tokens=2),
    )  # fmt: skip
    desk.call(sample, call)
    return vertex_id


async def test_nobody_is_told_of_an_instance_that_was_vacated_as_the_run_was_closed(tmp_path):
    """Who is told gives it another policy, and sends its host a plan with the run's engines."""
    world = World(tmp_path)
    told: list[str] = []
    world.desk.on_vacated(told.append)
    world.desk.vacate("i0")  # it has nothing to give back
    await asyncio.sleep(0)
    assert told == ["i0"]
    world.desk.vacate("i1")
    world.desk.close()
    await asyncio.sleep(0)
    assert told == ["i0"]


async def test_a_call_whose_text_has_rules_is_not_gone_on_with_elsewhere(tmp_path):
    world = World(tmp_path)
    sample = SampleState(SampleSpec(sample_id="b000000a0-g0000-s000a0"))
    told = []
    for n, sampling in enumerate(
        [
            eng.SamplingParams(max_tokens=2),
            eng.SamplingParams(max_tokens=2, stop=["."]),
            eng.SamplingParams(max_tokens=2, structured=eng.StructuredOutput(regex="a+")),
        ]
    ):
        call = AgentCall(
            vertex_id=f"{sample.spec.sample_id}/0:{n}", sample_id=sample.spec.sample_id,
            path=f"0:{n}", agent="echo", policy="p", prompt_tokens=[1], sampling=sampling,
        )  # fmt: skip
        world.desk.call(sample, call)
        told.append(world.desk.trace[-1][0].resumable)
    world.desk.close()
    assert told == [True, False, False]


async def test_a_live_trace_replays_identically_through_a_fresh_core(tmp_path):
    world = World(tmp_path)
    server = asyncio.create_task(world.serve())
    sample = SampleState(SampleSpec(sample_id="b000000a0-g0000-s000a0"))
    asked = []
    for n in range(400):
        asked.append(ask(world.desk, sample, n))
        if n == 150:
            world.status("i1", eng.INSTANCE_STATE_DEAD)
        if n == 200:
            world.status("i1", eng.INSTANCE_STATE_SERVING)
        if n % 50 == 7:
            world.desk.cut(asked.pop())
        await asyncio.sleep(0.0005)
    async with asyncio.timeout(20):
        while len(world.listener.answers) < len(asked):  # noqa: ASYNC110, RUF100
            await asyncio.sleep(0.005)
    server.cancel()
    world.desk.close()
    assert set(world.listener.answers) == set(asked)
    assert all(list(a.tokens) == [1, 2] for a in world.listener.answers.values())
    assert world.desk.counters["retries"] > 20
    assert world.desk.counters["duplicates"] > 0
    assert len(sample.cut) == 8
    assert (sample.writing, sample.calls) == (0, {})
    trace = world.desk.trace
    fresh = Dispatcher(DispatchConfig(), Random(SEED))
    assert [fresh.handle(event, now) for event, now, _ in trace] == [e for _, _, e in trace]


async def test_a_call_that_needs_what_has_not_finished_is_refused(tmp_path):
    # I1: also against a worker that asks too early.
    world = World(tmp_path)
    sample = SampleState(SampleSpec(sample_id="b000000a0-g0000-s000a0"))
    call = AgentCall(
        vertex_id="b000000a0-g0000-s000a0/0:1", agent="echo", policy="p",
        upstream_vertex_ids=["b000000a0-g0000-s000a0/0:0"],
    )  # fmt: skip
    world.desk.call(sample, call)
    (answer,) = world.listener.answers.values()
    assert answer.failure.reason == "INVALID_ARGUMENT"
    assert "0:0" in answer.failure.message
    world.desk.close()

"""Engines that die, hang, dawdle and talk nonsense, while instances move: every sample ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random
from typing import Any

import pytest
from rollout.dispatcher_harness import Cluster, HostStandIn, Services, seeded_tokens
from rollout.worker_harness import run_config, write_model, write_team

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.rollout.v1 import engine_pb2 as eng

TEAM = """
async def team(ctx, query):
    first = await ctx.call("plan", text=query["n"] % 7)
    work = [ctx.call("work", text=n, after=first) for n in range(3)]
    parts = await ctx.gather(*work)
    return await ctx.call("plan", text=len(parts), after=parts)

def reward(sample):
    return 1.0
"""
AGENTS = {
    name: {
        "policy": policy, "prompt": "{text}>", "max_tokens": 4, "timeout_s": 4, "max_attempts": 4,
        "infra_attempts": 40,
    }
    for name, policy in (("plan", "p"), ("work", "q"))
}  # fmt: skip
BALANCE = {
    "rule": "queue_gap", "queue_gap": 1, "confirm": 1, "residence_s": 0.05, "interval_s": 0.02,
}  # fmt: skip
STATED = {"DEADLINE_EXCEEDED", "INVALID_ARGUMENT", "CHILD_DIED"}


class ChaosHost(HostStandIn):
    """A host with bad engines; whatever it does is drawn from one seed."""

    def __init__(self, *args: Any, seed: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rng = Random(seed)
        self.did: Counter[str] = Counter()
        self.held: dict[str, eng.GenerateRequest] = {}
        self.loop = asyncio.get_running_loop()

    def _take(self, message: eng.ConnectEngineHostResponse) -> None:
        super()._take(message)
        for attempt in message.aborts:
            request = self.held.pop(attempt, None)
            if request is not None:
                self.did["aborted"] += 1
                self.send(results=[self.honest(request, seeded_tokens(request)[:1], "abort")])

    def _result(self, request: eng.GenerateRequest) -> eng.GenerateResult | None:
        dice = self.rng.random()
        if dice < 0.01:
            self.did["hung"] += 1
            self.held[request.attempt_id] = request
            return None
        if dice < 0.5:
            self.did["slow"] += 1
            self.held[request.attempt_id] = request
            self.loop.call_later(self.rng.random() * 0.05, self.answer_late, request.attempt_id)
            return None
        result = self.honest(request, seeded_tokens(request), "length")
        if dice < 0.56:
            self.did["failed"] += 1
            result.ClearField("tokens")
            result.failure.reason = "INVALID_ARGUMENT" if dice < 0.53 else "UNAVAILABLE"
            result.infrastructure = dice >= 0.53
        elif dice < 0.64:
            self.did["garbage"] += 1
            self.spoil(result)
        elif dice < 0.67:
            self.did["twice"] += 1
            self.loop.call_soon(lambda: self.send(results=[result]))
        elif dice < 0.69:
            self.kill(request.instance_id)
            return None
        self.unacked[result.attempt_id] = result
        return result

    def spoil(self, result: eng.GenerateResult) -> None:
        kind = self.rng.randrange(6)
        if kind == 0:
            result.version = 9
        elif kind == 1:
            result.weights_hash = "other"
        elif kind == 2:
            result.version_runs[0].version = 3
        elif kind == 3:
            result.num_kept += 1
        elif kind == 4:
            del result.logprobs[-1]
        else:
            result.tokens.append(1)
            result.logprobs.append(-0.5)

    def honest(self, request: eng.GenerateRequest, tokens: list[int], reason: str) -> Any:
        status = self.statuses[request.instance_id]
        return eng.GenerateResult(
            attempt_id=request.attempt_id, instance_id=request.instance_id,
            version=request.version, weights_hash=status.weights_hash, tokens=tokens,
            logprobs=[-0.5] * len(tokens), finish_reason=reason, num_kept=request.num_kept,
            version_runs=[common_pb2.VersionRun(version=request.version, num_tokens=len(tokens))],
        )  # fmt: skip

    def answer_late(self, attempt_id: str) -> None:
        request = self.held.pop(attempt_id, None)
        if request is not None and request.instance_id in self.statuses:
            result = self.honest(request, seeded_tokens(request), "length")
            self.unacked[attempt_id] = result
            self.send(results=[result])

    def kill(self, instance_id: str) -> None:
        """The engine dies with all that it has, and comes back."""
        self.did["killed"] += 1
        self.held = {a: r for a, r in self.held.items() if r.instance_id != instance_id}
        policies = list(self.statuses[instance_id].policies)
        dead = self.set_status(instance_id, policies, eng.INSTANCE_STATE_DEAD)
        self.send(instances=[dead])
        self.loop.call_later(0.05, self.restart, instance_id)

    def restart(self, instance_id: str) -> None:
        known = self.statuses.get(instance_id)
        if known is not None and known.state == eng.INSTANCE_STATE_DEAD:
            empty = self.set_status(instance_id, list(known.policies), eng.INSTANCE_STATE_EMPTY)
            self.send(instances=[empty])


@pytest.mark.timeout(90)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.real)])
async def test_every_sample_ends_in_a_stated_way_and_nothing_counts_twice(tmp_path, seed):
    services = Services(tmp_path)
    policies = {name: {"rollout": {"instances": 3, "max_concurrency": 3}} for name in "pq"}
    config = run_config(
        write_model(tmp_path / "model"), write_team(tmp_path / "package", TEAM),
        agents=AGENTS, policies=policies, rollout={"balance": BALANCE},
    )  # fmt: skip
    try:
        await services.revive()
        async with Cluster(services, config) as cluster:
            await cluster.create_run(tmp_path / "data.jsonl")
            host = ChaosHost(services.rollout.address, seed=seed).start()
            cluster.hosts.append(host)
            await cluster.open()
            await cluster.activate(0)
            ids = await cluster.admit(0, groups=40, samples=2)
            status = await cluster.until_ended(timeout_s=60)
            samples = await cluster.samples()
            assert sorted(samples) == sorted(ids)
            kinds = {"slow", "failed", "garbage", "twice", "killed"}
            assert kinds <= host.did.keys(), host.did
            done = 0
            for sample_id in ids:
                graph = await cluster.graph(sample_id)
                paths = [v.meta.path for v in graph.vertices]
                assert len(paths) == len(set(paths))
                if graph.sample.status == common_pb2.SAMPLE_STATUS_DONE:
                    done += 1
                    assert len(paths) == 5
                else:
                    assert graph.sample.status == common_pb2.SAMPLE_STATUS_FAILED
                    assert graph.sample.failure.reason in STATED, graph.sample.failure
                for vertex in graph.vertices:
                    if vertex.meta.status == common_pb2.VERTEX_STATUS_DONE:
                        # Whatever was tried: right weights, and tokens that add up.
                        policy = vertex.meta.policy
                        assert vertex.meta.weights_hash == f"hash-{policy}-0"
                        assert {run.version for run in vertex.meta.version_runs} == {0}
                        count = len(vertex.payload.response_tokens)
                        assert len(vertex.payload.logprobs) == count <= 4
                        assert sum(run.num_tokens for run in vertex.meta.version_runs) == count
            assert done > len(ids) // 2
            assert status.counters["samples_done"] == done
            # What failed samples had in progress may be on its way back from being cut.
            await cluster.until(
                lambda s: all(q.num_waiting + q.num_running == 0 for q in s.queues.values())
            )
    finally:
        services.stop()

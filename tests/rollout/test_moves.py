"""Moving instances between policies: the dispatcher as a process, engines stood in for."""

from __future__ import annotations

import asyncio
import json
import re
import time

import pytest
import pytest_asyncio
from rollout.dispatcher_harness import Cluster, HostStandIn
from rollout.worker_harness import run_config, write_model, write_team

from flexmarl.api.common.v1.common_pb2 import (
    GROUP_STATUS_OPEN,
    SAMPLE_STATUS_DONE,
    VersionRun,
)
from flexmarl.api.meg_store.v1.graph_pb2 import Group
from flexmarl.api.rollout.v1 import engine_pb2 as eng
from flexmarl.core.ids import BatchId, GroupId, SampleId

TEAM = """
async def team(ctx, query):
    return await ctx.call(query["agent"], text=0)

def reward(sample):
    return 1.0
"""
AGENTS = {
    "solve": {"policy": "p", "prompt": "{text}>", "max_tokens": 8, "timeout_s": 20},
    "check": {"policy": "q", "prompt": "{text}>", "max_tokens": 8, "timeout_s": 20},
}
BALANCE = {
    "rule": "queue_gap", "queue_gap": 1, "confirm": 1, "residence_s": 0, "interval_s": 0.02,
    "forecast": False,
}  # fmt: skip

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def make(tmp_path, services):
    await services.revive()

    def build(*, policies, balance) -> Cluster:
        config = run_config(
            write_model(tmp_path / "model"), write_team(tmp_path / "package", TEAM),
            agents=AGENTS, policies=policies, rollout={"balance": balance},
        )  # fmt: skip
        return Cluster(services, config)

    return build


def policies(*, p: int, q: int, capacity: int = 1) -> dict:
    return {
        name: {"rollout": {"instances": count, "max_concurrency": capacity}}
        for name, count in (("p", p), ("q", q))
    }


class PartialHost(HostStandIn):
    """Answers nothing by itself; an abort gives back the tokens that `drawn` says."""

    def __init__(self, *args, drawn: list[int], **kwargs) -> None:
        super().__init__(*args, answer=lambda _: None, **kwargs)
        self.drawn = drawn
        self.plans: list[dict[str, list[str]]] = []

    def _take(self, message) -> None:
        if message.HasField("plan"):
            self.plans.append({s.instance_id: list(s.policies) for s in message.plan.instances})
        super()._take(message)
        for attempt in message.aborts:
            self.send(results=[self.result_of(self.request(attempt), self.drawn, "abort")])

    def request(self, attempt: str) -> eng.GenerateRequest:
        return next(r for r in reversed(self.requests) if r.attempt_id == attempt)

    def result_of(self, request, tokens, finish_reason) -> eng.GenerateResult:
        status = self.statuses[request.instance_id]
        return eng.GenerateResult(
            attempt_id=request.attempt_id, instance_id=request.instance_id,
            version=status.version, weights_hash=status.weights_hash, tokens=tokens,
            logprobs=[-0.25] * len(tokens), finish_reason=finish_reason,
            version_runs=[VersionRun(version=status.version, num_tokens=len(tokens))],
            num_kept=request.num_kept,
        )  # fmt: skip

    def end(self, request, tokens=(1,)) -> None:
        self.send(results=[self.result_of(request, list(tokens), "stop")])

    def asked(self, policy: str) -> list[eng.GenerateRequest]:
        return [r for r in self.requests if r.policy == policy]


async def opened(cluster: Cluster, tmp_path, *, drawn=(7, 8, 9)) -> PartialHost:
    await cluster.create_run(tmp_path / "data.jsonl")
    host = PartialHost(cluster.rollout_service.address, drawn=list(drawn)).start()
    cluster.hosts.append(host)
    await cluster.open()
    await cluster.activate(0)
    await cluster.until(lambda s: s.ready)
    return host


async def until(condition, timeout_s: float = 20) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110, RUF100
            await asyncio.sleep(0.01)


async def admit(cluster: Cluster, agent: str, *, group: int, samples: int) -> list[str]:
    group_id = GroupId(BatchId(0), group)
    query = json.dumps({"agent": agent}).encode()
    row = Group(
        group_id=str(group_id), batch=0, ordinal=group, query_json=query, num_samples=samples,
        status=GROUP_STATUS_OPEN,
    )  # fmt: skip
    await cluster.store.write_graph(cluster.run_id, term=cluster.term, groups=[row])
    specs = [cluster.spec(SampleId(group_id, n), query) for n in range(samples)]
    await cluster.start(specs)
    return [spec.sample_id for spec in specs]


async def test_an_instance_moves_with_its_request_which_goes_on_where_it_was(make, tmp_path):
    async with make(policies=policies(p=1, q=2), balance=BALANCE) as cluster:
        host = await opened(cluster, tmp_path)
        checks = await admit(cluster, "check", group=0, samples=2)
        await until(lambda: len(host.asked("q")) == 2)
        solves = await admit(cluster, "solve", group=1, samples=4)
        # Three of four wait for p and none for q: an instance of q is given to p.
        await until(lambda: len(host.asked("p")) == 2)
        (moved,) = {i for plan in host.plans for i, p in plan.items() if p == ["p"] and i[0] == "q"}
        assert {r.instance_id for r in host.asked("p")} == {"p-0", moved}
        assert [load.policy for load in host.loads if moved in load.instance_ids] == ["q", "p"]
        assert len(host.aborts) == 1
        first = host.request(host.aborts[0])
        assert first.instance_id == moved

        # The other instance of q ends its call, and goes on with the one that was moved.
        (other,) = [r for r in host.asked("q") if r.attempt_id != first.attempt_id]
        host.end(other)
        await until(lambda: len(host.asked("q")) == 3)
        again = host.asked("q")[2]
        assert again.instance_id == other.instance_id
        assert list(again.prompt_tokens) == [*first.prompt_tokens, 7, 8, 9]
        assert (again.num_kept, again.sampling.max_tokens) == (3, first.sampling.max_tokens - 3)
        assert again.sampling.seed == first.sampling.seed
        host.end(again, [4, 5])
        for n in range(4):
            await until(lambda n=n: len(host.asked("p")) > n)
            host.end(host.asked("p")[n])
        status = await cluster.until_ended()
        assert status.counters["moves"] >= 1
        assert status.counters["handed_over"] >= 1
        assert status.counters["handed_over_tokens"] >= 3
        assert "retries" not in status.counters
        assert {s.status for s in (await cluster.samples()).values()} == {SAMPLE_STATUS_DONE}

        # The row is whole, and says where one instance ended and the other began.
        sample_id = first.attempt_id.partition("/")[0]
        assert sample_id in checks and sample_id not in solves
        (vertex,) = (await cluster.graph(sample_id)).vertices
        assert list(vertex.payload.response_tokens) == [7, 8, 9, 4, 5]
        assert list(vertex.payload.logprobs) == [-0.25] * 5
        assert [(r.version, r.num_tokens) for r in vertex.meta.version_runs] == [(0, 3), (0, 2)]
        assert vertex.meta.num_prompt_tokens == len(first.prompt_tokens)
        assert (vertex.meta.num_response_tokens, vertex.meta.finish_reason) == (5, "stop")


async def test_a_move_is_logged_with_its_reason_and_is_in_the_timeline(make, tmp_path, services):
    async with make(policies=policies(p=1, q=2), balance=BALANCE) as cluster:
        host = await opened(cluster, tmp_path)
        await admit(cluster, "solve", group=0, samples=4)
        await until(lambda: len(host.asked("p")) == 2)
        log = services.folder / "rollout/log.jsonl"
        whole = log.read_text().rpartition("\n")[0]  # the dispatcher may be writing the next one
        lines = [json.loads(line) for line in whole.splitlines()]
        (line,) = [
            x for x in lines if x["event"] == "instance_moves" and x["run"] == cluster.run_id
        ]
        assert (line["giver"], line["receiver"], line["restart"]) == ("q", "p", False)
        # At least two more than at q, which is enough: the four came within one look, or two.
        assert re.match("queue_gap: [23] wait for p", line["reason"])
        spans = services.folder / "rollout/data/spans" / cluster.run_id
        await until(lambda: any("q to p" in f.read_text() for f in spans.glob("*.jsonl")))
        for n in range(4):
            await until(lambda n=n: len(host.asked("p")) > n)
            host.end(host.asked("p")[n])
        await cluster.until_ended()


async def test_after_the_batch_instances_go_where_the_next_one_needs_them(make, tmp_path):
    balance = {"forecast": True, "interval_s": 60}
    async with make(policies=policies(p=1, q=3), balance=balance) as cluster:
        host = await opened(cluster, tmp_path)
        host.answer = lambda request: [1] if request.policy == "q" else None
        await admit(cluster, "solve", group=0, samples=3)
        begun_s = time.monotonic()
        await admit(cluster, "check", group=1, samples=1)
        await cluster.until(lambda s: s.counters["samples_done"] == 1)
        took_s = time.monotonic() - begun_s
        for n in range(3):
            await until(lambda n=n: len(host.asked("p")) > n)
            await asyncio.sleep(max(0.3, took_s))  # no call of p is faster than that of q
            host.end(host.asked("p")[n], [1] * 8)
        await cluster.until_ended()
        await cluster.rollout.prepare_weights(
            cluster.run_id, 1, dict(cluster.manifest(1).policies), term=cluster.term
        )
        await cluster.activate(1)
        status = await cluster.until(lambda s: s.ready and {i.version for i in s.instances} == {1})
        served = sorted(policy for i in status.instances for policy in i.policies)
        assert served.count("p") > 1
        assert served.count("q") >= 1
        assert status.counters["moves"] == served.count("p") - 1


async def test_with_the_rule_off_nothing_moves(make, tmp_path):
    async with make(policies=policies(p=1, q=2), balance={"rule": "off"}) as cluster:
        host = await opened(cluster, tmp_path)
        await admit(cluster, "solve", group=0, samples=4)
        await cluster.until(lambda s: s.queues["p"].num_waiting == 3)
        await asyncio.sleep(0.3)
        assert len(host.asked("p")) == 1
        for n in range(4):
            await until(lambda n=n: len(host.asked("p")) > n)
            host.end(host.asked("p")[n])
        status = await cluster.until_ended()
        assert status.counters["moves"] == 0

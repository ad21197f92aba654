"""A real store and a real dispatcher as processes; stand-ins for orchestrator and engine host."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
from ports import own_port

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.common.v1.common_pb2 import ShardAddress, VersionRun
from flexmarl.api.meg_store.v1.graph_pb2 import Group, Manifest, PolicyManifest
from flexmarl.api.meg_store.v1.meg_store_pb2 import VERTEX_VIEW_FULL
from flexmarl.api.rollout.v1 import engine_pb2 as eng
from flexmarl.api.rollout.v1.rollout_pb2 import RolloutStatus, SampleSpec
from flexmarl.api.rollout.v1.rollout_pb2_grpc import RolloutServiceStub
from flexmarl.client.channel import connect
from flexmarl.client.errors import FlexMarlError
from flexmarl.client.rollout import RolloutClient
from flexmarl.client.runs import RunSource, store_run
from flexmarl.client.store import StoreClient
from flexmarl.core.ids import BatchId, GroupId, SampleId
from flexmarl.core.seeds import sample_seed
from flexmarl.runtime.run_config import RunConfig

Answer = Callable[[eng.GenerateRequest], list[int] | common_pb2.Failure | None]


class Service:
    """One service process."""

    def __init__(self, module: str, folder: Path, *sets: str) -> None:
        self.folder = folder
        self.module = module
        self.sets = sets
        self.port = own_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.address = ""

    async def start(self) -> Service:
        """Starts it, always at the same address."""
        self.folder.mkdir(parents=True, exist_ok=True)
        address_file = self.folder / "address.json"
        address_file.unlink(missing_ok=True)
        sets = [
            f"server.address_file={address_file}", f"server.port={self.port}",
            f"log.file={self.folder / 'log.jsonl'}", *self.sets,
        ]  # fmt: skip
        arguments = [part for item in sets for part in ("--set", item)]
        output = (self.folder / "output.txt").open("ab")
        self.process = subprocess.Popen(  # noqa: ASYNC220 - before anything else runs
            [sys.executable, "-m", self.module, *arguments],
            stdout=output, stderr=output, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        output.close()
        async with asyncio.timeout(40):
            while not address_file.exists():
                assert self.process.poll() is None, (self.folder / "output.txt").read_text()
                await asyncio.sleep(0.02)
        self.address = json.loads(address_file.read_text())["address"]
        return self

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    async def ensure(self) -> None:
        """Starts it if it does not run."""
        if not self.alive:
            await self.start()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int | None:
        if self.process is None:
            return None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
        return self.process.returncode


def seeded_tokens(request: eng.GenerateRequest) -> list[int]:
    """What a real engine does: tokens that are a function of seed and prompt alone."""
    seed = request.sampling.seed
    count = min(request.sampling.max_tokens, 4)
    return [(seed + 7 * t + sum(request.prompt_tokens)) % 36 for t in range(count)]


class HostStandIn:
    """Speaks the real stream; answers at once, or as `answer` says.

    Attributes:
        requests: What came, in order.
        loads: Weight orders that came.
        aborts: Attempts that were aborted.
        stored: Attempts that were acknowledged.
        specs: Instances of the newest plan, by id.
        num_streams: How often the dispatcher has answered when it dialled.
    """

    def __init__(
        self, address: str, *, host_id: str = "h0", answer: Answer = seeded_tokens, room: int = 0
    ) -> None:
        self.address = address
        self.host_id = host_id
        self.answer = answer
        self.room = room
        self.incarnation = uuid.uuid4().hex
        self.requests: list[eng.GenerateRequest] = []
        self.loads: list[eng.LoadWeights] = []
        self.aborts: list[str] = []
        self.stored: set[str] = set()
        self.statuses: dict[str, eng.InstanceStatus] = {}
        self.unacked: dict[str, eng.GenerateResult] = {}
        self.in_hand: dict[str, eng.GenerateRequest] = {}  # running, or ended and not acknowledged
        self.specs: dict[str, eng.InstanceSpec] = {}
        self.run_id = ""
        self.num_streams = 0
        self.mislabel: dict[str, Any] = {}
        self.drop_stored = False
        self._out: asyncio.Queue[eng.ConnectEngineHostRequest] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> HostStandIn:
        self._task = asyncio.create_task(self._run())
        return self

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            channel = connect(self.address)
            try:
                await self._converse(channel)
            except FlexMarlError:
                await asyncio.sleep(0.05)
            finally:
                await channel.close()

    async def _converse(self, channel: Any) -> None:
        # A channel that failed waits longer and longer: a new one soon finds who is back.
        await channel.wait_ready(timeout_s=1)
        call: Any = RolloutServiceStub(channel).ConnectEngineHost(timeout=600)
        self._out = asyncio.Queue()
        hello = eng.HostHello(
            host_id=self.host_id, incarnation=self.incarnation, max_instances=self.room,
            instances=self.statuses.values(), run_id=self.run_id, attempt_ids=self.in_hand.keys(),
            held=[
                eng.HeldAttempt(
                    instance_id=r.instance_id, version=r.version, input_hash=r.input_hash,
                    num_kept=r.num_kept,
                ) for r in self.in_hand.values()
            ],
        )  # fmt: skip
        await call.write(eng.ConnectEngineHostRequest(hello=hello, results=self.unacked.values()))
        writer = asyncio.create_task(self._write(call))
        is_answered = False
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                self.num_streams += not is_answered
                is_answered = True
                self._take(message)
        finally:
            writer.cancel()
            call.cancel()

    async def _write(self, call: Any) -> None:
        while True:
            message = await self._out.get()
            while not self._out.empty():
                message.MergeFrom(self._out.get_nowait())
            await call.write(message)

    def _take(self, message: eng.ConnectEngineHostResponse) -> None:
        if not self.drop_stored:
            self.stored.update(message.stored)
            for attempt in message.stored:
                self.unacked.pop(attempt, None)
                self.in_hand.pop(attempt, None)
        reply = eng.ConnectEngineHostRequest()
        if message.HasField("plan"):
            self.run_id = message.plan.run_id
            self.specs = wanted = {spec.instance_id: spec for spec in message.plan.instances}
            self.statuses = {k: v for k, v in self.statuses.items() if k in wanted}
            for name, spec in wanted.items():
                if name not in self.statuses:
                    self.set_status(name, list(spec.policies), eng.INSTANCE_STATE_EMPTY)
            reply.instances.extend(self.statuses.values())
            reply.results.extend(self._results_of_lost())
        for load in message.loads:
            self.loads.append(load)
            for name in load.instance_ids:
                status = self.set_status(
                    name, [load.policy], eng.INSTANCE_STATE_SERVING, load.version, load.weights_hash
                )
                reply.instances.append(status)
        self.aborts.extend(message.aborts)
        for request in message.requests:
            if request.attempt_id in self.in_hand:
                continue  # as a real host does: an attempt is sampled once
            self.requests.append(request)
            self.in_hand[request.attempt_id] = request
            result = self._result(request)
            if result is not None:
                reply.results.append(result)
        if reply.instances or reply.results:
            self._out.put_nowait(reply)

    def set_status(
        self, name: str, policies: list[str], state: Any, version: int = 0, weights_hash: str = ""
    ) -> eng.InstanceStatus:
        status = eng.InstanceStatus(
            instance_id=name, host_id=self.host_id, policies=policies, state=state,
            version=version, weights_hash=weights_hash,
        )  # fmt: skip
        self.statuses[name] = status
        return status

    def _results_of_lost(self) -> list[eng.GenerateResult]:
        """Attempts end with the instances that no plan names any more."""
        lost = []
        for name, request in self.in_hand.items():
            if name not in self.unacked and request.instance_id not in self.statuses:
                result = eng.GenerateResult(
                    attempt_id=name, instance_id=request.instance_id, infrastructure=True,
                    failure=common_pb2.Failure(reason="CHILD_DIED", message="stopped"),
                )  # fmt: skip
                lost.append(result)
        self.unacked.update((result.attempt_id, result) for result in lost)
        return lost

    def _result(self, request: eng.GenerateRequest) -> eng.GenerateResult | None:
        answer = self.answer(request)
        if answer is None:
            return None
        status = self.statuses[request.instance_id]
        result = eng.GenerateResult(
            attempt_id=request.attempt_id, instance_id=request.instance_id,
            version=status.version, weights_hash=status.weights_hash,
        )  # fmt: skip
        if isinstance(answer, common_pb2.Failure):
            result.failure.CopyFrom(answer)
            result.infrastructure = answer.metadata.get("infra", "") == "yes"
        else:
            result.tokens.extend(answer)
            result.logprobs.extend([-0.5] * len(answer))
            result.finish_reason = "length"
            result.version_runs.append(VersionRun(version=result.version, num_tokens=len(answer)))
        for name, value in self.mislabel.items():
            setattr(result, name, value)
        self.unacked[result.attempt_id] = result
        return result

    def send(self, *, instances: Iterable[Any] = (), results: Iterable[Any] = ()) -> None:
        self._out.put_nowait(eng.ConnectEngineHostRequest(instances=instances, results=results))

    def unanswered(self) -> list[eng.GenerateRequest]:
        """Requests that run."""
        return [request for name, request in self.in_hand.items() if name not in self.unacked]

    def finish(self, request: eng.GenerateRequest, tokens: list[int]) -> None:
        """Answers a request that was left unanswered."""
        keep, self.answer = self.answer, lambda _: tokens
        result = self._result(request)
        self.answer = keep
        self.send(results=[result])


async def user_code_of(cluster: Cluster, kind: str) -> int:
    """Pid of the process that runs the run's user code: kind `worker` or `reward`.

    By the dispatcher's own record: processes of an earlier test's run may be ending still, and this
    one's may be starting.
    """
    record = cluster.rollout_service.folder / "data/children-dispatcher.json"
    name = f"{kind}-{cluster.run_id}-0"
    async with asyncio.timeout(30):
        while True:
            children = json.loads(record.read_text()) if record.exists() else []
            for child in children:
                if child["name"] == name:
                    return int(child["pid"])
            await asyncio.sleep(0.02)


class Services:
    """A store and a dispatcher, shared by the tests of a module; what a test killed comes back."""

    def __init__(self, folder: Path, **sets: Any) -> None:
        self.folder = folder
        self.shm = Path(f"/dev/shm/flexmarl-test-{uuid.uuid4().hex[:12]}")
        self.store = Service(
            "flexmarl.meg_store", folder / "store",
            f"store.data_dir={folder / 'store/data'}", f"store.shm_dir={self.shm}",
            "store.durability=process",
        )  # fmt: skip
        self.rollout = Service(
            "flexmarl.rollout", folder / "rollout", f"data_dir={folder / 'rollout/data'}",
            *(f"{key}={value}" for key, value in sets.items()),
        )  # fmt: skip

    async def revive(self) -> None:
        await asyncio.gather(self.store.ensure(), self.rollout.ensure())

    def stop(self) -> None:
        self.rollout.stop()
        self.store.stop()
        shutil.rmtree(self.shm, ignore_errors=True)


class Cluster:
    """One run at the shared services."""

    def __init__(self, services: Services, config: RunConfig) -> None:
        self.config = config
        self.run_id = f"r{uuid.uuid4().hex[:8]}"
        self.store_service = services.store
        self.rollout_service = services.rollout
        self.term = 0
        self.hosts: list[HostStandIn] = []

    async def __aenter__(self) -> Cluster:
        self.store = StoreClient.connect(self.store_service.address)
        self.rollout = RolloutClient.connect(self.rollout_service.address)
        return self

    async def __aexit__(self, *_: object) -> None:
        for host in self.hosts:
            await host.stop()
        if self.rollout_service.alive:
            await self.rollout.close_run(self.run_id, term=1 << 40)
        await self.rollout.close()
        await self.store.close()

    def host(self, **kwargs: Any) -> HostStandIn:
        host = HostStandIn(self.rollout_service.address, **kwargs).start()
        self.hosts.append(host)
        return host

    @property
    def shards(self) -> list[ShardAddress]:
        return [ShardAddress(name="s0", address=self.store_service.address)]

    async def create_run(self, dataset: Path) -> None:
        dataset.write_text("{}\n")  # noqa: ASYNC240, RUF100
        source = RunSource(
            run_id=self.run_id, config_json=self.config.model_dump_json().encode(),
            portable_config_json=b"{}", package=self.config.workflow.package, exclude=(),
            dataset=dataset,
            models={name: p.model.path for name, p in self.config.policies.items()},
        )  # fmt: skip
        await store_run(self.store, source, shards=self.shards)

    async def open(self) -> str:
        self.term = await self.store.acquire_term(self.run_id, "orchestrator", holder="test")
        return await self.rollout.open_run(self.run_id, term=self.term, shards=self.shards)

    def manifest(self, version: int) -> Manifest:
        policies = {
            name: PolicyManifest(
                weights=common_pb2.ObjectRef(shard="s0", key=f"{self.run_id}.{name}.v{version}"),
                weights_hash=f"hash-{name}-{version}",
            )
            for name in self.config.policies
        }
        return Manifest(version=version, policies=policies)

    async def activate(self, version: int) -> None:
        await self.rollout.activate_version(self.run_id, self.manifest(version), term=self.term)

    async def admit(
        self,
        batch: int,
        *,
        groups: int = 1,
        samples: int = 1,
        query: Any = None,
        queries: list[Any] | None = None,
        start: bool = True,
    ) -> list[str]:
        """Writes groups and starts their samples, as an orchestrator does."""
        groups = groups if queries is None else len(queries)
        specs, rows = [], []
        for g in range(groups):
            group = GroupId(BatchId(batch), g)
            asked = queries[g] if queries is not None else query or {"n": g}
            text = json.dumps(asked).encode()
            rows.append(
                Group(
                    group_id=str(group), batch=batch, ordinal=g, query_json=text,
                    num_samples=samples, status=common_pb2.GROUP_STATUS_OPEN,
                )
            )  # fmt: skip
            specs += [self.spec(SampleId(group, s), text) for s in range(samples)]
        await self.store.write_graph(self.run_id, term=self.term, groups=rows)
        if start:
            await self.start(specs)
        self.specs = specs
        return [spec.sample_id for spec in specs]

    async def start(self, specs: list[SampleSpec]) -> None:
        await self.rollout.start_samples(self.run_id, specs, term=self.term)

    def spec(self, sample: SampleId, query: bytes) -> SampleSpec:
        batch, group = sample.group.batch.batch, sample.group.ordinal
        return SampleSpec(
            sample_id=str(sample), group_id=str(sample.group), batch=batch, ordinal=sample.ordinal,
            sample_attempt=sample.attempt, group_ordinal=group, query_json=query, version=batch,
            seed=sample_seed(self.config.seed, batch=batch, group=group, sample=sample.ordinal),
        )  # fmt: skip

    async def status(self) -> RolloutStatus:
        return await self.rollout.get_status(self.run_id)

    async def until(
        self, condition: Callable[[RolloutStatus], bool], *, timeout_s: float = 30
    ) -> RolloutStatus:
        status = None
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    status = await self.status()
                    if condition(status):
                        return status
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"not reached; last status:\n{status}") from None

    async def until_ended(self, timeout_s: float = 30) -> RolloutStatus:
        return await self.until(lambda s: s.num_open_samples == 0, timeout_s=timeout_s)

    async def samples(self, batch: int = 0) -> dict[str, Any]:
        return {s.sample_id: s for s in await self.store.list_samples(self.run_id, batch=batch)}

    async def graph(self, sample_id: str) -> Any:
        return await self.store.get_sample_graph(self.run_id, sample_id, view=VERTEX_VIEW_FULL)

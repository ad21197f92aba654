"""An engine host in the test's own process: the real core, book, router and outbox; model engines.

Its engines answer after random times with tokens that are a function of the prompt alone, so that
whoever is given an answer can tell whether it is the one to what was asked, all of it.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from random import Random
from typing import assert_never

from flexmarl.api.common.v1.common_pb2 import VersionRun
from flexmarl.api.rollout.v1 import engine_pb2 as eng
from flexmarl.core.engine_host import EngineHost
from flexmarl.core.engine_host_events import (
    EngineEnded,
    EngineHostConfig,
    EngineReadied,
    LoadEnded,
    LoadEngine,
    Problem,
    ReportInstance,
    SetTimer,
    StartEngine,
    StopEngine,
    TimerFired,
)
from flexmarl.core.errors import ErrorReason
from flexmarl.rollout.dispatcher.hosts import Hosts
from flexmarl.rollout.engines.results import cut_by_load, refused_version
from flexmarl.rollout.host.attempts import AttemptBook
from flexmarl.rollout.host.convert import instance_status, load_ordered, plan_received
from flexmarl.rollout.host.outbox import Outbox
from flexmarl.rollout.host.requests import RequestRouter

CONFIG = EngineHostConfig(start_timeout_s=60, load_timeout_s=30, backoff_max_s=2, stable_s=3)


def response(prompt: list[int], count: int) -> list[int]:
    """What every engine answers to a prompt."""
    return [(sum(prompt) + 7 * place + len(prompt)) % 97 for place in range(count)]


class ModelEngine:
    """One engine of a host."""

    def __init__(self, host: ModelHost, start: StartEngine) -> None:
        self.host = host
        self.instance_id = start.wanted.instance_id
        self.policies = start.wanted.policies
        self.generation = start.generation
        self.ready = False
        self.version: int | None = None
        self.weights_hash = ""
        self.running: dict[str, eng.GenerateRequest] = {}

    def generate(self, requests) -> None:
        for request in requests:
            if request.version != self.version:
                refused = refused_version(request, version=self.version, now_ns=0)
                self.host.router.finish([refused])
                continue
            self.running[request.attempt_id] = request
            self.host.drawn.append((self.instance_id, request.attempt_id))
            delay_s = self.host.rng.expovariate(1 / self.host.mean_s)
            self.host.later(delay_s, self.end, request, "length")

    def abort(self, attempt_ids) -> None:
        for attempt_id in attempt_ids:
            if (request := self.running.get(attempt_id)) is not None:
                self.host.later(self.host.rng.random() * 0.2, self.end, request, "abort")

    def end(self, request: eng.GenerateRequest, why: str) -> None:
        if self.running.get(request.attempt_id) is not request:
            return
        del self.running[request.attempt_id]
        prompt, kept = list(request.prompt_tokens), request.num_kept
        whole = response(prompt[: len(prompt) - kept], kept + request.sampling.max_tokens)
        tokens = whole[kept:]
        if why == "abort":
            tokens = tokens[: self.host.rng.randrange(len(tokens))]
        self.host.router.finish(
            [
                eng.GenerateResult(
                    attempt_id=request.attempt_id, instance_id=self.instance_id,
                    version=request.version, weights_hash=self.weights_hash, tokens=tokens,
                    logprobs=[-0.5] * len(tokens), finish_reason=why,
                    version_runs=[VersionRun(version=request.version, num_tokens=len(tokens))],
                )
            ]
        )  # fmt: skip

    def take_over(self, load: LoadEngine) -> None:
        if load.order.weights_hash != self.weights_hash:
            cut, self.running = list(self.running.values()), {}
            version = load.order.version
            self.host.router.finish([cut_by_load(r, version=version, now_ns=0) for r in cut])
        self.version, self.weights_hash = load.order.version, load.order.weights_hash


class ModelHost:
    """See the module.

    Attributes:
        starts: Engine processes started, by instance, in order.
        drawn: (instance, attempt) of every request that an engine has begun.
    """

    def __init__(self, host_id: str, *, room: int, rng: Random, mean_s: float = 1.0) -> None:
        self.host_id = host_id
        self.room = room
        self.rng = rng
        self.mean_s = mean_s
        self.refuse_loads = 0.0
        self.num_refused = 0
        self.starts: list[str] = []
        self.drawn: list[tuple[str, str]] = []
        self.begin_anew()

    def begin_anew(self) -> None:
        """The process is another one: nothing of before is known."""
        self.incarnation = f"{self.rng.random()}"
        self.core = EngineHost(CONFIG)
        self.book = AttemptBook(max_attempts=1000)
        self.outbox = Outbox()
        self.engines: dict[str, ModelEngine] = {}
        self.router = RequestRouter(
            book=self.book, outbox=self.outbox, find_engine=self.engines.get
        )
        self.task: asyncio.Task[None] | None = None

    def later(self, delay_s: float, do, *args) -> None:
        """Does something later, unless the process is another one by then."""
        incarnation = self.incarnation

        def act() -> None:
            if self.incarnation == incarnation:
                do(*args)

        asyncio.get_running_loop().call_later(delay_s, act)

    # Its stream.

    def dial(self, hosts: Hosts) -> None:
        self.task = asyncio.create_task(self._converse(hosts), name=self.host_id)

    async def hang_up(self) -> None:
        task, self.task = self.task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _converse(self, hosts: Hosts) -> None:
        async with aclosing(hosts.serve(self._requests())) as messages:
            async for message in messages:
                await asyncio.sleep(self.rng.random() * 0.01)
                self._take(eng.ConnectEngineHostResponse.FromString(message.SerializeToString()))

    async def _requests(self):
        self.outbox.reset(self.book.unacknowledged())
        held = self.book.held()
        yield eng.ConnectEngineHostRequest(
            hello=eng.HostHello(
                host_id=self.host_id, incarnation=self.incarnation, max_instances=self.room,
                instances=[self._status(name) for name in self.core.instance_ids()],
                attempt_ids=held.keys(), held=held.values(), run_id=self.core.run_id,
            )
        )  # fmt: skip
        while True:
            message = await self.outbox.take()
            await asyncio.sleep(self.rng.random() * 0.01)
            yield eng.ConnectEngineHostRequest.FromString(message.SerializeToString())

    def _take(self, message: eng.ConnectEngineHostResponse) -> None:
        self.book.acknowledge(message.stored)
        if message.HasField("plan"):
            self.handle(plan_received(message.plan))
            for spec in message.plan.instances:
                if engine := self.engines.get(spec.instance_id):
                    engine.policies = tuple(spec.policies)
        for load in message.loads:
            self.handle(load_ordered(load))
        self.router.route(message.requests)
        self.router.abort(message.aborts)

    # Its engines.

    def handle(self, event) -> None:
        for effect in self.core.handle(event, asyncio.get_running_loop().time()):
            self._execute(effect)

    def _execute(self, effect) -> None:
        match effect:
            case StartEngine():
                engine = ModelEngine(self, effect)
                self.starts.append(engine.instance_id)
                self.engines[engine.instance_id] = engine
                self.later(self.rng.random() * 0.5, self._ready, engine)
            case StopEngine():
                self.end_engine(effect.instance_id, effect.generation)
            case LoadEngine():
                self.later(self.rng.random() * 0.3, self._loaded, effect)
            case ReportInstance():
                if (status := self._status(effect.instance_id)) is not None:
                    self.outbox.set_status(status)
            case SetTimer():
                loop = asyncio.get_running_loop()
                self.later(max(effect.at - loop.time(), 0.0), self.handle, TimerFired())
            case _:
                assert_never(effect)

    def _ready(self, engine: ModelEngine) -> None:
        if self.engines.get(engine.instance_id) is engine:
            engine.ready = True
            self.handle(EngineReadied(instance_id=engine.instance_id, generation=engine.generation))

    def _loaded(self, load: LoadEngine) -> None:
        engine = self.engines.get(load.instance_id)
        if engine is None or engine.generation != load.generation:
            return
        problem = None
        if self.rng.random() < self.refuse_loads:
            problem = Problem("CHECKSUM_MISMATCH", "other bytes")
            self.num_refused += 1
        else:
            engine.take_over(load)
        self.handle(
            LoadEnded(
                instance_id=load.instance_id, generation=load.generation, load_id=load.load_id,
                problem=problem,
            )
        )  # fmt: skip

    def end_engine(self, instance_id: str, generation: int | None = None) -> None:
        """An engine's process ends, by itself or because it was told to."""
        engine = self.engines.get(instance_id)
        if engine is None or generation not in (None, engine.generation):
            return
        del self.engines[instance_id]
        engine.running.clear()
        self.router.fail_all_on(instance_id, ErrorReason.CHILD_DIED, "gone")
        self.handle(
            EngineEnded(
                instance_id=instance_id, generation=engine.generation,
                problem=Problem(ErrorReason.CHILD_DIED, "gone"),
            )
        )  # fmt: skip

    def _status(self, instance_id: str) -> eng.InstanceStatus | None:
        view = self.core.view(instance_id)
        if view is None:
            return None
        running = self.book.num_running_on(instance_id)
        return instance_status(view, host_id=self.host_id, pid=0, num_running=running)

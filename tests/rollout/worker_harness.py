"""A real worker process, and a stand-in for its dispatcher at the other end of the link."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1.graph_pb2 import Vertex, VertexMeta, VertexPayload
from flexmarl.api.rollout.v1.rollout_pb2 import SampleSpec
from flexmarl.api.rollout.v1.worker_pb2 import (
    AgentCall,
    CallAnswer,
    RewardCommand,
    RewardEvent,
    RewardJob,
    SampleEnd,
    WorkerCommand,
    WorkerEvent,
    WorkerReady,
    WorkerSample,
    WorkerSetup,
)
from flexmarl.runtime.children import ChildProcess, Children
from flexmarl.runtime.run_config import RunConfig

ALPHABET = [*"0123456789abcdefghijklmnopqrstuvwxyz", " ", ">", ",", ".", "<eos>"]
EOS = ALPHABET.index("<eos>")
SAMPLE = "b000000a0-g0000-s000a0"

PRELOAD = ("flexmarl.rollout.worker.main", "flexmarl.rollout.worker.reward_process")


def write_model(folder: Path, *, max_context: int = 64, chat_template: str | None = None) -> Path:
    """A model folder with a character-level tokenizer; it has no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(ALPHABET)}, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token_id": EOS, "max_position_embeddings": max_context, "vocab_size": 41}
    (folder / "config.json").write_text(json.dumps(config))
    settings: dict[str, Any] = {"eos_token": "<eos>"}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_team(folder: Path, source: str) -> Path:
    """A workflow package with the module `team`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "team.py").write_text(source)
    return folder


def run_config(
    model: Path,
    package: Path,
    *,
    agents: Mapping[str, Mapping[str, Any]] | None = None,
    policies: Mapping[str, Mapping[str, Any]] | None = None,
    workflow: Mapping[str, Any] | None = None,
    rollout: Mapping[str, Any] | None = None,
    advantage: Mapping[str, Any] | None = None,
) -> RunConfig:
    """A run's config around one model; agent `echo` by default."""
    agents = agents or {"echo": {"policy": "p", "prompt": "{text}>", "max_tokens": 4}}
    names = {agent["policy"] for agent in agents.values()}
    return RunConfig.model_validate(
        {
            "name": "test",
            "versions": 1,
            "dataset": {"path": "/data.jsonl"},
            "batch": {"groups": 1, "samples_per_group": 1},
            "workflow": {
                "package": str(package), "entry": "team:team", "reward": "team:reward",
                **(workflow or {}),
            },
            "policies": {
                name: {"model": {"path": str(model)}, **((policies or {}).get(name, {}))}
                for name in sorted(names)
            },
            "agents": agents,
            "rollout": rollout or {},
            "advantage": advantage or {},
        }
    )  # fmt: skip


def spec(sample_id: str = SAMPLE, query: Any = None, seed: int = 7) -> SampleSpec:
    """A sample to run."""
    return SampleSpec(
        sample_id=sample_id, group_id=sample_id.rsplit("-", 1)[0], seed=seed,
        query_json=json.dumps(query or {}).encode(),
    )  # fmt: skip


def tokens_of(text: str) -> list[int]:
    return [ALPHABET.index(c) for c in text]


def text_of(tokens) -> str:
    return "".join(ALPHABET[t] for t in tokens)


def echo_tokens(call: AgentCall) -> list[int]:
    """An answer that is a function of the input alone: its first four characters, reversed."""
    return list(call.prompt_tokens)[:4][::-1]


class WorkerHarness:
    """Talks to one worker process.

    Attributes:
        calls: Calls that came, in order.
        tools: Tool vertices that came.
        cut: Vertices that were cut.
        left: Policies that samples have left, by sample id.
        stored_before: What tools shall find stored already, by path.
        ends: Ends by sample id.
        stored: Vertex rows by sample id, as the dispatcher would have stored them.
    """

    def __init__(self, child: ChildProcess, children: Children) -> None:
        self.child = child
        self._children = children
        self._setup = WorkerSetup()
        self._reward_child: ChildProcess | None = None
        self.calls: list[AgentCall] = []
        self.tools: list[Vertex] = []
        self.cut: list[str] = []
        self.left: dict[str, list[str]] = {}
        self.stored_before: dict[str, bytes] = {}
        self.ends: dict[str, SampleEnd] = {}
        self.stored: dict[str, list[Vertex]] = {}

    @classmethod
    async def start(
        cls,
        children: Children,
        tmp_path: Path,
        name: str = "w0",
        limits: Mapping[str, Any] | None = None,
    ) -> WorkerHarness:
        child = await children.spawn_preloaded(
            "flexmarl.rollout.worker.main:run",
            {
                "report": str(tmp_path / f"{name}.json"),
                "log": {"level": "warning"},
                "limits": limits or {},
            },
            name=name,
        )
        return cls(child, children)

    async def send(self, command: WorkerCommand) -> None:
        await self.child.link.send(command.SerializeToString())

    async def recv(self) -> WorkerEvent:
        async with asyncio.timeout(20):
            frame = await self.child.link.recv()
        assert frame is not None, "the worker ended"
        return WorkerEvent.FromString(frame)

    async def set_up(self, config: RunConfig, package: Path) -> WorkerReady:
        paths = {name: str(policy.model.path) for name, policy in config.policies.items()}
        self._setup = WorkerSetup(
            run_id="r", workflow_path=str(package), model_paths=paths,
            config_json=config.model_dump_json().encode(),
        )  # fmt: skip
        await self.send(WorkerCommand(setup=self._setup))
        return (await self.recv()).ready

    async def score(self, end: SampleEnd) -> None:
        """Has a finished sample scored by a reward process, as the dispatcher does."""
        job = RewardJob(sample_id=end.sample_id, job_json=end.reward_job)
        command = RewardCommand(jobs=[job])
        if self._reward_child is None:
            self._reward_child = await self._children.spawn_preloaded(
                "flexmarl.rollout.worker.reward_process:run",
                {"log": {"level": "warning"}, "limits": {}},
                name=f"{self.child.name}-reward",
            )
            command.setup.CopyFrom(self._setup)
        link = self._reward_child.link
        await link.send(command.SerializeToString())
        while True:
            async with asyncio.timeout(20):
                frame = await link.recv()
            assert frame is not None, "the reward process ended"
            for result in RewardEvent.FromString(frame).results:
                if result.HasField("failure"):
                    end.status = common_pb2.SAMPLE_STATUS_FAILED
                    end.failure.CopyFrom(result.failure)
                else:
                    end.rewards.CopyFrom(result.rewards)
                return

    async def run(
        self,
        *samples: WorkerSample,
        answer: Callable[[AgentCall], CallAnswer | None] | None = None,
    ) -> dict[str, SampleEnd]:
        """Runs samples to their ends, answering their calls; None leaves a call unanswered."""
        await self.send(WorkerCommand(start=samples))
        return await self.until_ended([s.spec.sample_id for s in samples], answer=answer)

    async def until_ended(
        self,
        sample_ids: list[str],
        *,
        answer: Callable[[AgentCall], CallAnswer | None] | None = None,
    ) -> dict[str, SampleEnd]:
        answer = answer or (lambda call: CallAnswer(tokens=echo_tokens(call), finish_reason="stop"))
        while not set(sample_ids) <= self.ends.keys():
            await self.step(answer)
        return {sample_id: self.ends[sample_id] for sample_id in sample_ids}

    def store(self, call: AgentCall, answer: CallAnswer) -> None:
        """Keeps the row of an answered call."""
        self.stored.setdefault(call.sample_id, []).append(stored_row(call, answer))

    def stored_row_of(self, path: str, sample_id: str = SAMPLE) -> Vertex:
        """The kept row of a call."""
        (row,) = (row for row in self.stored[sample_id] if row.meta.path == path)
        return row

    async def step(self, answer: Callable[[AgentCall], CallAnswer | None]) -> None:
        """One frame in, one frame out."""
        event = await self.recv()
        reply = WorkerCommand()
        for vertex in event.tools:
            self.tools.append(vertex)
            self.stored.setdefault(vertex.meta.sample_id, []).append(vertex)
            before = self.stored_before.get(vertex.meta.path)
            reply.answers.append(
                CallAnswer(
                    vertex_id=vertex.meta.vertex_id,
                    stored_before=before is not None,
                    output=before or b"",
                )
            )
        for call in event.calls:
            self.calls.append(call)
            answered = answer(call)
            if answered is not None:
                answered.vertex_id = call.vertex_id
                reply.answers.append(answered)
                self.store(call, answered)
        self.cut.extend(event.cancelled_vertex_ids)
        for left in event.left:
            self.left[left.sample_id] = list(left.policies)
        for end in event.ends:
            if end.reward_job:
                await self.score(end)
            self.ends[end.sample_id] = end
        if reply.answers:
            await self.send(reply)


class Bench:
    """Starts workers on one module text."""

    def __init__(self, children, tmp_path) -> None:
        self.children = children
        self.tmp_path = tmp_path
        self.count = 0

    async def worker(self, source: str, **config) -> WorkerHarness:
        worker, ready = await self.try_worker(source, **config)
        assert not ready.HasField("failure"), ready.failure
        return worker

    async def try_worker(self, source: str, *, max_context=64, chat_template=None, **config):
        self.count += 1
        model = write_model(
            self.tmp_path / f"model{self.count}",
            max_context=max_context,
            chat_template=chat_template,
        )
        package = write_team(self.tmp_path / f"package{self.count}", source)
        worker = await WorkerHarness.start(self.children, self.tmp_path, f"w{self.count}")
        ready = await worker.set_up(run_config(model, package, **config), package)
        return worker, ready

    async def one(self, source: str, *, query=None, answer=None, **config):
        worker = await self.worker(source, **config)
        ends = await worker.run(WorkerSample(spec=spec(query=query)), answer=answer)
        return worker, ends[SAMPLE]


def stored_row(call: AgentCall, answer: CallAnswer) -> Vertex:
    """The row of a call that was answered."""
    failed = answer.HasField("failure")
    return Vertex(
        meta=VertexMeta(
            vertex_id=call.vertex_id, sample_id=call.sample_id, path=call.path, agent=call.agent,
            kind=common_pb2.VERTEX_KIND_AGENT, input_hash=call.input_hash,
            finish_reason=answer.finish_reason, failure=answer.failure if failed else None,
            finished_unix_ns=answer.finished_unix_ns,
            status=common_pb2.VERTEX_STATUS_FAILED if failed else common_pb2.VERTEX_STATUS_DONE,
        ),
        payload=VertexPayload(prompt_tokens=call.prompt_tokens, response_tokens=answer.tokens),
    )  # fmt: skip


def digest(values) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()

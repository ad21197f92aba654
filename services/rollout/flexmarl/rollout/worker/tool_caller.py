"""The tools' calls of one sample, and whatever else of the outside world is put on record.

A tool is called at least once: a run that is repeated before its result was stored calls it again.
With `once` the intent is stored before the tool runs; a repeated run that finds the intent without
a result cannot know whether the tool had its effect, so the sample fails. Results are durable
before the workflow has them, like answers of agents.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from flexmarl.api.meg_store.v1.graph_pb2 import Vertex
from flexmarl.api.rollout.v1.worker_pb2 import CallAnswer
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.paths import intent_path
from flexmarl.rollout.worker import failures
from flexmarl.rollout.worker.caller import call_failed
from flexmarl.rollout.worker.calls import to_json, tool_input_hash, tool_vertex, upstream_ids
from flexmarl.rollout.worker.exchange import Exchange
from flexmarl.rollout.worker.tool_threads import ToolThreads
from flexmarl.rollout.worker.user_code import UserCode
from flexmarl.rollout.workflow import CallError, Output

NOW: Final = "now"
"""Name of the vertices that record `ctx.now()`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A call that is ready to be made."""

    name: str
    path: str
    args: dict[str, Any]
    tool_input: bytes
    upstream: list[str]
    once: bool
    timeout_s: float | None


class ToolCaller:
    """Makes the calls of tools of one sample.

    Attributes:
        finished: Finished calls.

    Args:
        user: The tools.
        exchange: The sample's link to its dispatcher.
        threads: Where tools run that are not async.
    """

    def __init__(self, user: UserCode, *, exchange: Exchange, threads: ToolThreads) -> None:
        self.finished: list[Output] = []
        self._user = user
        self._exchange = exchange
        self._threads = threads

    def call(
        self,
        name: str,
        *,
        path: str,
        after: Output | Iterable[Output] | None,
        once: bool,
        timeout_s: float | None,
        args: dict[str, Any],
    ) -> Coroutine[Any, Any, Output]:
        """Checks a call of a tool; awaiting the result makes it."""
        if name not in self._user.tools:
            known = ", ".join(sorted(self._user.tools)) or "none"
            raise self._exchange.fail_sample(
                DomainError(
                    ErrorReason.UNKNOWN_AGENT,
                    f"ctx.tool({name!r}): the run has no such tool; its tools: {known}",
                    {"tool": str(name), "known": known},
                )
            )
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"tool {name!r}: timeout_s = {timeout_s} must be above 0")
        what, sample_id = f"tool {name!r}", self._exchange.spec.sample_id
        try:
            tool_input = to_json(args, what=f"arguments of {what}")
            upstream = upstream_ids(after, args, sample_id=sample_id, what=what)
        except DomainError as error:
            raise CallError(error.reason, error.message, error.metadata) from None
        return self._call(
            _Request(
                name=name,
                path=path,
                args=args,
                tool_input=tool_input,
                upstream=upstream,
                once=once,
                timeout_s=timeout_s,
            )
        )

    def now(self, path: str) -> float:
        """The time, as a vertex, so that a repeated run is given the same."""
        input_hash = tool_input_hash(NOW, b"")
        stored = self._exchange.replay.take(path, input_hash)
        if stored is not None:
            return float(stored.payload.output)
        unix_ns = time.time_ns()
        now = unix_ns / 1e9
        vertex = tool_vertex(
            self._exchange.spec,
            name=NOW,
            path=path,
            input_hash=input_hash,
            tool_input=b"{}",
            upstream=[],
            ready_unix_ns=unix_ns,
            finished_unix_ns=unix_ns,
            output=repr(now).encode(),
        )
        self._exchange.record(vertex)
        return now

    async def _call(self, request: _Request) -> Output:
        self._exchange.check_open("a tool was awaited")
        replay = self._exchange.replay
        input_hash = tool_input_hash(request.name, request.tool_input)
        intended = request.once and replay.take(intent_path(request.path), input_hash) is not None
        row = replay.take(request.path, input_hash)
        if row is None:
            if request.once:
                await self._intend(request, input_hash, again=intended)
            row = await self._run(request, input_hash)
        if row.meta.HasField("failure"):
            raise call_failed(row.meta.failure)
        return self._output(request, row)

    async def _intend(self, request: _Request, input_hash: bytes, *, again: bool) -> None:
        """Puts on record that the tool is about to run; once, or the sample fails."""
        if not again:
            now_ns = time.time_ns()
            intent = self._row(request, input_hash, path=intent_path(request.path), ready_ns=now_ns)
            again = await self._exchange.store(intent) is not None
        if again:
            raise self._exchange.fail_sample(
                DomainError(
                    ErrorReason.TOOL_RAISED,
                    f"tool {request.name!r} (once=True) was begun before a crash, and its result "
                    "was not stored: whether it took effect cannot be known",
                    {"tool": request.name},
                )
            )

    async def _run(self, request: _Request, input_hash: bytes) -> Vertex:
        what = f"tool {request.name!r}"
        ready_ns = time.time_ns()
        row = partial(self._row, request, input_hash, path=request.path, ready_ns=ready_ns)
        try:
            output = to_json(await self._value(request, what), what=f"value of {what}")
        except asyncio.CancelledError:
            if request.once:
                # A join cut it: a repeated run shall find how it ended, not an open intent.
                cut = failures.failure(ErrorReason.CANCELLED, f"{what} was cut")
                self._exchange.record(row(failure=cut))
            raise
        except (Exception, SystemExit) as error:
            failure = failures.of_exception(
                error, reason=ErrorReason.TOOL_RAISED, what=what, folder=self._user.folder
            )
            before = await self._exchange.store(row(failure=failure))
            if before is None:
                raise call_failed(failure) from error
        else:
            vertex = row(output=output)
            before = await self._exchange.store(vertex)
            if before is None:
                return vertex
        return _stored_before(row(), before)

    async def _value(self, request: _Request, what: str) -> Any:  # noqa: ANN401 - the user's
        function = self._user.tools[request.name]
        args = json.loads(request.tool_input)  # outputs as their values: what is on record
        limit = asyncio.timeout(request.timeout_s)
        try:
            async with limit:
                if inspect.iscoroutinefunction(function):
                    return await function(**args)
                return await self._threads.run(
                    partial(function, **args),
                    sample_id=self._exchange.spec.sample_id,
                    what=what,
                )
        except TimeoutError:
            if not limit.expired():
                raise
            raise DomainError(
                ErrorReason.DEADLINE_EXCEEDED,
                f"{what} did not end within timeout_s = {request.timeout_s:g}",
                {"tool": request.name},
            ) from None

    def _row(
        self,
        request: _Request,
        input_hash: bytes,
        *,
        path: str,
        ready_ns: int,
        **ended: Any,  # noqa: ANN401
    ) -> Vertex:
        return tool_vertex(
            self._exchange.spec,
            name=request.name,
            path=path,
            input_hash=input_hash,
            tool_input=request.tool_input,
            upstream=request.upstream,
            ready_unix_ns=ready_ns,
            finished_unix_ns=time.time_ns(),
            **ended,
        )

    def _output(self, request: _Request, row: Vertex) -> Output:
        # Also the first time the workflow is given what a repeated run would be given.
        encoded = row.payload.output
        value = json.loads(encoded)
        output = Output(
            value if isinstance(value, str) else encoded.decode(),
            (),
            "tool",
            self._exchange.vertex_id(request.path),
            request.name,
            request.path,
            value=value,
            inputs=request.args,
            finished_unix_ns=row.meta.finished_unix_ns,
        )
        self.finished.append(output)
        return output


def _stored_before(row: Vertex, before: CallAnswer) -> Vertex:
    """The row that another run of the same sample had stored already: that one counts."""
    row.payload.output = before.output
    row.meta.finished_unix_ns = before.finished_unix_ns
    if before.HasField("failure"):
        row.meta.failure.CopyFrom(before.failure)
    return row

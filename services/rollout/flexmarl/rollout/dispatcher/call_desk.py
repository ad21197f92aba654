"""Calls on their way: from a worker to an instance, to the store, and back.

Executes what `core.dispatch` decides. A result is written before its call is answered, and the host
is told that it may forget it once it is stored.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Final, NamedTuple, Protocol, assert_never

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.common.v1.common_pb2 import Failure
from flexmarl.api.meg_store.v1.graph_pb2 import Vertex
from flexmarl.api.meg_store.v1.meg_store_pb2 import (
    WRITE_OUTCOME_DUPLICATE,
    WRITE_OUTCOME_SUBGRAPH_CLOSED,
)
from flexmarl.api.rollout.v1.engine_pb2 import GenerateResult, HostHello
from flexmarl.api.rollout.v1.worker_pb2 import AgentCall, CallAnswer
from flexmarl.core.balance import Coming
from flexmarl.core.dispatch import Dispatcher
from flexmarl.core.dispatch_events import (
    Abort,
    Accept,
    Attach,
    AttemptFailed,
    AttemptsHeld,
    DispatchConfig,
    Duplicate,
    Effect,
    Event,
    Fail,
    HeldAttempt,
    Hold,
    InstanceChanged,
    InstanceVacating,
    Keep,
    Release,
    SampleEnded,
    Send,
    SetTimer,
    TimerFired,
    Vacated,
    VertexCancelled,
    VertexDetached,
    VertexReady,
    WeightsKnown,
    split_attempt_id,
)
from flexmarl.core.dispatch_records import PolicyBook
from flexmarl.core.errors import ErrorReason
from flexmarl.core.prefix_index import prefix_keys
from flexmarl.core.row_limits import clipped
from flexmarl.rollout.dispatcher import rows
from flexmarl.rollout.dispatcher.hosts import Hosts, HostSession
from flexmarl.rollout.dispatcher.instances import InstanceBook
from flexmarl.rollout.dispatcher.results import KeptTokens, event_of
from flexmarl.rollout.dispatcher.samples import CallState, SampleState
from flexmarl.rollout.dispatcher.writer import GraphWriter
from flexmarl.runtime.run_config import RunConfig

TRACE_LIMIT = 1_000_000

PREFIX_CACHING = frozenset({"vllm"})
"""Engines that keep what they computed of a prompt for the next one."""

Trace = list[tuple[Event, float, list[Effect]]]


class CallListener(Protocol):
    """Who the calls are made for."""

    def call_answered(self, sample: SampleState, answer: CallAnswer) -> None:
        """A call has its stored answer."""
        ...

    def row_stored(self, sample: SampleState) -> None:
        """One row less is being written."""
        ...

    def row_found(self, sample: SampleState, vertex_id: str, agent: str) -> None:
        """A call's row was stored before, with other content: that one is its answer."""
        ...


class _Taken(NamedTuple):
    """A result, and the host that must keep it until it is stored."""

    result: GenerateResult
    host_id: str


_NOT_YET: Final = (Accept, Hold)
"""What keeps a result from being acknowledged at once: it is being stored, or may have to be."""


class CallDesk:
    """The calls of one run in progress.

    Attributes:
        counters: Vertices, tokens, retries, duplicates since the start.
        failures: Calls that failed for good, by reason.
        trace: What the core was told and what it decided; recorded when asked for.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        hosts: Hosts,
        instances: InstanceBook,
        writer: GraphWriter,
        listener: CallListener,
        seed: int,
        record: bool = False,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.trace: Trace | None = [] if record else None
        self._config = config
        self._hosts = hosts
        self._instances = instances
        self._writer = writer
        self._listener = listener
        self._core = Dispatcher(DispatchConfig(), Random(seed))  # noqa: S311 - replays
        self._calls: dict[str, CallState] = {}
        self._writing: dict[str, str] = {}
        self._held: dict[str, _Taken] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._trained = frozenset(config.trained_policies())
        self._caching = frozenset(
            name for name, p in config.policies.items() if p.rollout.engine in PREFIX_CACHING
        )
        self._on_vacated: Callable[[str], None] = _nobody_waits
        self._loop = asyncio.get_running_loop()

    # What happens.

    def call(self, sample: SampleState, call: AgentCall) -> None:
        """A worker asks for a call to be made."""
        agent = self._config.agents[call.agent]
        vertex_id, upstream_ids = call.vertex_id, tuple(call.upstream_vertex_ids)
        for upstream_id in upstream_ids:
            if upstream_id not in sample.done:
                # I1: nothing starts before what it needs is there.
                message = f"agent {call.agent!r}: needs {upstream_id}, which has not finished"
                failure = Failure(reason=ErrorReason.INVALID_ARGUMENT, message=message)
                answer = CallAnswer(vertex_id=vertex_id, failure=failure)
                self._listener.call_answered(sample, answer)
                return
        now = self._loop.time()
        state = CallState(sample, call, time.time_ns(), now + agent.timeout_s)
        self._calls[vertex_id] = sample.calls[vertex_id] = state
        spec, policy = sample.spec, call.policy
        self._post(
            VertexReady(
                vertex_id,
                call.agent,
                policy,
                spec.version,
                (spec.batch, spec.group_ordinal),
                len(call.prompt_tokens),
                call.sampling.max_tokens,
                agent.timeout_s,
                agent.max_attempts,
                agent.infra_attempts,
                spec.sample_id,
                upstream_ids,
                prefix_keys(call.prompt_tokens) if policy in self._caching else (),
                # A stop text or a form looks at all of a response, not at the rest of one.
                not (call.sampling.stop or call.sampling.HasField("structured")),
                call.input_hash,
            ),
            now,
        )

    def cut(self, vertex_id: str) -> None:
        """Nobody waits for a call any more; its row ends with its sample."""
        state = self._forget(vertex_id)
        if state is not None:
            self.counters["cancelled"] += 1
            row = self._ended_row(state, common_pb2.VERTEX_STATUS_CANCELLED)
            state.sample.cut.append(row)
            self._post(VertexCancelled(vertex_id))

    def detach(self, vertex_id: str) -> None:
        """The worker of a call died; its sample runs again, and asks again."""
        if self._forget(vertex_id) is not None:
            self._post(VertexDetached(vertex_id))

    def results(self, session: HostSession, results: list[GenerateResult]) -> None:
        """Attempts ended at a host; each may come again until it is acknowledged."""
        now = self._loop.time()
        heard: dict[str, None] = {}
        for result in results:
            attempt_id = result.attempt_id
            if (host_id := self._writing.get(attempt_id)) is not None:
                # It came again after a reconnect, and is acknowledged once it is stored; or another
                # host had an attempt of its name.
                if host_id != session.host_id:
                    session.outgoing.add().stored.append(attempt_id)
                continue
            try:
                vertex_id, _ = split_attempt_id(attempt_id)
            except ValueError:
                # Nobody's: not let go, it would come again for ever, and keep what is behind it.
                self.counters["unreadable_results"] += 1
                session.outgoing.add().stored.append(attempt_id)
                continue
            heard[result.instance_id] = None
            state = self._calls.get(vertex_id)
            num_kept = 0 if state is None or state.kept is None else len(state.kept.tokens)
            taken = _Taken(result, session.host_id)
            for effect in self._post(event_of(result, num_kept=num_kept), now, taken=taken):
                if type(effect) in _NOT_YET:
                    break
            else:
                session.outgoing.add().stored.append(attempt_id)
        for instance_id in heard:
            instance = self._instances.get(instance_id)
            if instance is not None:
                instance.heard_at = now
                instance.note_load(self._core.num_at(instance_id), now)

    def held(self, hello: HostHello) -> None:
        """A host holds attempts of a dispatcher before this one."""
        attempts = tuple(
            HeldAttempt(attempt_id, held.instance_id, held.version, held.input_hash)
            for attempt_id, held in zip(hello.attempt_ids, hello.held, strict=False)
            if not held.num_kept
        )
        if attempts:
            self._post(AttemptsHeld(attempts))

    def lost(self, attempt_ids: list[str], host_id: str) -> None:
        """A host does not know attempts that were sent to it."""
        for attempt_id in attempt_ids:
            message = f"host {host_id} does not know attempt {attempt_id}"
            self._post(AttemptFailed(attempt_id, True, ErrorReason.UNAVAILABLE, message))

    def instance_changed(self, change: InstanceChanged) -> None:
        """An instance came, changed or went."""
        self._post(change)

    def weights_known(self, event: WeightsKnown) -> None:
        """Weights of a version were announced."""
        self._post(event)

    def vacate(self, instance_id: str) -> None:
        """An instance shall give back what it works on; `on_vacated` is told when it has."""
        self._post(InstanceVacating(instance_id))

    def on_vacated(self, listener: Callable[[str], None]) -> None:
        """Names who is told of instances that were vacated."""
        self._on_vacated = listener

    def sample_ended(self, sample_id: str, *, whole: bool) -> None:
        """No further call of the sample comes."""
        self._post(SampleEnded(sample_id, whole))

    def is_wanted(self, attempt_id: str) -> bool:
        """Whether the attempt's vertex waits for a result, or may come to do so."""
        return self._core.is_wanted(attempt_id)

    def attempts_at(self, instance_ids: set[str]) -> list[str]:
        """Attempts at some instances."""
        return self._core.attempts_at(instance_ids)

    def book(self, policy: str) -> PolicyBook:
        """Running sums of a policy."""
        return self._core.book(policy)

    def demands(self) -> Mapping[str, float]:
        """Average tokens that a sample costs of each policy."""
        return self._core.learning.demands

    def coming(self) -> Coming | None:
        """What open samples are expected to cost yet; None before the first one has ended."""
        learning = self._core.learning
        return learning.coming if learning.demands else None

    def load_at(self, instance_id: str) -> int:
        """Outstanding work at an instance, in tokens."""
        return self._core.load_at(instance_id)

    def num_at(self, instance_id: str) -> int:
        """Vertices at an instance."""
        return self._core.num_at(instance_id)

    def close(self) -> None:
        """Acts no more, and lets hosts forget what nobody will store now.

        The run may be opened again, and its attempts then have the names of these: what a host kept
        it would not sample, and not send again either.
        """
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        held = {attempt_id: taken.host_id for attempt_id, taken in self._held.items()}
        for attempt_id, host_id in (self._writing | held).items():
            self._acknowledge(attempt_id, host_id)

    # Effects.

    def _post(
        self, event: Event, now: float | None = None, *, taken: _Taken | None = None
    ) -> list[Effect]:
        if self._closed:
            return []  # workers that are being ended still ask
        now = self._loop.time() if now is None else now
        effects = self._core.handle(event, now)
        if self.trace is not None and len(self.trace) < TRACE_LIMIT:
            self.trace.append((event, now, list(effects)))
        for effect in effects:
            match effect:
                case Send():
                    self._send(effect, now)
                case Accept():
                    self._accept(effect, taken or self._held.pop(effect.attempt_id))
                case Attach():
                    self._attach(effect, now)
                case Hold():
                    assert taken is not None, "only results are held"
                    self._hold(effect.attempt_id, taken)
                case Release():
                    self._release(effect)
                case Keep():
                    assert taken is not None, "only results are kept"
                    self._keep(effect, taken.result)
                case Duplicate():
                    self.counters["duplicates"] += 1
                case Vacated():
                    # Later: it changes plans and instances, which this loop must not meet.
                    self._loop.call_soon(self._say_vacated, effect.instance_id)
                case Abort():
                    self._abort(effect, now)
                case Fail():
                    self._fail(effect)
                case SetTimer():
                    self._set_timer(effect.at)
                case _:
                    assert_never(effect)
        return effects

    def _say_vacated(self, instance_id: str) -> None:
        if not self._closed:  # hosts were sent the run's last plan, and another one must not follow
            self._on_vacated(instance_id)

    def _hold(self, attempt_id: str, taken: _Taken) -> None:
        before = self._held.get(attempt_id)
        if before is not None and before.host_id != taken.host_id:
            self._acknowledge(attempt_id, before.host_id)  # of one name only one is used
        self._held[attempt_id] = taken

    def _keep(self, effect: Keep, result: GenerateResult) -> None:
        state = self._calls[effect.vertex_id]
        if state.kept is None:
            state.kept = KeptTokens()
        state.kept.add(result)
        self.counters["handed_over"] += 1
        self.counters["handed_over_tokens"] += len(result.tokens)

    def _send(self, effect: Send, now: float) -> None:
        state = self._calls[effect.vertex_id]
        state.attempt = effect.attempt
        state.dispatched_unix_ns = time.time_ns()
        if effect.attempt > 1 and not effect.num_kept:
            self.counters["retries"] += 1
        if not effect.num_kept:
            state.kept = None
        instance = self._instances.get(effect.instance_id)
        assert instance is not None
        instance.note_load(self._core.num_at(effect.instance_id), now)
        session = self._hosts.session(instance.host_id)
        if session is None:
            return  # its host has just gone: the loss of the instance brings the vertex back
        call = state.call
        request = session.outgoing.add().requests.add()
        request.attempt_id = effect.attempt_id
        request.instance_id = effect.instance_id
        request.policy = call.policy
        request.version = effect.version
        request.prompt_tokens.extend(call.prompt_tokens[:])
        request.sampling.CopyFrom(call.sampling)
        request.timeout_ms = max(int((state.deadline - now) * 1e3), 1)
        request.input_hash = call.input_hash
        if state.kept is not None:
            request.prompt_tokens.extend(state.kept.tokens)
            request.sampling.max_tokens -= effect.num_kept
            request.num_kept = effect.num_kept

    def _attach(self, effect: Attach, now: float) -> None:
        state = self._calls[effect.vertex_id]
        state.attempt = effect.attempt
        state.dispatched_unix_ns = time.time_ns()
        self.counters["reattached"] += 1
        instance = self._instances.get(effect.instance_id)
        if instance is not None:
            instance.note_load(self._core.num_at(effect.instance_id), now)

    def _release(self, effect: Release) -> None:
        taken = self._held.pop(effect.attempt_id, None)
        instance = self._instances.get(effect.instance_id)
        host_id = taken.host_id if taken is not None else instance and instance.host_id
        session = self._hosts.session(host_id) if host_id else None
        if session is None:
            return  # with its host it is gone, or told of again
        if taken is not None:
            session.outgoing.add().stored.append(effect.attempt_id)
        else:
            session.outgoing.add().aborts.append(effect.attempt_id)

    def _abort(self, effect: Abort, now: float) -> None:
        instance = self._instances.get(effect.instance_id)
        if instance is None:
            return
        instance.note_load(self._core.num_at(effect.instance_id), now)
        session = self._hosts.session(instance.host_id)
        if session is not None:
            session.outgoing.add().aborts.append(effect.attempt_id)

    def _forget(self, vertex_id: str) -> CallState | None:
        """Takes a call out; None for one that has ended."""
        state = self._calls.pop(vertex_id, None)
        if state is not None:
            state.sample.calls.pop(vertex_id, None)
        return state

    def _accept(self, effect: Accept, taken: _Taken) -> None:
        result = taken.result
        state = self._forget(effect.vertex_id)
        assert state is not None, "the core accepts for live vertices"
        sample = state.sample
        policy = state.call.policy
        if state.kept is not None:
            result = state.kept.completed_by(result)
        # Of two results the one that came first says so: in this order they are stored, too.
        finished_unix_ns = time.time_ns()
        row = rows.done_vertex(
            sample.spec,
            state.call,
            result,
            attempt=effect.attempt,
            trainable=policy in self._trained and not sample.spec.evaluation,
            ready_unix_ns=state.ready_unix_ns,
            dispatched_unix_ns=state.dispatched_unix_ns,
            finished_unix_ns=finished_unix_ns,
        )
        self._writing[effect.attempt_id] = taken.host_id
        if (refused := rows.excess(row)) is not None:
            facts = {"agent": state.call.agent, **refused.metadata}
            failure = Failure(reason=refused.reason, message=refused.message, metadata=facts)
            self._write_failed(state, failure, attempt_id=effect.attempt_id)
            return
        counters = self.counters
        counters["vertices"] += 1
        counters["tokens"] += row.meta.num_response_tokens
        counters["prompt_tokens"] += row.meta.num_prompt_tokens
        answer = CallAnswer(vertex_id=effect.vertex_id)
        answer.tokens.extend(result.tokens[:])
        answer.finish_reason = result.finish_reason
        answer.finished_unix_ns = finished_unix_ns
        sample.writing += 1
        sample.count(policy, result.version)
        self._writer.vertex(
            row,
            partial(self._accepted, sample, state.call, answer, effect.attempt_id),
        )

    def _accepted(
        self,
        sample: SampleState,
        call: AgentCall,
        answer: CallAnswer,
        attempt_id: str,
        outcome: int,
    ) -> None:
        """An accepted result is durable: answer the call, let the host forget it."""
        self._acknowledge(attempt_id, self._writing.pop(attempt_id))
        sample.writing -= 1
        sample.done.add(call.vertex_id)
        if outcome == WRITE_OUTCOME_DUPLICATE:
            self.counters["duplicates"] += 1
            self._listener.row_found(sample, call.vertex_id, call.agent)
        elif outcome == WRITE_OUTCOME_SUBGRAPH_CLOSED:
            self._listener.call_answered(sample, _subgraph_closed(call))
        else:
            self._listener.call_answered(sample, answer)
        self._listener.row_stored(sample)

    def _acknowledge(self, attempt_id: str, host_id: str) -> None:
        """Lets a host forget a result; one that is away sends it again when it is back."""
        session = self._hosts.session(host_id)
        if session is not None:
            session.outgoing.add_for_later().stored.append(attempt_id)

    def _fail(self, effect: Fail) -> None:
        state = self._forget(effect.vertex_id)
        assert state is not None, "the core fails live vertices"
        failure = Failure(
            reason=effect.reason,
            message=clipped(effect.message),
            metadata={"agent": state.call.agent},
        )
        self._write_failed(state, failure)

    def _write_failed(
        self, state: CallState, failure: Failure, *, attempt_id: str | None = None
    ) -> None:
        """Ends a call as failed; a result that it was refused for is let go once that is stored."""
        sample = state.sample
        self.failures[failure.reason] += 1
        row = self._ended_row(state, common_pb2.VERTEX_STATUS_FAILED, failure)
        answer = CallAnswer(vertex_id=state.call.vertex_id, failure=failure)
        sample.writing += 1

        def stored(_: int) -> None:
            if attempt_id is not None:
                self._acknowledge(attempt_id, self._writing.pop(attempt_id))
            sample.writing -= 1
            self._listener.call_answered(sample, answer)
            self._listener.row_stored(sample)

        self._writer.vertex(row, stored)

    def _ended_row(
        self,
        state: CallState,
        status: common_pb2.VertexStatus.ValueType,
        failure: Failure | None = None,
    ) -> Vertex:
        return rows.ended_vertex(
            state.sample.spec,
            state.call,
            status,
            attempt=max(state.attempt, 1),
            trainable=(state.call.policy in self._trained and not state.sample.spec.evaluation),
            ready_unix_ns=state.ready_unix_ns,
            dispatched_unix_ns=state.dispatched_unix_ns,
            finished_unix_ns=time.time_ns(),
            failure=failure,
        )

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._fire)

    def _fire(self) -> None:
        self._timer = None
        # The loop's clock may be a hair early; the core fires what is due by its own.
        self._post(TimerFired())


def _nobody_waits(instance_id: str) -> None:
    raise AssertionError(f"nobody asked instance {instance_id} to be vacated")


def _subgraph_closed(call: AgentCall) -> CallAnswer:
    """The answer of a call that another attempt of its sample had promised not to make."""
    message = (
        f"agent {call.agent!r}: policy {call.policy!r} is closed for this batch, every open sample "
        "had said ctx.last for its agents"
    )
    failure = Failure(
        reason=ErrorReason.SUBGRAPH_CLOSED, message=message, metadata={"agent": call.agent}
    )
    return CallAnswer(vertex_id=call.vertex_id, failure=failure)

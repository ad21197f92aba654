"""What a dispatcher exposes to Prometheus, of the run that is open; all zero or absent without one.

Sums begin anew with each run that is opened, which Prometheus takes for a restart.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Final

from flexmarl.api.rollout.v1.engine_pb2 import InstanceState
from flexmarl.rollout.dispatcher.run import Run
from flexmarl.runtime.metrics import Reading, counter, gauge

OPEN_SAMPLES: Final = gauge("flexmarl_rollout_open_samples", "Samples admitted and not ended.")
VERSION: Final = gauge("flexmarl_rollout_version", "Version that samples are drawn under.")
WAITS: Final = gauge(
    "flexmarl_rollout_waits", "Things that keep the run from sampling; `flexmarl why` names them."
)
QUEUE_WAITING: Final = gauge(
    "flexmarl_rollout_queue_waiting", "Ready calls that wait for an instance.", "policy"
)
QUEUE_RUNNING: Final = gauge("flexmarl_rollout_queue_running", "Calls at instances.", "policy")
QUEUE_TOKENS: Final = gauge(
    "flexmarl_rollout_queue_waiting_tokens",
    "Tokens that the waiting calls are expected to cost.",
    "policy",
)
INSTANCES: Final = gauge(
    "flexmarl_rollout_instances",
    "Inference instances; `away`: their host is not connected.",
    "policy",
    "state",
)
INSTANCE_BUSY: Final = counter(
    "flexmarl_rollout_instance_busy_seconds_total",
    "Seconds in which an instance had a request; its rate is the utilisation of its device.",
    "instance_id",  # Prometheus itself calls what it scrapes `instance`
    "host",
    "policy",
)
MOVES: Final = counter(
    "flexmarl_rollout_moves_total",
    "Moves of instances between policies, by what decided: drain_time, queue_gap or forecast.",
    "giver",
    "receiver",
    "reason",
)
MOVE_SECONDS: Final = counter(
    "flexmarl_rollout_move_seconds_total",
    "Seconds of the moves that ended, from the decision until the instance served again.",
)
LOADS: Final = counter(
    "flexmarl_rollout_weight_loads_total", "Weights taken over by instances.", "policy"
)
LOAD_SECONDS: Final = counter(
    "flexmarl_rollout_weight_load_seconds_total", "Seconds that this took.", "policy"
)
TOKENS: Final = counter(
    "flexmarl_rollout_tokens_total", "Tokens of finished calls: prompt or response.", "kind"
)
EVENTS: Final = counter(
    "flexmarl_rollout_events_total",
    "What happened to calls, samples and processes: vertices, retries, duplicates, cancelled, "
    "handed_over, reattached, replayed, tools, rewards, reward_failures, samples_done, "
    "samples_failed, worker_deaths, reward_process_deaths, instance_deaths, weights_refused.",
    "event",
)
FAILURES: Final = counter(
    "flexmarl_rollout_call_failures_total", "Calls that failed for good, by reason.", "reason"
)
STORE_WAIT: Final = gauge(
    "flexmarl_rollout_store_wait_seconds", "How long the oldest write under way waits for a store."
)

METRICS: Final = (
    OPEN_SAMPLES,
    VERSION,
    WAITS,
    QUEUE_WAITING,
    QUEUE_RUNNING,
    QUEUE_TOKENS,
    INSTANCES,
    INSTANCE_BUSY,
    MOVES,
    MOVE_SECONDS,
    LOADS,
    LOAD_SECONDS,
    TOKENS,
    EVENTS,
    FAILURES,
    STORE_WAIT,
)

_TOKENS: Final = {"prompt_tokens": "prompt", "tokens": "response"}


def readings(run: Run | None) -> Iterator[Reading]:
    """All values of the open run, now."""
    if run is None:
        return
    now = asyncio.get_running_loop().time()
    yield OPEN_SAMPLES.read(len(run.flow))
    yield VERSION.read(max(run.version, 0))
    yield WAITS.read(len(run.waits()))
    yield STORE_WAIT.read(run.writer.waiting_s(now))
    for policy in run.config.policies:
        book = run.desk.book(policy)
        yield QUEUE_WAITING.read(book.num_waiting, policy)
        yield QUEUE_RUNNING.read(book.num_running, policy)
        yield QUEUE_TOKENS.read(book.waiting_tokens, policy)
    yield from _instances(run, now)
    yield from _moves(run)
    for name, count in run.desk.counters.items():
        if name in _TOKENS:
            yield TOKENS.read(count, _TOKENS[name])
        else:
            yield EVENTS.read(count, name)
    for reason, count in run.desk.failures.items():
        yield FAILURES.read(count, reason)


def _instances(run: Run, now: float) -> Iterator[Reading]:
    states: Counter[tuple[str, str]] = Counter()
    for instance in run.fleet.instances:
        # With LoRA several policies may share one; it is counted under each.
        for policy in instance.spec.policies:
            state = InstanceState.Name(instance.status.state)
            name = state.removeprefix("INSTANCE_STATE_").lower() if instance.reachable else "away"
            states[policy, name] += 1
        labels = (instance.instance_id, instance.host_id, ",".join(instance.spec.policies))
        yield INSTANCE_BUSY.read(instance.busy_seconds(now), *labels)
    for key, count in states.items():
        yield INSTANCES.read(count, *key)


def _moves(run: Run) -> Iterator[Reading]:
    for key, count in run.mover.moves.items():
        yield MOVES.read(count, *key)
    yield MOVE_SECONDS.read(run.mover.moved_s)
    for policy, (count, seconds) in run.fleet.loads.items():
        yield LOADS.read(count, policy)
        yield LOAD_SECONDS.read(seconds, policy)

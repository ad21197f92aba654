"""A dispatcher core under a hand-moved clock, and short names for its events."""

from __future__ import annotations

from random import Random

from flexmarl.core.dispatch import Dispatcher
from flexmarl.core.dispatch_events import (
    AttemptFailed,
    AttemptSucceeded,
    DispatchConfig,
    InstanceChanged,
    InstanceUse,
    Send,
    SetTimer,
    TimerFired,
    VertexReady,
    WeightsKnown,
)
from flexmarl.core.errors import ErrorReason


def ready(
    vertex_id: str,
    *,
    policy: str = "p",
    version: int = 0,
    group: int = 0,
    prompt: int = 10,
    max_tokens: int = 5,
    timeout_s: float = 100.0,
    max_attempts: int = 2,
    infra_attempts: int = 3,
    agent: str = "a",
    sample: str = "",
    upstream: tuple[str, ...] = (),
    prefix: tuple[int, ...] = (),
    resumable: bool = True,
    input_hash: bytes = b"",
) -> VertexReady:
    return VertexReady(
        vertex_id, agent, policy, version, (0, group), prompt, max_tokens, timeout_s,
        max_attempts, infra_attempts, sample, upstream, prefix, resumable,
        input_hash,
    )  # fmt: skip


def up(
    name: str,
    *,
    policy: str = "p",
    version: int = 0,
    capacity: int = 1,
    weights_hash: str = "h0",
    use: InstanceUse = InstanceUse.SERVING,
) -> InstanceChanged:
    return InstanceChanged(
        instance_id=name, policies=(policy,), use=use, capacity=capacity, version=version,
        weights_hash=weights_hash,
    )  # fmt: skip


def gone(name: str, policy: str = "p") -> InstanceChanged:
    return InstanceChanged(instance_id=name, policies=(policy,), use=InstanceUse.GONE)


def ok(attempt: str, *, version: int = 0, weights_hash: str = "h0", tokens: int = 3):
    return AttemptSucceeded(attempt, version, weights_hash, tokens)


def bad(attempt: str, *, infra: bool, reason: str = ErrorReason.INTERNAL) -> AttemptFailed:
    return AttemptFailed(attempt_id=attempt, infrastructure=infra, reason=reason, message="broke")


class Box:
    """A dispatcher at a time, with the timers left out of what is looked at."""

    def __init__(self, *events, **config) -> None:
        self.core = Dispatcher(DispatchConfig(**config), Random(1))
        self.now = 0.0
        self.timer: float | None = None
        for event in (WeightsKnown("p", 0, "h0"), WeightsKnown("q", 0, "h0"), *events):
            self(event)

    def __call__(self, event) -> list:
        effects = []
        for effect in self.core.handle(event, self.now):
            if isinstance(effect, SetTimer):
                self.timer = effect.at
            else:
                effects.append(effect)
        return effects

    def at(self, now: float) -> list:
        self.now = now
        assert self.timer is not None
        assert self.timer <= now
        return self(TimerFired())


def sent(effects) -> list[tuple[str, str]]:
    return [(e.attempt_id, e.instance_id) for e in effects if isinstance(e, Send)]

"""What one call carries along as it hops from service to service: its deadline and its ids.

The server's interceptor sets both; the client reads them when the handler calls on. Neither side
imports the other: they meet here. Times are seconds of the local monotonic clock, passed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import Context, ContextVar, copy_context
from types import MappingProxyType
from typing import Final

from flexmarl.core.keepalive import DEADLINE_MARGIN_S

IDS_METADATA_KEY: Final = "flexmarl-ids"
"""gRPC metadata key under which the log ids travel: `run=r1;batch=3`."""

TIME_METADATA_KEY: Final = "flexmarl-time"
"""gRPC metadata key under which a health check's answer tells the host's time, in Unix seconds."""

ID_NAMES: Final = ("run", "batch", "group", "sample", "vertex", "policy", "request")
"""Ids that logs, spans and metadata share, in the order in which they are written."""

_EMPTY: Final[Mapping[str, str]] = MappingProxyType({})

_deadline: ContextVar[float | None] = ContextVar("flexmarl_deadline", default=None)
_ids: ContextVar[Mapping[str, str]] = ContextVar("flexmarl_ids", default=_EMPTY)


def set_deadline(deadline: float | None) -> None:
    """State by when (monotonic seconds) the current task's caller stops waiting; None: never."""
    _deadline.set(deadline)


def current_deadline() -> float | None:
    """By when (monotonic seconds) the current task's caller stops waiting."""
    return _deadline.get()


def onward_timeout_s(
    default_s: float | None, *, now: float, margin_s: float = DEADLINE_MARGIN_S
) -> float | None:
    """Timeout of a call made on behalf of the current one: `min(default, remaining - margin)`.

    Returns:
        Seconds, at least 0 (0 or less left: the call fails at once); None when neither the method
        nor the caller sets a limit.
    """
    deadline = _deadline.get()
    if deadline is None:
        return default_s
    left_s = max(deadline - now - margin_s, 0.0)
    return left_s if default_s is None else min(default_s, left_s)


def detached_context() -> Context:
    """Copy of the current context for work that outlives the call which starts it.

    It keeps the ids and drops the deadline: a task started by a handler would otherwise find every
    later call of its own out of time.
    """
    context = copy_context()
    context.run(_deadline.set, None)
    return context


def bind_ids(**ids: str) -> None:
    """Add ids to the current task's logs, spans and onward calls; tasks started later inherit."""
    _ids.set(MappingProxyType({**_ids.get(), **ids}))


def reset_ids(ids: Mapping[str, str] = _EMPTY) -> None:
    """Replace all ids of the current task."""
    _ids.set(ids)


def current_ids() -> Mapping[str, str]:
    """Ids bound to the current task."""
    return _ids.get()


def encode_ids(ids: Mapping[str, str]) -> str:
    """Metadata text of the known ids; others stay at home."""
    return ";".join(f"{name}={ids[name]}" for name in ID_NAMES if name in ids)


def decode_ids(text: str) -> Mapping[str, str]:
    """Inverse of `encode_ids`; unknown names and malformed parts are dropped, not trusted."""
    pairs = (part.partition("=") for part in text.split(";"))
    return MappingProxyType({name: value for name, _, value in pairs if name in ID_NAMES and value})

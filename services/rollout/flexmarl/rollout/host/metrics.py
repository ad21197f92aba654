"""What an engine host exposes to Prometheus; its instances' work is told by the dispatcher."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from flexmarl.api.rollout.v1.engine_pb2 import InstanceState, InstanceStatus
from flexmarl.rollout.host.attempts import AttemptBook
from flexmarl.runtime.metrics import Reading, gauge

CONNECTED: Final = gauge(
    "flexmarl_engine_host_connected", "1 while the dispatcher is connected, else 0."
)
ATTEMPTS: Final = gauge(
    "flexmarl_engine_host_attempts",
    "Attempts in its book: `running`, or `unacknowledged`, which are kept until they are stored.",
    "state",
)
ENGINES: Final = gauge(
    "flexmarl_engine_host_engines", "Engine processes that it shall run.", "state"
)

METRICS: Final = (CONNECTED, ATTEMPTS, ENGINES)


def readings(
    book: AttemptBook, statuses: Iterable[InstanceStatus], *, connected: bool
) -> Iterator[Reading]:
    """All values now."""
    yield CONNECTED.read(connected)
    yield ATTEMPTS.read(book.num_running, "running")
    yield ATTEMPTS.read(len(book) - book.num_running, "unacknowledged")
    states = Counter(InstanceState.Name(status.state) for status in statuses)
    for state, count in states.items():
        yield ENGINES.read(count, state.removeprefix("INSTANCE_STATE_").lower())

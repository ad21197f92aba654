"""What a trainer exposes to Prometheus: its slots, the work of its policies, what swaps move."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from flexmarl.api.trainer.v1.trainer_pb2 import TrainerStatus
from flexmarl.runtime.metrics import Reading, counter, gauge
from flexmarl.trainer.totals import Totals

READY: Final = gauge("flexmarl_trainer_ready", "1 when the worker of every slot is warm, else 0.")
SLOT_BUSY: Final = counter(
    "flexmarl_trainer_slot_busy_seconds_total",
    "Seconds of work of a slot's worker; its rate is the utilisation of the device.",
    "slot",
)
SLOT_BOUND: Final = gauge(
    "flexmarl_trainer_slot_bound", "1 for the policy that holds a slot.", "slot", "policy"
)
SLOT_STATE: Final = gauge(
    "flexmarl_trainer_slot_state_bytes", "Bytes of its policy's state on a slot.", "slot"
)
WORKER_STARTS: Final = counter(
    "flexmarl_trainer_worker_starts_total",
    "Workers that became warm in a slot; more than one: one died or was replaced.",
    "slot",
)
OPERATIONS: Final = counter(
    "flexmarl_trainer_operations_total",
    "Operations that had their turn: bind, gradients, save, apply, suspend.",
    "policy",
    "operation",
)
OPERATION_SECONDS: Final = counter(
    "flexmarl_trainer_operation_seconds_total",
    "Seconds of these; bind and suspend together are the swaps.",
    "policy",
    "operation",
)
SWAP_BYTES: Final = counter(
    "flexmarl_trainer_swap_bytes_total",
    "Bytes of state that ranks read (in) and wrote (out), updates included.",
    "policy",
    "direction",
)
FAILURES: Final = counter(
    "flexmarl_trainer_operation_failures_total", "Operations that failed, by reason.", "reason"
)

METRICS: Final = (
    READY,
    SLOT_BUSY,
    SLOT_BOUND,
    SLOT_STATE,
    WORKER_STARTS,
    OPERATIONS,
    OPERATION_SECONDS,
    SWAP_BYTES,
    FAILURES,
)


def readings(
    status: TrainerStatus,
    totals: Totals,
    *,
    starts: Mapping[str, int],
    failures: Mapping[str, int],
) -> Iterator[Reading]:
    """All values now.

    Args:
        status: Slots and what they do.
        totals: Running sums.
        starts: Workers that became warm, by slot.
        failures: Operations that failed, by reason.
    """
    yield READY.read(status.ready)
    for slot in status.slots:
        yield SLOT_BUSY.read(slot.busy_s, slot.slot)
        yield SLOT_STATE.read(slot.state_bytes, slot.slot)
        yield WORKER_STARTS.read(starts[slot.slot], slot.slot)
        if slot.policy:
            yield SLOT_BOUND.read(1, slot.slot, slot.policy)
    for key, (count, seconds) in totals.operations.items():
        yield OPERATIONS.read(count, *key)
        yield OPERATION_SECONDS.read(seconds, *key)
    for policy, traffic in totals.traffic.items():
        for direction, size_bytes in traffic.items():
            yield SWAP_BYTES.read(size_bytes, policy, direction)
    for reason, count in failures.items():
        yield FAILURES.read(count, reason)

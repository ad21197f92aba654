"""What a trainer tells Prometheus of its slots and its policies' work."""

from __future__ import annotations

from prometheus_client import generate_latest

from flexmarl.api.trainer.v1.trainer_pb2 import SlotStatus, TrainerStatus
from flexmarl.runtime.metrics import MetricSource, new_registry
from flexmarl.trainer.metrics import METRICS, readings
from flexmarl.trainer.totals import IN, OUT, Totals


def test_slots_operations_and_bytes():
    totals = Totals()
    for seconds in (0.25, 0.5):
        totals.ended("solver", "bind", seconds=seconds)
    totals.traffic_of("solver")[IN] += 400
    totals.traffic_of("solver")[OUT] += 100
    status = TrainerStatus(
        ready=True,
        slots=[
            SlotStatus(slot="slot0", policy="solver", busy_s=2.5, state_bytes=400),
            SlotStatus(slot="slot1"),
        ],
    )
    registry = new_registry()
    read = readings(status, totals, starts={"slot0": 2, "slot1": 1}, failures={"QUEUE_FULL": 1})
    registry.register(MetricSource(METRICS, lambda: read))
    lines = generate_latest(registry).decode().splitlines()
    for line in (
        "ready 1.0",
        'slot_busy_seconds_total{slot="slot0"} 2.5',
        'slot_bound{policy="solver",slot="slot0"} 1.0',
        'worker_starts_total{slot="slot0"} 2.0',
        'operations_total{operation="bind",policy="solver"} 2.0',
        'operation_seconds_total{operation="bind",policy="solver"} 0.75',
        'swap_bytes_total{direction="in",policy="solver"} 400.0',
        'swap_bytes_total{direction="out",policy="solver"} 100.0',
        'operation_failures_total{reason="QUEUE_FULL"} 1.0',
    ):
        assert f"flexmarl_trainer_{line}" in lines, lines
    assert not any("slot_bound" in line and "slot1" in line for line in lines)

"""What an orchestrator tells Prometheus of its batches and of its run."""

from __future__ import annotations

from prometheus_client import generate_latest

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1.graph_pb2 import BatchRecord, PolicyCounts
from flexmarl.api.orchestrator.v1.orchestrator_pb2 import RunProgress, Wait
from flexmarl.orchestrator.metrics import METRICS, readings
from flexmarl.orchestrator.totals import Totals
from flexmarl.runtime.metrics import MetricSource, new_registry

PREFIX = "flexmarl_orchestrator_"


def batch(number: int, **metrics: float) -> BatchRecord:
    return BatchRecord(
        batch=number,
        num_groups_closed=3,
        num_groups_dropped=1,
        policies={
            "solver": PolicyCounts(finished=10, consumed=8, voided={"zero_variance": 2}),
            "": PolicyCounts(finished=4),
        },
        metrics={name.replace("__", "/"): value for name, value in metrics.items()},
    )


def exposed(totals: Totals, progress: RunProgress | None = None) -> list[str]:
    registry = new_registry()
    registry.register(MetricSource(METRICS, lambda: readings(progress, totals)))
    lines = generate_latest(registry).decode().splitlines()
    return [line.removeprefix(PREFIX) for line in lines if line.startswith(PREFIX)]


def test_batches_add_up():
    totals = Totals()
    totals.committed(batch(0, step__rollout_s=2.0, tokens__sampled=100, sample_failures__X=2))
    totals.committed(batch(1, step__rollout_s=0.5, tokens__sampled=50, step_s=9.0))
    lines = exposed(totals)
    for line in (
        "steps_total 2.0",
        'step_seconds_total{part="rollout"} 2.5',
        'tokens_total{kind="sampled"} 150.0',
        'rows_total{fate="consumed",policy="solver"} 16.0',
        'rows_total{fate="void",policy="solver"} 4.0',
        'rows_void_total{policy="solver",reason="zero_variance"} 4.0',
        'groups_total{end="dropped"} 2.0',
        'sample_failures_total{reason="X"} 2.0',
    ):
        assert line in lines, lines


def test_the_newest_batch_shows_what_was_learnt():
    totals = Totals()
    totals.committed(batch(0, team_reward=0.1, alarm__zero_rewards=32))
    totals.committed(
        batch(
            1,
            team_reward=0.5,
            reward__solver=0.25,
            train__solver__logprob_gap=1e-6,
            train__solver__loss=0.7,
            train__solver__entropy=float("nan"),
            utilisation__trainer=0.75,
            alarm__solver__ratio=1.0,
        )
    )
    lines = exposed(totals)
    for line in (
        "team_reward 0.5",
        'agent_reward{agent="solver"} 0.25',
        'logprob_gap{policy="solver"} 1e-06',
        'utilisation{of="trainer"} 0.75',
        'alarms_total{alarm="zero_rewards",policy=""} 1.0',
        'alarms_total{alarm="ratio",policy="solver"} 1.0',
    ):
        assert line in lines, lines
    assert not any(line.startswith(("entropy", "loss")) for line in lines)


def test_waits_are_told_by_what_is_waited_for():
    progress = RunProgress(
        run_id="r",
        status=common_pb2.RUN_STATUS_RUNNING,
        stage="rollout",
        num_samples=8,
        num_samples_ended=5,
        rows_waiting={"solver": 12},
        reasons=[
            Wait(what="rollout: 3 open sample(s) of batch 4", waited_ms=1500),
            Wait(what="trainer 10.0.0.1:7004: bind solver to slot0", waited_ms=700),
            Wait(what="trainer 10.0.0.2:7004: update solver", waited_ms=900),
        ],
    )
    totals = Totals()
    totals.effect_failures["Bind", "CHILD_DIED"] += 1
    lines = exposed(totals, progress)
    for line in (
        'run{run="r",stage="rollout",status="running"} 1.0',
        'batch_samples{state="open"} 3.0',
        'rows_waiting{policy="solver"} 12.0',
        'wait_seconds{on="rollout"} 1.5',
        'wait_seconds{on="trainer"} 0.9',
        'effect_failures_total{effect="Bind",reason="CHILD_DIED"} 1.0',
    ):
        assert line in lines, lines

"""deploy/grafana/dashboards/flexmarl.json: what a team's run does, on one screen a row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

DATASOURCE: Final = {"type": "prometheus", "uid": "flexmarl-prometheus"}
_WIDTH, _HEIGHT, _PER_ROW = 8, 8, 3


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph.

    Attributes:
        title: Its title.
        unit: Grafana's name of the unit.
        queries: Expressions, each with the legend of its curves.
        stacked: Whether the curves add up.
    """

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    stacked: bool = False


def _per_second(metric: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}[1m]))"


def _mean(seconds: str, count: str, by: str) -> str:
    by = f" by ({by})" if by else ""
    return f"sum{by} (rate({seconds}[2m])) / sum{by} (rate({count}[2m]))"


def _quantile(share: float, metric: str, by: str) -> str:
    return f"histogram_quantile({share}, sum by (le, {by}) (rate({metric}_bucket[1m])))"


def _recent(metric: str, by: str) -> str:
    return f"sum by ({by}) (increase({metric}[5m]))"


_STORE: Final = "flexmarl_store_operation_seconds"
_SWAPS: Final = '{operation=~"bind|suspend"}'

ROWS: Final[Sequence[tuple[str, Sequence[Panel]]]] = (
    (
        "Learning",
        (
            Panel(
                "Reward",
                "none",
                [
                    ("flexmarl_orchestrator_team_reward", "team"),
                    ("flexmarl_orchestrator_agent_reward", "{{agent}}"),
                ],
            ),
            Panel(
                "Version",
                "none",
                [
                    ("flexmarl_orchestrator_version", "committed"),
                    ("flexmarl_orchestrator_versions", "wanted"),
                ],
            ),
            Panel(
                "Log-probabilities: trainer against engine",
                "none",
                [
                    ("flexmarl_orchestrator_logprob_gap", "{{policy}} mean distance"),
                    ("flexmarl_orchestrator_logprob_outside", "{{policy}} share outside"),
                ],
            ),
            Panel("Gradient norm", "none", [("flexmarl_orchestrator_grad_norm", "{{policy}}")]),
            Panel("Entropy", "none", [("flexmarl_orchestrator_entropy", "{{policy}}")]),
            Panel(
                "Alarms, last 5 minutes",
                "none",
                [(_recent("flexmarl_orchestrator_alarms_total", "alarm, policy"),
                  "{{alarm}} {{policy}}")],
            ),
        ),
    ),
    (
        "Where the time goes",
        (
            Panel(
                "Parts of a step",
                "s",
                [(
                    "sum by (part) (rate(flexmarl_orchestrator_step_seconds_total[2m])) / "
                    "on () group_left () sum(rate(flexmarl_orchestrator_steps_total[2m]))",
                    "{{part}}",
                )],
                stacked=True,
            ),
            Panel(
                "Waits",
                "s",
                [
                    ("flexmarl_orchestrator_wait_seconds", "{{on}}"),
                    ("flexmarl_rollout_store_wait_seconds", "rows that are being stored"),
                ],
            ),
            Panel(
                "Tokens",
                "none",
                [
                    (_per_second("flexmarl_rollout_tokens_total", "kind"), "{{kind}}"),
                    (_per_second("flexmarl_orchestrator_tokens_total", "kind"), "{{kind}}"),
                ],
            ),
        ),
    ),
    (
        "Rollout",
        (
            Panel(
                "Queues",
                "none",
                [
                    ("flexmarl_rollout_queue_waiting", "{{policy}} waiting"),
                    ("flexmarl_rollout_queue_running", "{{policy}} running"),
                ],
            ),
            Panel(
                "Instances",
                "none",
                [("sum by (policy, state) (flexmarl_rollout_instances)", "{{policy}} {{state}}")],
                stacked=True,
            ),
            Panel(
                "Utilisation of instances",
                "percentunit",
                [("rate(flexmarl_rollout_instance_busy_seconds_total[1m])", "{{instance_id}}")],
            ),
            Panel(
                "Moves, last 5 minutes",
                "none",
                [(_recent("flexmarl_rollout_moves_total", "giver, receiver, reason"),
                  "{{giver}} to {{receiver}}: {{reason}}")],
            ),
            Panel(
                "Taking weights over",
                "s",
                [(
                    _mean(
                        "flexmarl_rollout_weight_load_seconds_total",
                        "flexmarl_rollout_weight_loads_total",
                        "policy",
                    ),
                    "{{policy}}",
                )],
            ),
            Panel("Open samples", "none", [("flexmarl_rollout_open_samples", "samples")]),
        ),
    ),
    (
        "Training",
        (
            Panel(
                "Utilisation of slots",
                "percentunit",
                [("rate(flexmarl_trainer_slot_busy_seconds_total[1m])", "{{instance}} {{slot}}")],
            ),
            Panel(
                "Who holds the slots",
                "none",
                [("flexmarl_trainer_slot_bound", "{{slot}} {{policy}}")],
                stacked=True,
            ),
            Panel(
                "Rows that wait for a trainer",
                "none",
                [("flexmarl_orchestrator_rows_waiting", "{{policy}}")],
            ),
            Panel(
                "Time of a swap",
                "s",
                [(
                    _mean(
                        f"flexmarl_trainer_operation_seconds_total{_SWAPS}",
                        f"flexmarl_trainer_operations_total{_SWAPS}",
                        "policy, operation",
                    ),
                    "{{policy}} {{operation}}",
                )],
            ),
            Panel(
                "State moved",
                "Bps",
                [(_per_second("flexmarl_trainer_swap_bytes_total", "policy, direction"),
                  "{{policy}} {{direction}}")],
            ),
            Panel(
                "Time of the trainers' work",
                "percentunit",
                [(_per_second("flexmarl_trainer_operation_seconds_total", "operation"),
                  "{{operation}}")],
                stacked=True,
            ),
        ),
    ),
    (
        "Store",
        (
            Panel(
                "Latency, half of the calls",
                "s",
                [(_quantile(0.5, _STORE, "operation"), "{{operation}}")],
            ),
            Panel(
                "Latency, 99 of 100 calls",
                "s",
                [(_quantile(0.99, _STORE, "operation"), "{{operation}}")],
            ),
            Panel(
                "Sizes",
                "bytes",
                [
                    ("flexmarl_store_memory_tier_bytes", "state in memory"),
                    ("flexmarl_store_disk_tier_bytes", "state on disk"),
                    ("flexmarl_store_queued_bytes", "waits for the writer"),
                    ("flexmarl_store_disk_free_bytes", "free on disk"),
                ],
            ),
        ),
    ),
    (
        "What went wrong",
        (
            Panel(
                "Void rows, last 5 minutes",
                "none",
                [(_recent("flexmarl_orchestrator_rows_void_total", "policy, reason"),
                  "{{policy}} {{reason}}")],
            ),
            Panel(
                "Failures, last 5 minutes",
                "none",
                [
                    (_recent("flexmarl_rollout_call_failures_total", "reason"), "call {{reason}}"),
                    (_recent("flexmarl_orchestrator_sample_failures_total", "reason"),
                     "sample {{reason}}"),
                    (_recent("flexmarl_orchestrator_effect_failures_total", "effect, reason"),
                     "{{effect}} {{reason}}"),
                    (_recent("flexmarl_trainer_operation_failures_total", "reason"),
                     "operation {{reason}}"),
                    (_recent('flexmarl_rollout_events_total{event=~".*deaths|retries"}', "event"),
                     "{{event}}"),
                ],
            ),
            Panel(
                "Calls that failed, last 5 minutes",
                "none",
                [(_recent('flexmarl_rpc_finished_total{code!="OK"}', "service, code"),
                  "{{service}} {{code}}")],
            ),
        ),
    ),
    (
        "Processes",
        (
            Panel("Memory", "bytes", [("process_resident_memory_bytes", "{{job}}")]),
            Panel("CPU", "percentunit", [("rate(process_cpu_seconds_total[1m])", "{{job}}")]),
            Panel(
                "Calls of the services, 99 of 100",
                "s",
                [(_quantile(0.99, "flexmarl_rpc_seconds", "service"), "{{service}}")],
            ),
        ),
    ),
)  # fmt: skip
"""The rows of the dashboard."""


def expressions() -> Iterator[tuple[str, str]]:
    """Title and expression of every query."""
    for _, panels in ROWS:
        for panel in panels:
            for expression, _ in panel.queries:
                yield panel.title, expression


def dashboard() -> str:
    """The file."""
    board: dict[str, Any] = {
        "uid": "flexmarl",
        "title": "FlexMARL",
        "tags": ["flexmarl"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": []},
        "annotations": {"list": []},
        "panels": list(_panels()),
    }
    return json.dumps(board, indent=1) + "\n"


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 0, 0
    for title, panels in ROWS:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": top, "w": _WIDTH * _PER_ROW, "h": 1},
        }
        top += 1
        for index, panel in enumerate(panels):
            number += 1
            line, column = divmod(index, _PER_ROW)
            place = {"x": column * _WIDTH, "y": top + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            yield {"id": number, **_graph(panel), "gridPos": place}
        top += _HEIGHT * -(-len(panels) // _PER_ROW)


def _graph(panel: Panel) -> dict[str, Any]:
    style: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 20 if panel.stacked else 0}
    if panel.stacked:
        style["stacking"] = {"mode": "normal", "group": "A"}
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": style}},
        "options": {"legend": {"displayMode": "list"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": expression,
                "legendFormat": legend,
            }
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }

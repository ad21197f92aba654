"""Every metric is declared, documented, and known where the dashboard asks for it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flexmarl.runtime.metrics import MetricKind, MetricSpec
from scripts.reference.dashboard import DATASOURCE, expressions
from scripts.reference.metrics_page import DECLARED

SPECS = [spec for specs in DECLARED.values() for spec in specs]
OF_PROCESSES = {"process_resident_memory_bytes", "process_cpu_seconds_total"}


def series_of(spec: MetricSpec) -> set[str]:
    """Names under which Prometheus keeps a metric."""
    if spec.kind is MetricKind.HISTOGRAM:
        return {f"{spec.name}_{part}" for part in ("bucket", "sum", "count")}
    return {spec.name}


def sources(root: Path) -> Iterator[Path]:
    for folder in ("libs", "services", "clients"):
        yield from (root / folder).rglob("*.py")


def test_names_are_unique_and_say_what_they_are() -> None:
    names = [spec.name for spec in SPECS]
    assert len(set(names)) == len(names)
    for spec in SPECS:
        assert re.fullmatch(r"flexmarl_[a-z][a-z_]*[a-z]", spec.name)
        assert spec.name.endswith("_total") == (spec.kind is MetricKind.COUNTER), spec.name
        assert spec.text.endswith("."), spec.name
        assert "le" not in spec.labels


def test_metrics_are_declared_where_the_reference_looks(root: Path) -> None:
    """One module per service declares them; no other file makes one or imports the library."""
    declaring = {
        path.relative_to(root).as_posix()
        for path in sources(root)
        if re.search(r"\b(?:gauge|counter|histogram)\(\s*\"", path.read_text(encoding="utf-8"))
    }
    assert declaring == {
        "libs/flexmarl/runtime/metrics.py",
        "services/meg_store/flexmarl/meg_store/metrics.py",
        "services/rollout/flexmarl/rollout/dispatcher/metrics.py",
        "services/rollout/flexmarl/rollout/host/metrics.py",
        "services/trainer/flexmarl/trainer/metrics.py",
        "services/orchestrator/flexmarl/orchestrator/metrics.py",
    }
    for path in sources(root):
        if "prometheus_client" in path.read_text(encoding="utf-8"):
            assert path.parent == root / "libs/flexmarl/runtime", path


def test_every_declared_metric_is_in_the_reference(root: Path) -> None:
    page = (root / "docs/reference/metrics.md").read_text(encoding="utf-8")
    text = "".join(
        path.read_text(encoding="utf-8") for path in sources(root) if path.name == "metrics.py"
    )
    declared = set(re.findall(r'"(flexmarl_[a-z_]+)"', text))
    assert declared == {spec.name for spec in SPECS}
    assert [name for name in sorted(declared) if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_the_dashboard_asks_for_metrics_that_exist(title: str, expression: str) -> None:
    known = {name for spec in SPECS for name in series_of(spec)} | OF_PROCESSES
    asked = set(re.findall(r"\b(?:flexmarl|process)_[a-z_]+", expression))
    assert asked, title
    assert asked <= known, f"{title}: {expression}"


def test_the_dashboard_reads_the_provisioned_data_source(root: Path) -> None:
    board: dict[str, Any] = json.loads(
        (root / "deploy/grafana/dashboards/flexmarl.json").read_text(encoding="utf-8")
    )
    graphs = [panel for panel in board["panels"] if panel["type"] == "timeseries"]
    assert [(g["title"], t["expr"]) for g in graphs for t in g["targets"]] == list(expressions())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    source = root / "deploy/grafana/provisioning/datasources/prometheus.yml"
    assert f"uid: {DATASOURCE['uid']} " in source.read_text(encoding="utf-8")

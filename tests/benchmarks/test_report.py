"""What benchmarks print: one JSON object per figure, a table beside it."""

from __future__ import annotations

import io
import json
import sys

import pytest

from benchmarks import __main__ as command
from benchmarks.report import Report


def test_figures_are_json_lines_and_a_table() -> None:
    out, err = io.StringIO(), io.StringIO()
    report = Report(out, err)
    report.figure(
        "store.write_read_p50_ms", 1.3, "ms", against="two echoes", ratio=1.5, bound="<= 2.0"
    )
    report.figure("store.durable_rows_per_s", 40123.4, "1/s")
    report.note("floor: two echoes 0.8 ms")
    report.close()
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert first == {
        "name": "store.write_read_p50_ms",
        "value": 1.3,
        "unit": "ms",
        "against": "two echoes",
        "ratio": 1.5,
    }
    assert second == {"name": "store.durable_rows_per_s", "value": 40123.4, "unit": "1/s"}
    for text in ("store.write_read_p50_ms", "<= 2.0", "40,123", "floor: two echoes", "Measured on"):
        assert text in err.getvalue()


def test_an_unknown_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "stroe"])
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert stopped.value.code == 2
    assert "choose from" in capsys.readouterr().err


def test_a_missing_benchmark_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "pipeline"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert command.main() == 2
    assert capsys.readouterr().err == "no benchmark so far: pipeline\n"

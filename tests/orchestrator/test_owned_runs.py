"""The list of runs that an orchestrator drives survives its process."""

from __future__ import annotations

from pathlib import Path

from flexmarl.orchestrator.owned_runs import OwnedRun, OwnedRuns


def test_owned_runs_survive_and_a_torn_file_is_none(tmp_path: Path) -> None:
    owned = OwnedRuns(tmp_path / "data")
    assert owned.read() == []
    owned.add(OwnedRun("a", "s0", "host:1"))
    owned.add(OwnedRun("b", "s0", "host:1"))
    owned.add(OwnedRun("a", "s0", "host:2"))
    assert OwnedRuns(tmp_path / "data").read() == [
        OwnedRun("a", "s0", "host:2"),
        OwnedRun("b", "s0", "host:1"),
    ]
    owned.remove("a")
    assert [run.run_id for run in owned.read()] == ["b"]
    (tmp_path / "data" / "runs.json").write_text('[{"run_id":')
    assert owned.read() == []

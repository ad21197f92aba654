"""A run goes on where its folder was copied to: neither its memory nor its files are there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from integration.cluster_harness import FLEXMARL, QUICKSTART, Size, run_cli
from integration.whole_run import num_reports

SIZE = Size(versions=16)
RUN = "travels"


@pytest.fixture
def folders(tmp_path: Path):
    """Data folders of the first host and of the second; what they keep in memory is removed."""
    folders = tmp_path / "first", tmp_path / "second"
    yield folders
    for folder in folders:
        if folder.exists():
            run_cli("down", "--purge", "--data-dir", str(folder))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_copied_run_goes_on_from_what_was_on_disk(folders, tmp_path: Path):
    first, second = folders
    example = Path(shutil.copytree(QUICKSTART.parent, tmp_path / "example"))
    train_until_version_2_and_die(example / QUICKSTART.name, first, tmp_path / "out")

    shutil.copytree(first, second, symlinks=True)
    purged = run_cli("down", "--purge", "--data-dir", str(first))
    assert purged.returncode == 0, purged.stdout + purged.stderr
    shutil.rmtree(example)  # model and workflow are in the store, too

    where = ("--data-dir", str(second))
    resumed = run_cli("resume", RUN, *where, "--out", str(tmp_path / "other"), timeout_s=200)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr

    counts = run_cli("counts", RUN, *where, "--json")
    assert counts.returncode == 0, counts.stdout + counts.stderr
    rows = json.loads(counts.stdout)
    assert {row["batch"] for row in rows} == set(range(SIZE.versions))
    for batch in range(SIZE.versions):
        assert sum(r["consumed"] for r in rows if r["batch"] == batch) == SIZE.vertices
    shown = json.loads(run_cli("show", RUN, *where, "--json").stdout)
    assert (shown["status"], shown["version"]) == ("finished", SIZE.versions)
    assert all(each["version"] <= each["newest"] for each in shown["returns"])


def train_until_version_2_and_die(config: Path, data_dir: Path, out: Path) -> None:
    """Trains with a cluster of the command's own, which is killed with all its processes."""
    named = ("--run-id", RUN, "--data-dir", str(data_dir), "--out", str(out), *SIZE.overrides())
    client = subprocess.Popen(
        [*FLEXMARL, "train", str(config), *named],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
    )
    try:
        end = time.monotonic() + 120
        while num_reports(out / RUN) < 2:
            assert client.poll() is None, client.communicate()[0]
            assert time.monotonic() < end, "version 2"
            time.sleep(0.02)
    finally:
        children = psutil.Process(client.pid).children(recursive=True)
        client.send_signal(signal.SIGKILL)
        client.communicate()
        gone, alive = psutil.wait_procs(children, timeout=30)
    assert not alive, f"{alive} outlived the command"
    assert len(gone) == len(children)

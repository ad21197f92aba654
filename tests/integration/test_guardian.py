"""A test process is killed: its cluster ends, though it was started to stay."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from integration.cluster_harness import Cluster, run_cli

TESTS = Path(__file__).parents[1]

LEFT = """
import json, pathlib, time
from integration.cluster_harness import Cluster

def test_that_is_killed_in_the_middle():
    here = pathlib.Path(__file__).parent
    cluster = Cluster(here / "cluster")
    cluster.up(slots=1)
    (here / "seen.new").write_text(json.dumps(cluster.seen))
    (here / "seen.new").rename(here / "seen.json")
    time.sleep(600)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_cluster_ends_with_the_test_process_that_started_it(tmp_path: Path, how: int) -> None:
    (tmp_path / "test_left.py").write_text(LEFT)
    (tmp_path / "as_all_tests.py").write_text("from conftest import pytest_configure")
    command = [sys.executable, "-m", "pytest", "-p", "as_all_tests", "--rootdir", str(tmp_path)]
    tests = subprocess.Popen(
        [*command, "-p", "no:cacheprovider", str(tmp_path / "test_left.py")],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{TESTS}"},
        stdout=(log := tmp_path / "log").open("w"),
        stderr=subprocess.STDOUT,
    )
    seen = tmp_path / "seen.json"
    while not seen.exists():
        assert tests.poll() is None, log.read_text()
        time.sleep(0.05)
    cluster = Cluster(tmp_path / "cluster")
    cluster.seen = {int(pid): created for pid, created in json.loads(seen.read_text()).items()}
    assert len(cluster.survivors()) > 5
    os.kill(tests.pid, how)
    assert tests.wait(20) == -how
    assert cluster.outlived(within_s=60) == []
    assert run_cli("down", "--purge", "--data-dir", str(cluster.folder)).returncode == 0

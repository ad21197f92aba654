"""The worked example of docs/how_to/scale_out.md: a host is lost, and comes back, in mid-run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
from integration.cluster_harness import QUICKSTART, Size, eventually
from integration.whole_run import assert_whole, num_reports

from deploy.three_hosts.cluster import STORE, ThreeHosts
from flexmarl.client.run_store import RunStore

SIZE = Size(versions=10)
AWAY_S = 8.0


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_host_is_lost_and_comes_back_while_a_run_goes_on(tmp_path, proves):
    memory = Path(tempfile.mkdtemp(prefix="flexmarl-test-", dir="/dev/shm"))
    try:
        cluster = await asyncio.to_thread(ThreeHosts(tmp_path / "hosts", memory).__enter__)
    except OSError as error:
        pytest.skip(f"no network namespaces can be made here: {error}")
    out = tmp_path / "out"
    try:
        command = [*cluster.train_command(QUICKSTART), "--run-id", "hosts", "--out", str(out)]
        command += ["--set", "policies.sorter.trainer.world_size=2"]  # its ranks lie on both
        client = subprocess.Popen(  # noqa: ASYNC220 - returns at once
            [*command, *SIZE.overrides()],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
        )
        try:
            await eventually(
                lambda: num_reports(out / "hosts") >= 2, what="version 2", timeout_s=120
            )
            for host in "bc":  # the run has engines and ranks on both
                assert {"engine", "rank"} <= kinds_of_children(cluster.folder / host)
            await asyncio.to_thread(cluster.lose, "c")
            await asyncio.sleep(AWAY_S)
            assert client.poll() is None
            await asyncio.to_thread(cluster.bring_back, "c")
            await eventually(lambda: client.poll() is not None, what="its end", timeout_s=240)
        finally:
            if client.poll() is None:
                client.kill()
            output = client.communicate()[0]
        assert client.returncode == 0, output
        await assert_whole(cluster.at("a", STORE), "hosts", SIZE)
        async with RunStore.connect(cluster.at("a", STORE)) as store:
            await store.get_run("hosts")
            held = [len(await each.list_groups("hosts")) for each in store.shards.values()]
            assert all(held)
            assert sum(held) == SIZE.versions * SIZE.groups
        proves(
            f"3 hosts, one lost for {AWAY_S:.0f} s with its store, engines and a rank of a group "
            f"of two, and returned: {SIZE.versions} versions, {SIZE.versions * SIZE.vertices} rows "
            f"finished = consumed, none twice, groups {' + '.join(map(str, held))} on the stores"
        )
    finally:
        await asyncio.to_thread(cluster.__exit__)


def kinds_of_children(host: Path) -> set[str]:
    """What processes the services of a host have, from the records that they keep of them."""
    records = [json.loads(file.read_text()) for file in host.rglob("children.json")]
    return {re.split(r"[^a-z]", child["name"])[0] for record in records for child in record}

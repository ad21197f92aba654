"""A store without room at a save: nothing is lost, nothing half made, and it goes on with room."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from trainer.harness import make_rows
from trainer.service_harness import Cluster, fails, start_cluster

from flexmarl.core.errors import ErrorReason

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(100)]

SETTINGS = {
    "device": "simulated",
    "simulated.seconds_scale": 1e-6,
    "simulated.policies.p.params_b": 1,
    "simulated.policies.p.tokens_per_s": 1e9,
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path_factory.mktemp("small")
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs the right to mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(small: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Both tiers of its store lie on the small file system; its records do not."""
    folder = tmp_path_factory.mktemp("cluster")
    for name in ("memory", "disk"):
        (small / name).mkdir()
    (folder / "store").mkdir()
    (folder / "store" / "segments").symlink_to(small / "disk")
    async with start_cluster(folder, memory=small / "memory", **SETTINGS) as started:
        yield started


def fill(folder: Path) -> Path:
    """Takes all the room that is left."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return filler


async def test_a_save_and_an_update_without_room_fail_by_name_and_are_made_with_it(
    cluster: Cluster, small: Path, tiny_model: Path
) -> None:
    run = await cluster.make_run({"p": {}}, {"p": tiny_model})
    await run.first_commit("p")
    records = [await run.micro_batch("p", make_rows(4, seed=seed), batch=0) for seed in (1, 2)]
    ids = [record.micro_batch_id for record in records]
    await run.bind("p", ["slot0"])
    await run.compute(records[0])
    before = await cluster.store.get_state(run.run_id, "p")

    filler = fill(small)
    for work in (run.save("p"), run.suspend("p"), run.apply("p", 0, ids[:1])):
        with fails(ErrorReason.DISK_FULL, ErrorReason.MEMORY_TIER_FULL):
            await work
    assert await cluster.store.get_state(run.run_id, "p") == before
    assert (await run.compute(records[0])).counts.num_rows == 0  # it still is in the sum
    assert (await run.compute(records[1])).counts.num_rows == 4  # which goes on

    filler.unlink()
    assert list((await run.save("p")).state.ledger) == ids
    state = (await run.apply("p", 0, ids)).state
    assert (state.version, state.counts.num_rows) == (1, 8)
    await run.suspend("p")

"""F5: a checkpoint appears whole, older ones go afterwards, and those of earlier starts count."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from trainer.harness import make_rows
from trainer.service_harness import Cluster, Run

from flexmarl.client import checkpoints
from flexmarl.client.checkpoints import checkpoints_in, write_checkpoint
from flexmarl.client.run_store import RunStore
from flexmarl.core.checkpoints import CheckpointRule
from flexmarl.core.errors import DomainError
from flexmarl.orchestrator.checkpoints import Checkpoints
from flexmarl.orchestrator.context import RunContext
from flexmarl.orchestrator.totals import Totals
from flexmarl.runtime.aio import Background
from flexmarl.runtime.dataset import Queries
from flexmarl.runtime.run_config import CheckpointConfig, RunConfig

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


async def trained(cluster: Cluster, model: Path) -> Run:
    run = await cluster.make_run(
        {name: {"optimizer": {"lr": 0.01}} for name in ("p", "q")}, {"p": model, "q": model}
    )
    await run.first_commit("p", "q")
    record = await run.micro_batch("p", make_rows(4), batch=0)
    await run.bind("p", ["slot0"])
    await run.compute(record)
    await run.commit((await run.apply("p", 0, [record.micro_batch_id])).state)
    await run.suspend("p")
    return run


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_a_checkpoint_loads_and_older_ones_go(
    cluster: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    run = await trained(cluster, tiny_model)
    folder, cache = tmp_path / "checkpoints", tmp_path / "cache"
    # What earlier starts of the run left: one checkpoint, and one that a crash cut.
    (folder / "v0000000").mkdir(parents=True)
    (folder / "v0000000" / checkpoints.DESCRIPTION).write_text("{}")
    (folder / ".unfinished-v0000001-x").mkdir()
    (folder / "notes.txt").write_text("mine")

    async def write(keep: int) -> Path:
        return await write_checkpoint(
            cluster.store,
            run.run_id,
            1,
            policies=["p", "q"],
            folder=folder,
            cache_dir=cache,
            rule=CheckpointRule(every=1, keep=keep),
        )

    place = await write(2)
    assert left(folder) == ["notes.txt", "v0000000", "v0000001"]
    hashes = set()
    for policy in ("p", "q"):
        lm = AutoModelForCausalLM.from_pretrained(place / policy, local_files_only=True)
        hashes.add(float(sum(value.detach().double().sum() for value in lm.parameters())))
    assert len(hashes) == 2
    assert await write(1) == place  # there already: only what is too old goes
    assert left(folder) == ["notes.txt", "v0000001"]
    assert list(checkpoints_in(folder)) == [1]


async def test_a_crash_in_the_middle_keeps_what_was_there(
    cluster: Cluster, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await trained(cluster, tiny_model)
    rule = CheckpointRule(every=1, keep=1)

    async def write(version: int) -> Path:
        return await write_checkpoint(
            cluster.store,
            run.run_id,
            version,
            policies=["p"],
            folder=tmp_path,
            cache_dir=tmp_path / "cache",
            rule=rule,
        )

    first = await write(0)

    def crash(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_publish", crash)
        with pytest.raises(OSError, match="No space"):
            await write(1)
    assert list(checkpoints_in(tmp_path)) == [0]
    assert left(tmp_path) == [first.name]
    with pytest.raises(DomainError, match="version 9"):
        await write(9)
    await write(1)
    assert list(checkpoints_in(tmp_path)) == [1]


@pytest.mark.parametrize("changed", ["weights", "created_unix_ns"])
async def test_a_number_that_comes_again_is_another_checkpoint(
    cluster: Cluster, tiny_model: Path, tmp_path: Path, changed: str
) -> None:
    """After a return to an older version, and in a run under the id of a deleted one."""
    run = await trained(cluster, tiny_model)
    folder = tmp_path / "checkpoints"

    async def write(version: int) -> Path:
        return await write_checkpoint(
            cluster.store,
            run.run_id,
            version,
            policies=["p"],
            folder=folder,
            cache_dir=tmp_path / "cache",
            rule=CheckpointRule(every=1, keep=1),
        )

    whole = contents(await write(1))
    stale = json.loads(whole[checkpoints.DESCRIPTION])
    stale[changed] = {"p": "sha256:other"} if changed == "weights" else 1
    beyond = folder / "v0000002"
    shutil.copytree(folder / "v0000001", beyond)
    for place in (folder / "v0000001", beyond):
        (place / checkpoints.DESCRIPTION).write_text(json.dumps(stale))

    assert contents(await write(1)) == whole
    assert list(checkpoints_in(folder)) == [1]
    aside = [name for name in left(folder) if name != "v0000001"]
    if changed == "weights":
        assert aside == []
    else:
        assert [name.rpartition("-")[0] for name in aside] == ["v0000001-of-1", "v0000002-of-1"]


@pytest.mark.parametrize("written", [False, True])
async def test_a_version_whose_checkpoint_a_kill_cut_is_written_at_the_next_start(
    cluster: Cluster, tiny_model: Path, tmp_path: Path, written: bool
) -> None:
    run = await trained(cluster, tiny_model)
    stored = await cluster.store.get_run(run.run_id)
    config = RunConfig.model_validate_json(stored.config_json).model_copy(
        update={"checkpoints": CheckpointConfig(every=1, keep=1, folder=tmp_path / "checkpoints")}
    )
    failures: list[BaseException] = []
    async with (
        RunStore.over(run.shards) as store,
        Background(lambda _, error: failures.append(error)) as background,
    ):
        context = RunContext(
            run_id=run.run_id,
            term=run.term,
            config=config,
            store=store,
            home=run.shards[0],
            queries=Queries(),
            totals=Totals(),
        )

        async def start() -> dict[str, bytes]:
            writer = Checkpoints(context, background, cache_dir=tmp_path / "cache")
            writer.resume(1)
            await writer.finish()
            return contents(tmp_path / "checkpoints" / run.run_id / "v0000001")

        whole = await start()
        folder = tmp_path / "checkpoints" / run.run_id
        if not written:
            shutil.rmtree(folder / "v0000001")
            (folder / ".unfinished-v0000001-x").mkdir()
        os.utime(folder, (1, 1))  # file systems' clocks tick in milliseconds: any change is told
        changed = folder.stat().st_mtime_ns
        assert await start() == whole
        assert left(folder) == ["v0000001"]
        assert (folder.stat().st_mtime_ns == changed) == written
    assert not failures


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from flexmarl.client.checkpoints import write_checkpoint
from flexmarl.client.store import StoreClient
from flexmarl.core.checkpoints import CheckpointRule

address, run_id, folder, cache, left = *sys.argv[1:5], int(sys.argv[5])
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")

def count(event, args):
    global left
    writes = event == "open" and isinstance(args[1], str) and "w" in args[1]
    if (writes or event in CHANGES) and folder in str(args[0]) or event == "shutil.rmtree":
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

async def main():
    async with StoreClient.connect(address) as store:
        sys.addaudithook(count)
        await write_checkpoint(store, run_id, 1, policies=["p"], folder=Path(folder),
            cache_dir=Path(cache), rule=CheckpointRule(every=1, keep=1))

asyncio.run(main())
"""


async def test_a_kill_before_any_change_of_the_folder_leaves_a_whole_checkpoint(
    cluster: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    """Also with one kept: the older one goes when the newer is whole, and not a step before."""
    run = await trained(cluster, tiny_model)

    async def write(version: int, folder: Path) -> dict[str, bytes]:
        place = await write_checkpoint(
            cluster.store,
            run.run_id,
            version,
            policies=["p"],
            folder=folder,
            cache_dir=tmp_path / "cache",
            rule=CheckpointRule(every=1, keep=1),
        )
        return contents(place)

    whole = {version: await write(version, tmp_path / str(version)) for version in (0, 1)}
    ends, kept = [], set[tuple[int, ...]]()
    while 0 not in ends:
        folder = tmp_path / f"killed-{len(ends)}"
        shutil.copytree(tmp_path / "0", folder)
        arguments = (cluster.store.address, run.run_id, folder, tmp_path / "cache", len(ends))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", KILLED, *map(str, arguments)
        )
        ends.append(await process.wait())
        found = checkpoints_in(folder)
        assert found, len(ends)
        for version, place in found.items():
            assert contents(place) == whole[version]
        kept.add(tuple(found))
        assert await write(1, folder) == whole[1]
        assert left(folder) == ["v0000001"]
    assert set(ends[:-1]) == {-signal.SIGKILL}
    assert kept == {(0,), (0, 1), (1,)}


def contents(place: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(place)): path.read_bytes()
        for path in sorted(place.rglob("*"))
        if path.is_file()
    }

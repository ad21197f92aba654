"""`flexmarl store restore` and `check` over all the stores of a run."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from meg_store.filled import fill_spread
from meg_store.store_harness import RUN, three_shards

from flexmarl.cli import main as cli_main

SHARDS = ("s0", "s1", "s2")


@pytest.fixture
def snapshots(tmp_path: Path) -> list[str]:
    """Snapshots of a run's three stores, made while they served."""
    live = tmp_path / "live"
    live.mkdir()

    async def make() -> list[str]:
        async with three_shards(live) as (store, _):
            await fill_spread(store)
            made = await store.create_snapshots("first")
        return [each.path for each in made]

    return asyncio.run(make())


@pytest.fixture
def store_command(monkeypatch, capsys):
    """Runs `flexmarl store ...`; returns exit code and both outputs."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["flexmarl", "store", *args])
        capsys.readouterr()  # what the stores said when they were filled
        with pytest.raises(SystemExit) as ended:
            cli_main.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


def test_stores_of_a_run_are_restored_and_checked_together(store_command, snapshots, tmp_path):
    folders = [tmp_path / "new" / name for name in SHARDS]
    named = [f"{name}={folder}" for name, folder in zip(SHARDS, folders, strict=True)]
    options = [word for target in named for word in ("--store-dir", target)]
    code, out, err = store_command("restore", *snapshots, *options, "--json")
    assert code == 0, err
    assert [store["folder"] for store in json.loads(out)] == [str(folder) for folder in folders]
    (folders[2] / "db" / "CURRENT").write_bytes(b"nonsense\n")
    code, out, err = store_command("check", *map(str, folders))
    assert code == 1, err
    assert f"{folders[0]}: store shard s0" in out
    assert f"{folders[2]}/db" in out
    assert f"{RUN} also lies on s2" in out
    assert out.endswith("damaged\n")

"""`store check` over all the stores of a run: what one of them says of another is compared."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from meg_store.filled import NUM_GROUPS, RECORD, fill_spread
from meg_store.store_harness import (
    RUN,
    a_group,
    a_run,
    a_vertex,
    serving,
    three_shards,
)

from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError
from flexmarl.core.shard_placement import rendezvous
from flexmarl.meg_store.backend import Batch, Table
from flexmarl.meg_store.check.report import CheckReport
from flexmarl.meg_store.check.store import check_stores
from flexmarl.meg_store.micro_batches import record_key
from flexmarl.meg_store.rocks_backend import RocksBackend

SHARDS = ("s0", "s1", "s2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of three stores at rest, one run over them; not to be changed."""
    folder = tmp_path_factory.mktemp("spread")

    async def make() -> None:
        async with three_shards(folder) as (store, _):
            await fill_spread(store)

    asyncio.run(make())
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A copy of them, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def check(folder: Path, *names: str) -> CheckReport:
    return check_stores([folder / name for name in names or SHARDS])


def group_on(shard: str) -> int:
    """The first group that lies on a shard."""
    return next(n for n in range(NUM_GROUPS) if rendezvous(a_group(n).group_id, SHARDS) == shard)


def row_on(shard: str, call: int = 0) -> bytes:
    vertex = a_vertex(call, group=group_on(shard), agent=("solver", "judge")[call])
    return keys.row(RUN, vertex.meta.agent, vertex.meta.vertex_id)


def change(message, change_: Callable) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        value = message.FromString(data)
        change_(value)
        return bytes(value.SerializeToString(deterministic=True))

    return changed


def gone(_: bytes) -> None:
    """What becomes of a value that is lost."""


DAMAGES = {
    # shard to damage, its table, key, what becomes of the value; shard and kind of the finding
    "record gone, rows marked elsewhere": (
        ("s0", Table.META, record_key(RUN, 0, RECORD), gone),
        ("s1", "mark"),
    ),
    "row of a record gone": (("s1", Table.ROWS, row_on("s1"), gone), ("s0", "reference")),
    "row marked by another record": (
        (
            "s2",
            Table.ROWS,
            row_on("s2"),
            change(graph.VertexMeta, lambda m: setattr(m, "micro_batch_id", "b000000a0-m0007-p")),
        ),
        ("s2", "mark"),
    ),
    "row of a record was never released": (
        (
            "s1",
            Table.ROWS,
            row_on("s1"),
            change(graph.VertexMeta, lambda m: m.ClearField("advantage")),
        ),
        ("s0", "record"),
    ),
    "void reason lost": (
        (
            "s2",
            Table.ROWS,
            row_on("s2", 1),
            change(graph.VertexMeta, lambda m: m.ClearField("void_reason")),
        ),
        ("s0", "count"),
    ),
    "ledger without record": (
        (
            "s0",
            Table.META,
            keys.numbered(1, "state", RUN, "p"),
            change(graph.StateRecord, lambda s: s.ledger.append("b000000a0-m0009-p")),
        ),
        ("s0", "ledger"),
    ),
    "run gone from one": (("s1", Table.META, keys.join("run", RUN), gone), ("s1", "run")),
    "run is another one": (
        (
            "s2",
            Table.META,
            keys.join("run", RUN),
            change(graph.Run, lambda run: setattr(run, "vertex_events", True)),
        ),
        ("s2", "run"),
    ),
    "newer term than was issued": (
        (
            "s1",
            Table.META,
            keys.join("term", RUN, "orchestrator"),
            lambda _: (7).to_bytes(8, "big"),
        ),
        ("s1", "term"),
    ),
}


def test_whole_run_has_no_findings_and_is_counted_once(whole):
    report = check(whole)
    assert report.findings == []
    assert report.left_out == {}
    checked = report.checked
    assert (checked["runs"], checked["rows"], checked["marks"]) == (1, 24, NUM_GROUPS)
    assert set(report.stores) == set(SHARDS)
    assert check(whole, "s2", "s0", "s1").findings == []


@pytest.mark.parametrize("name", sorted(DAMAGES))
def test_damage_between_stores_is_found_and_its_shard_named(copy, name):
    (shard, table, key, damage), expected = DAMAGES[name]
    backend = RocksBackend(copy / shard / "db")
    old = backend.get(table, key)
    assert old is not None
    batch = Batch()
    batch.put(table, key, damage(old))
    backend.write([batch])
    backend.close()
    found = check(copy).findings
    assert expected in {(f.shard, f.kind) for f in found}, found
    assert all(RUN in finding.where for finding in found)


def test_group_where_nobody_looks_for_it_is_found(copy):
    group = a_group(group_on("s1"))
    backend = RocksBackend(copy / "s2" / "db")
    batch = Batch()
    batch.put(Table.GRAPH, keys.join("group", RUN, group.group_id), group.SerializeToString())
    backend.write([batch])
    backend.close()
    (finding,) = check(copy).findings
    assert (finding.shard, finding.kind) == ("s2", "place")
    assert "'s1'" in finding.what


@pytest.mark.parametrize(
    ("given", "left_out"),
    [(("s0",), ["s1", "s2"]), (("s0", "s2"), ["s1"]), (("s2",), ["s0", "s1"])],
)
def test_stores_that_are_not_given_are_said_to_be_left_out(whole, given, left_out):
    report = check(whole, *given)
    assert report.findings == []
    assert report.left_out == {RUN: left_out}


async def test_lost_store_is_not_asked_for(tmp_path):
    async with three_shards(tmp_path) as (store, _):
        term = await store.acquire_term(RUN, "orchestrator", holder="test")
        await store.write_graph(RUN, term=term, groups=[a_group(n) for n in range(NUM_GROUPS)])
        await store.lose_shard(RUN, "s1", term=term)
        store.mark_lost(["s1"])
        # What comes later is placed over the others, where it would not have been before.
        later = [a_group(n) for n in range(NUM_GROUPS, 2 * NUM_GROUPS)]
        await store.write_graph(RUN, term=term, groups=later)
    report = check(tmp_path, "s0", "s2")
    assert report.findings == []
    assert report.left_out == {}
    assert check(tmp_path).findings == []


def test_two_folders_of_one_shard_are_refused(whole, copy):
    with pytest.raises(DomainError, match="both hold store shard 's1'"):
        check_stores([whole / "s1", copy / "s1"])


def test_stores_of_different_runs_are_checked_each_for_itself(tmp_path):
    async def make() -> None:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            async with serving(tmp_path / name, shard=name) as (store, _):
                await store.create_run(a_run())
                await store.write_graph(RUN, term=0, groups=[a_group()], vertices=[a_vertex()])

    asyncio.run(make())
    report = check(tmp_path, "a", "b")
    assert report.findings == []
    assert (report.checked["runs"], report.left_out) == (2, {})


def test_offline_check_takes_all_folders(whole):
    folders = [str(whole / name) for name in SHARDS]
    command = [sys.executable, "-m", "flexmarl.meg_store.offline", "check", *folders]
    done = subprocess.run(command, capture_output=True, check=True, timeout=30)
    answer = json.loads(done.stdout)
    assert answer["findings"] == []
    assert [store["shard"] for store in answer["stores"]] == list(SHARDS)

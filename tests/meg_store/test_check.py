"""`store check` finds damage and names it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from meg_store.filled import NEXT_GROUP, RECORD, fill
from meg_store.store_harness import (
    GROUP,
    RUN,
    SAMPLE,
    a_group,
    a_record,
    a_run,
    a_vertex,
    ref,
    serving,
)

from flexmarl.api.common.v1 import common_pb2 as common
from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.client.buffers import Buffer, BufferSpec
from flexmarl.client.errors import DataError
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError
from flexmarl.meg_store.backend import SHARD_KEY, Batch, Table
from flexmarl.meg_store.check.store import check_stores
from flexmarl.meg_store.claims import claim_key
from flexmarl.meg_store.micro_batches import record_key
from flexmarl.meg_store.objects import ObjectRecord
from flexmarl.meg_store.rocks_backend import RocksBackend


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store at rest, filled and whole; not to be changed."""
    folder = tmp_path_factory.mktemp("whole")

    async def make() -> None:
        async with serving(folder) as (store, _):
            await fill(store)
            # What a kill at this moment would leave: everything is in the log.
            shutil.copytree(folder, folder.with_name("killed"))

    asyncio.run(make())
    return folder


@pytest.fixture
def killed(whole: Path, tmp_path: Path) -> Path:
    """A copy of what a kill of that store would have left, to be damaged."""
    return Path(shutil.copytree(whole.with_name("killed"), tmp_path / "killed"))


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def test_whole_store_has_no_findings(whole):
    before = state_of(whole)
    report = check_stores([whole])
    assert report.findings == []
    checked = report.checked
    assert (checked["rows"], checked["edges"], checked["marks"]) == (5, 2, 2)
    assert (checked["objects"], checked["segments"], checked["manifests"]) == (2, 2, 2)
    assert state_of(whole) == before


def state_of(folder: Path) -> list[tuple[str, int]]:
    # The library writes its own settings anew, whatever they are.
    files = [p for p in (folder / "db").iterdir() if p.name != "rocksdict-config.json"]
    return sorted((p.name, p.stat().st_mtime_ns) for p in files)


def test_killed_store_has_no_findings(killed):
    assert check_stores([killed]).findings == []


def row(call: int, agent: str = "solver") -> bytes:
    return keys.row(RUN, agent, f"{SAMPLE}/0:{call}")


def changed(message, data: bytes, change: Callable) -> bytes:
    value = message.FromString(data)
    change(value)
    return value.SerializeToString(deterministic=True)


def edit(table: Table, key: bytes, message=None, change=None) -> Callable[[RocksBackend], None]:
    """Damage that changes, or without a message deletes, one value."""

    def damage(backend: RocksBackend) -> None:
        old = backend.get(table, key)
        assert old is not None, key
        batch = Batch()
        batch.put(table, key, None if message is None else changed(message, old, change))
        backend.write([batch])

    return damage


def put(table: Table, key: bytes, value: bytes) -> Callable[[RocksBackend], None]:
    def damage(backend: RocksBackend) -> None:
        batch = Batch()
        batch.put(table, key, value)
        backend.write([batch])

    return damage


def delete(table: Table, key: bytes) -> Callable[[RocksBackend], None]:
    return edit(table, key)


def copy_to_another_agent(backend: RocksBackend) -> None:
    """The same call, stored once more."""
    for table in (ROWS, PAYLOADS):
        put(table, row(0, "judge"), backend.get(table, row(0)))(backend)
    meta = graph.VertexMeta.FromString(backend.get(ROWS, row(0)))
    meta.agent = "judge"
    put(ROWS, row(0, "judge"), meta.SerializeToString(deterministic=True))(backend)
    put(META, keys.join("agent", RUN, "judge"), b"")(backend)


def misnumber_event(backend: RocksBackend) -> None:
    key = keys.numbered(2, RUN)
    put(Table.EVENTS, key, backend.get(Table.EVENTS, keys.numbered(3, RUN)))(backend)


def miscount(backend: RocksBackend) -> None:
    prefix = keys.prefix("object")
    key, value = next(backend.scan(Table.META, prefix, keys.after(prefix)))
    record = ObjectRecord.decode(value)
    fake = ObjectRecord(
        record.upload, record.num_pieces, record.created_unix_ns, 7, record.ref
    ).encode()
    put(Table.META, key, fake)(backend)


def lose_piece(backend: RocksBackend) -> None:
    key, _ = max(backend.scan(Table.BLOBS, b"", None), key=lambda pair: len(pair[1]))
    put(Table.BLOBS, key, b"other")(backend)


META, ROWS, PAYLOADS, GRAPH, MARKS = (
    Table.META,
    Table.ROWS,
    Table.PAYLOADS,
    Table.GRAPH,
    Table.MARKS,
)
DAMAGES = {
    "row is not readable": ("row", put(ROWS, row(1), b"\xff\xff")),
    "row says another id": (
        "row",
        edit(ROWS, row(1), graph.VertexMeta, lambda m: setattr(m, "path", "0:9")),
    ),
    "payload is gone": ("row", edit(PAYLOADS, row(1))),
    "row is gone": ("reference", edit(ROWS, row(0))),
    "tokens and log-probs disagree": (
        "row",
        edit(PAYLOADS, row(1), graph.VertexPayload, lambda p: p.logprobs.append(1.0)),
    ),
    "edge from nowhere": (
        "edge",
        edit(
            ROWS,
            row(1),
            graph.VertexMeta,
            lambda m: m.upstream_vertex_ids.append(f"{SAMPLE}/0:8"),
        ),
    ),
    "cycle": (
        "edge",
        edit(
            ROWS,
            row(0),
            graph.VertexMeta,
            lambda m: m.upstream_vertex_ids.append(f"{SAMPLE}/0:2"),
        ),
    ),
    "group is gone": ("reference", edit(GRAPH, keys.join("group", RUN, GROUP))),
    "object's count is wrong": ("count", miscount),
    "object's content is wrong": ("object", lose_piece),
    "claim is gone": (
        "claim",
        edit(MARKS, claim_key(RUN, "p", f"{NEXT_GROUP}-s000a0/0:0")),
    ),
    "claim too many": ("claim", put(MARKS, claim_key(RUN, "p", f"{SAMPLE}/0:0"), b"x")),
    "mark without record": ("mark", edit(META, record_key(RUN, 0, RECORD))),
    "mark of another record": (
        "mark",
        edit(
            ROWS, row(0), graph.VertexMeta, lambda m: setattr(m, "micro_batch_id", "b000000a0-m1")
        ),
    ),
    "owner is gone": ("mark", edit(MARKS, keys.join("owner", RUN, f"{SAMPLE}/0:0"))),
    "row in two records": (
        "record",
        put(
            META,
            record_key(RUN, 0, "b000000a0-m0001-p"),
            a_record(a_vertex(0), ordinal=1).SerializeToString(),
        ),
    ),
    "ledger names no record": (
        "ledger",
        edit(
            META,
            keys.numbered(1, "state", RUN, "p"),
            graph.StateRecord,
            lambda s: s.ledger.append("b000000a0-m0007-p"),
        ),
    ),
    "ledger names one twice": (
        "ledger",
        edit(
            META,
            keys.numbered(1, "state", RUN, "p"),
            graph.StateRecord,
            lambda s: s.ledger.append(RECORD),
        ),
    ),
    "version is gone": ("manifest", edit(META, keys.numbered(0, "manifest", RUN))),
    "segment's record is gone": ("reference", edit(META, keys.join("segment", "w1"))),
    "run is not readable": ("run", put(META, keys.join("run", RUN), b"\xff\xff")),
    "record is not readable": ("record", put(META, record_key(RUN, 0, RECORD), b"\xff\xff")),
    "object's record is not readable": (
        "object",
        put(META, keys.join("object", "short"), b"\0"),
    ),
    "segment's record is not readable": (
        "segment",
        put(META, keys.join("segment", "short"), b"\0"),
    ),
    "bundle of the run is gone": (
        "reference",
        delete(META, keys.join("object", f"sha256:{hashlib.sha256(b'workflow').hexdigest()}")),
    ),
    "agent is not listed": ("reference", delete(META, keys.join("agent", RUN, "solver"))),
    "vertex is in the tables of two agents": ("row", copy_to_another_agent),
    "owner without record": (
        "mark",
        put(MARKS, keys.join("owner", RUN, f"{SAMPLE}/0:9"), RECORD.encode()),
    ),
    "mark that its record does not name": (
        "mark",
        edit(ROWS, row(2), graph.VertexMeta, lambda m: setattr(m, "micro_batch_id", RECORD)),
    ),
    "record under a term that was never issued": (
        "term",
        edit(META, record_key(RUN, 0, RECORD), graph.MicroBatch, lambda m: setattr(m, "term", 9)),
    ),
    "version under a term that was never issued": (
        "term",
        edit(
            META,
            keys.numbered(1, "manifest", RUN),
            graph.Manifest,
            lambda m: setattr(m, "term", 9),
        ),
    ),
    "update of other micro-batches than its version says": (
        "ledger",
        edit(
            META,
            keys.numbered(1, "state", RUN, "p"),
            graph.StateRecord,
            lambda s: s.ClearField("ledger"),
        ),
    ),
    "event is gone": ("event", delete(Table.EVENTS, keys.numbered(3, RUN))),
    "event has another's content": ("event", misnumber_event),
    "counts do not add up": (
        "count",
        edit(
            ROWS,
            row(2),
            graph.VertexMeta,
            lambda m: m.ClearField("void_reason"),
        ),
    ),
}


@pytest.mark.parametrize("name", sorted(DAMAGES))
def test_damage_is_found_and_named(copy, name):
    kind, damage = DAMAGES[name]
    backend = RocksBackend(copy / "db")
    damage(backend)
    backend.close()
    report = check_stores([copy])
    assert kind in {finding.kind for finding in report.findings}, report.findings
    assert all(f.shard == "s0" for f in report.findings)
    assert all(f.where.startswith((RUN, "object", "segment")) for f in report.findings)


def test_damaged_segment_is_found(copy):
    for path in (copy / "segments").iterdir():
        path.write_bytes(b"\xff" + path.read_bytes()[1:])
    assert {f.kind for f in check_stores([copy]).findings} == {"segment"}


def test_missing_segment_of_the_disk_tier_is_found(tmp_path):
    async def make() -> None:
        async with serving(tmp_path) as (store, _):
            await fill(store)

    asyncio.run(make())
    for path in (tmp_path / "segments").iterdir():
        path.unlink()
    findings = check_stores([tmp_path]).findings
    assert [f.kind for f in findings] == ["segment", "segment"]
    assert "missing" in findings[0].what


def test_corrupt_block_is_found_by_its_table(copy):
    for table in (copy / "db").glob("*.sst"):
        data = bytearray(table.read_bytes())
        data[20] ^= 0xFF  # in the first block of rows
        table.write_bytes(data)
    findings = check_stores([copy]).findings
    assert {f.kind for f in findings} == {"table"}
    assert {"meta", "rows", "payloads"} <= {f.where for f in findings}
    assert "checksum" in findings[0].what


async def test_a_service_over_a_corrupt_block_says_so_and_stays_up(copy):
    backend = RocksBackend(copy / "db")
    files = backend._db.live_files()
    backend.close()
    rows = [
        file["name"] for file in files if file["start_key"].startswith(keys.row(RUN, "solver", ""))
    ]
    for name in rows:
        path = copy / "db" / name.lstrip("/")
        data = bytearray(path.read_bytes())
        data[20] ^= 0xFF
        path.write_bytes(data)
    async with serving(copy) as (store, _):
        for reading in (
            store.get_vertices(RUN, [ref(a_vertex(0))]),
            store.count_vertices(RUN, batch=0, batch_attempt=0, consumed=[]),
            store.get_sample_graph(RUN, SAMPLE),
        ):
            with pytest.raises(DataError, match="table rows is damaged"):
                await reading
        await store.write_graph(RUN, term=1, groups=[a_group(7)])
        assert a_group(7).group_id in {group.group_id for group in await store.list_groups(RUN)}
        assert await store.get_object(f"sha256:{hashlib.sha256(b'workflow').hexdigest()}")


@pytest.mark.parametrize("how", ["cut", "flipped"])
def test_damaged_log_is_found_and_the_store_still_opens(killed, how):
    log = max((killed / "db").glob("*.log"), key=lambda path: path.stat().st_size)
    data = bytearray(log.read_bytes())
    if how == "cut":
        data = data[:-20]
    else:
        data[len(data) // 2] ^= 0xFF
    log.write_bytes(data)
    assert check_stores([killed]).findings[0].kind == "log"
    backend = RocksBackend(killed / "db")
    assert "orruption" in backend.torn_log
    assert backend.get(META, SHARD_KEY) == b"s0"
    backend.close()


def test_database_that_cannot_be_opened_is_a_finding(copy):
    (copy / "db" / "CURRENT").write_bytes(b"nonsense\n")
    assert [f.kind for f in check_stores([copy]).findings] == ["database"]


def test_running_store_and_no_store_are_refused(copy, tmp_path):
    backend = RocksBackend(copy / "db")
    # A lock is a process's: from this one it would not be seen.
    command = [sys.executable, "-m", "flexmarl.meg_store.offline", "check", str(copy)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=30)
    assert "snapshot" in json.loads(done.stdout)["error"]
    backend.close()
    with pytest.raises(DomainError, match="NOT_FOUND"):
        check_stores([tmp_path])


def test_offline_check_prints_its_report(copy):
    command = [sys.executable, "-m", "flexmarl.meg_store.offline", "check", str(copy)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=30)
    assert json.loads(done.stdout)["findings"] == []


async def test_a_sum_that_an_update_used_up_is_not_missing(tmp_path):
    """The record that names it is kept with its version; its segment goes at the commit."""
    async with serving(tmp_path) as (store, shard):
        await store.create_run(a_run())
        term = await store.acquire_term(RUN, "orchestrator", holder="test")
        bound = await store.acquire_term(RUN, "policy/p", holder="test")

        async def publish(key: str) -> common.ObjectRef:
            data = Buffer(BufferSpec("w", "U8", (64,)), memoryview(bytes(64)))
            return await store.set(RUN, key, [data])

        async def save(version: int, **refs: common.ObjectRef) -> None:
            state = graph.StateRecord(policy="p", version=version, term=bound, **refs)
            await store.save_state(RUN, state)

        async def commit(version: int, weights: common.ObjectRef) -> None:
            policies = {"p": graph.PolicyManifest(weights=weights, state_version=version)}
            manifest = graph.Manifest(version=version, term=term, policies=policies)
            await store.commit(RUN, manifest, expected_version=version - 1 if version else None)

        first, second = await publish("w0"), await publish("w1")
        await save(0, weights=first)
        await commit(0, first)
        await save(0, weights=first, gradients=await publish("sum"))
        await save(1, weights=second)
        await commit(1, second)
        assert shard.segments.find("sum") is None
        assert (await store.get_state(RUN, "p", version=0)).gradients.key == "sum"
    assert check_stores([tmp_path]).findings == []


async def test_data_of_another_shard_are_not_served(tmp_path):
    async with serving(tmp_path):
        pass
    with pytest.raises(DomainError, match="shard 's0'"):
        async with serving(tmp_path, shard="s1"):
            pass

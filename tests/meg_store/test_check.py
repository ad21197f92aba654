"""`store check` finds damage and names it; snapshots are whole, restore makes a store of them."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from meg_store.store_harness import (
    GROUP,
    RUN,
    SAMPLE,
    a_group,
    a_record,
    a_run,
    a_sample,
    a_vertex,
    closure,
    ref,
    serving,
)

from flexmarl.api.common.v1alpha1 import common_pb2 as common
from flexmarl.api.meg_store.v1alpha1 import graph_pb2 as graph
from flexmarl.api.meg_store.v1alpha1 import meg_store_pb2 as pb
from flexmarl.client.buffers import BufferSpec
from flexmarl.client.errors import FlexMarlError
from flexmarl.client.store import StoreClient
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError
from flexmarl.meg_store.backend import SHARD_KEY, Batch, Table
from flexmarl.meg_store.check.store import check_store
from flexmarl.meg_store.claims import claim_key
from flexmarl.meg_store.micro_batches import record_key
from flexmarl.meg_store.objects import ObjectRecord
from flexmarl.meg_store.rocks_backend import RocksBackend
from flexmarl.meg_store.snapshots import restore

RECORD = "b000000a0-m0000-p"
NEXT_GROUP = "b000001a0-g0000"


async def fill(store: StoreClient) -> None:
    """One committed batch: two rows consumed, one void, one tool; an object; a second batch."""
    columns = [graph.Column(name="image", type=graph.COLUMN_TYPE_OBJECT)]
    bundle = await store.put_object(b"workflow", run_id=RUN)
    await store.create_run(a_run(columns=columns, workflow_bundle=bundle))
    term = await store.acquire_term(RUN, "orchestrator", holder="test")
    bound = await store.acquire_term(RUN, "policy/p", holder="test")
    image = await store.put_object(b"pixels" * 400_000)
    rows = [a_vertex(n, upstream_vertex_ids=[f"{SAMPLE}/0:{n - 1}"][:n]) for n in range(3)]
    rows[0].payload.columns["image"].object_value.CopyFrom(image)
    rows.append(a_vertex(3, agent="tool", policy="", kind=common.VERTEX_KIND_TOOL, trainable=False))
    await store.write_graph(RUN, term=term, groups=[a_group()], vertices=rows, samples=[a_sample()])
    await store.close_groups(RUN, [closure(*rows[:2], voided=(rows[2],))], term=term)
    record = a_record(*rows[:2], term=term)
    await store.create_micro_batch(RUN, record)
    await store.mark_rows(RUN, record.micro_batch_id, record.rows, term=term)
    for version in range(2):
        specs = [BufferSpec("w", "U8", (1000,))]
        writer = await store.allocate_segment(RUN, f"w{version}", specs, tier=pb.SEGMENT_TIER_DISK)
        writer.buffers["w"].data[:] = bytes([version + 1]) * 1000
        weights = await writer.seal(checksum=writer.content_hash())
        state = graph.StateRecord(policy="p", version=version, term=bound, weights=weights)
        if version:
            state.applied = True
            state.ledger.append(record.micro_batch_id)
        await store.save_state(RUN, state)
        manifest = graph.Manifest(
            version=version, term=term, policies={"p": graph.PolicyManifest(weights=weights)}
        )
        if version:
            counted = await store.count_vertices(
                RUN, batch=0, batch_attempt=0, consumed=[record.micro_batch_id]
            )
            manifest.batch.CopyFrom(
                graph.BatchRecord(
                    policies=counted.policies, consumed_micro_batch_ids=[record.micro_batch_id]
                )
            )
        await store.commit(RUN, manifest, expected_version=version - 1 if version else None)
    sample_id = f"{NEXT_GROUP}-s000a0"
    later = a_vertex(
        vertex_id=f"{sample_id}/0:0", sample_id=sample_id, group_id=NEXT_GROUP, batch=1
    )
    admitted = a_group(group_id=NEXT_GROUP, batch=1)
    await store.write_graph(RUN, term=term, groups=[admitted], vertices=[later])
    closed = closure(later)
    closed.group_id = NEXT_GROUP
    await store.close_groups(RUN, [closed], term=term)


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
    report = check_store(whole)
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
    assert check_store(killed).findings == []


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
    report = check_store(copy)
    assert kind in {finding.kind for finding in report.findings}, report.findings
    assert all(RUN in f.where or "object" in f.where for f in report.findings)


def test_damaged_segment_is_found(copy):
    for path in (copy / "segments").iterdir():
        path.write_bytes(b"\xff" + path.read_bytes()[1:])
    assert {f.kind for f in check_store(copy).findings} == {"segment"}


def test_missing_segment_of_the_disk_tier_is_found(tmp_path):
    async def make() -> None:
        async with serving(tmp_path) as (store, _):
            await fill(store)

    asyncio.run(make())
    for path in (tmp_path / "segments").iterdir():
        path.unlink()
    findings = check_store(tmp_path).findings
    assert [f.kind for f in findings] == ["segment", "segment"]
    assert "missing" in findings[0].what


def test_corrupt_block_is_found_by_its_table(copy):
    for table in (copy / "db").glob("*.sst"):
        data = bytearray(table.read_bytes())
        data[20] ^= 0xFF  # in the first block of rows
        table.write_bytes(data)
    findings = check_store(copy).findings
    assert {f.kind for f in findings} == {"table"}
    assert {"meta", "rows", "payloads"} <= {f.where for f in findings}
    assert "checksum" in findings[0].what


@pytest.mark.parametrize("how", ["cut", "flipped"])
def test_damaged_log_is_found_and_the_store_still_opens(killed, how):
    log = max((killed / "db").glob("*.log"), key=lambda path: path.stat().st_size)
    data = bytearray(log.read_bytes())
    if how == "cut":
        data = data[:-20]
    else:
        data[len(data) // 2] ^= 0xFF
    log.write_bytes(data)
    assert check_store(killed).findings[0].kind == "log"
    backend = RocksBackend(killed / "db")
    assert "orruption" in backend.torn_log
    assert backend.get(META, SHARD_KEY) == b"s0"
    backend.close()


def test_database_that_cannot_be_opened_is_a_finding(copy):
    (copy / "db" / "CURRENT").write_bytes(b"nonsense\n")
    assert [f.kind for f in check_store(copy).findings] == ["database"]


def test_running_store_and_no_store_are_refused(copy, tmp_path):
    backend = RocksBackend(copy / "db")
    # A lock is a process's: from this one it would not be seen.
    command = [sys.executable, "-m", "flexmarl.meg_store.offline", "check", str(copy)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=30)
    assert "snapshot" in json.loads(done.stdout)["error"]
    backend.close()
    with pytest.raises(DomainError, match="NOT_FOUND"):
        check_store(tmp_path)


def test_offline_check_prints_its_report(copy):
    command = [sys.executable, "-m", "flexmarl.meg_store.offline", "check", str(copy)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=30)
    assert json.loads(done.stdout)["findings"] == []


async def test_snapshot_while_writing_is_whole_and_restores(tmp_path):
    """Rows acknowledged before the call are in it; the restored store goes on from there."""
    live = tmp_path / "live"
    live.mkdir()
    async with serving(live) as (store, _):
        await fill(store)
        in_memory = await store.allocate_segment(RUN, "m0", [BufferSpec("w", "U8", (4,))])
        in_memory.buffers["w"].data[:] = b"abcd"
        await in_memory.seal()
        before = [v async for v in store.list_vertices(RUN, view=pb.VERTEX_VIEW_FULL)]
        stop = asyncio.Event()

        async def write() -> None:
            call = 0
            await store.write_graph(RUN, term=1, groups=[a_group(2)])
            while not stop.is_set():
                await store.write_graph(RUN, term=1, vertices=[a_vertex(call, group=2)])
                call += 1

        writer = asyncio.create_task(write())
        made = await store.create_snapshot("first")
        stop.set()
        await writer
        assert (made.num_objects, made.num_segments) == (2, 3)
        with pytest.raises(FlexMarlError, match="first"):
            await store.create_snapshot("first")
        with pytest.raises(FlexMarlError, match="snapshot"):
            await store.create_snapshot("../first")
    snapshot = Path(made.path)
    assert check_store(snapshot).findings == []
    restored = tmp_path / "restored"
    restore(snapshot, restored)
    with pytest.raises(DomainError, match="ALREADY_EXISTS"):
        restore(snapshot, restored)
    assert check_store(restored).findings == []
    async with serving(restored) as (store, _):
        found = {
            v.meta.vertex_id: v async for v in store.list_vertices(RUN, view=pb.VERTEX_VIEW_FULL)
        }
        assert all(found[v.meta.vertex_id] == v for v in before)
        for key, content in (("m0", b"abcd"), ("w1", b"\x02" * 1000)):
            async with store.open_segment(RUN, key, holder="x") as reader:
                assert str(restored) in str(reader.path)
                assert bytes(reader.buffers["w"].data) == content
        assert await store.acquire_term(RUN, "orchestrator", holder="next") == 2
        assert list(await store.get_vertices(RUN, [ref(a_vertex(0))]))


def test_restore_of_half_a_snapshot_is_refused(tmp_path):
    (tmp_path / "half").mkdir()
    with pytest.raises(DomainError, match="not a whole snapshot"):
        restore(tmp_path / "half", tmp_path / "restored")
    assert not (tmp_path / "restored").exists()


async def test_data_of_another_shard_are_not_served(tmp_path):
    async with serving(tmp_path):
        pass
    with pytest.raises(DomainError, match="shard 's0'"):
        async with serving(tmp_path, shard="s1"):
            pass

"""Payloads of large groups lie apart; nobody above the backend sees a difference."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.meg_store import payload_files
from flexmarl.meg_store.backend import Batch, Table
from flexmarl.meg_store.rocks_backend import RocksBackend

NUM_ROWS = 40


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[RocksBackend]:
    opened = RocksBackend(tmp_path / "db")
    yield opened
    opened.close()


def rows(run: bytes, *, size: int = 4096, count: int = NUM_ROWS) -> dict[bytes, bytes]:
    return {
        b"%s\0solver\0%03d" % (run, number): b"\x0a" + b"%03d" % number * (size // 3)
        for number in range(count)
    }


def write(backend: RocksBackend, values: dict[bytes, bytes]) -> None:
    batch = Batch()
    batch.put_many(Table.PAYLOADS, values)
    backend.write([batch])
    backend.flush()


def files(folder: Path) -> list[Path]:
    return sorted((folder / "payloads").glob("*"))


def content(backend: RocksBackend) -> dict[bytes, bytes]:
    return dict(backend.scan(Table.PAYLOADS, b"", None))


def test_a_large_group_lies_apart_and_is_read_as_it_was_written(backend, tmp_path):
    written = rows(b"a")
    mixed = {**written, b"a\0solver\0small": b"\x0a1", b"a\0solver\0none": b""}
    write(backend, mixed)
    (file,) = files(tmp_path / "db")
    assert file.read_bytes() == b"".join(written.values())
    assert content(backend) == mixed
    assert list(backend.scan(Table.PAYLOADS, b"", None, reverse=True)) == sorted(
        mixed.items(), reverse=True
    )
    assert backend.get_many(Table.PAYLOADS, [*mixed, b"?"]) == [*mixed.values(), None]
    assert [backend.get(Table.PAYLOADS, key) for key in mixed] == list(mixed.values())


def test_a_group_of_several_batches_keeps_its_order(backend):
    first, second = rows(b"a"), {key: value + b"!" for key, value in rows(b"a").items()}
    batches = [Batch(), Batch(), Batch()]
    batches[0].put_many(Table.PAYLOADS, first)
    batches[1].put_many(Table.PAYLOADS, second)
    batches[2].put(Table.PAYLOADS, next(iter(second)), None)
    backend.write(batches)
    second.pop(next(iter(second)))
    assert content(backend) == second


def test_more_payloads_than_one_call_of_the_system_takes(backend):
    written = rows(b"a", size=1100, count=2500)
    write(backend, written)
    assert content(backend) == written


def test_what_is_appended_to_a_mapped_file_is_read(backend):
    for run in (b"a", b"b", b"c"):
        write(backend, rows(run))
        assert len(content(backend)) % NUM_ROWS == 0
    assert content(backend) == {**rows(b"a"), **rows(b"b"), **rows(b"c")}


def test_small_groups_stay_in_their_table(backend, tmp_path):
    write(backend, rows(b"a", count=10))
    assert files(tmp_path / "db") == []
    assert content(backend) == rows(b"a", count=10)


def test_a_start_reads_what_was_written_and_begins_a_file(tmp_path):
    for run in (b"a", b"b"):
        opened = RocksBackend(tmp_path)
        write(opened, rows(run))
        opened.close()
    kept = RocksBackend(tmp_path, payloads_apart=False)
    write(kept, rows(b"c"))
    assert content(kept) == {**rows(b"a"), **rows(b"b"), **rows(b"c")}
    kept.close()
    assert [path.name for path in files(tmp_path)] == ["00000001", "00000002"]
    reader = RocksBackend(tmp_path, read_only=True)
    assert len(content(reader)) == 3 * NUM_ROWS
    reader.close()


def test_what_a_crash_left_behind_is_named_by_nothing(tmp_path):
    opened = RocksBackend(tmp_path / "live")
    write(opened, rows(b"a"))
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    opened.close()
    with files(tmp_path / "killed")[0].open("ab") as file:
        file.write(b"half a payload")
    second = RocksBackend(tmp_path / "killed")
    write(second, rows(b"b"))
    assert content(second) == {**rows(b"a"), **rows(b"b")}
    second.close()


def test_damage_and_loss_are_told(tmp_path):
    opened = RocksBackend(tmp_path)
    write(opened, rows(b"a"))
    opened.close()
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    for data in (whole[:5000] + b"?" + whole[5001:], whole[:5000], None):
        if data is None:
            file.unlink()
        else:
            file.write_bytes(data)
        damaged = RocksBackend(tmp_path)
        key = list(rows(b"a"))[1]
        for read in (
            lambda: damaged.get(Table.PAYLOADS, key),  # noqa: B023 - called at once
            lambda: damaged.get_many(Table.PAYLOADS, [key]),  # noqa: B023
            lambda: content(damaged),  # noqa: B023
        ):
            with pytest.raises(DomainError, match="table payloads is damaged") as caught:
                read()
            assert caught.value.reason is ErrorReason.CHECKSUM_MISMATCH
        damaged.close()


def test_a_copy_stands_alone(backend, tmp_path):
    write(backend, rows(b"a"))
    backend.checkpoint(tmp_path / "copy")
    write(backend, rows(b"b"))
    copy = RocksBackend(tmp_path / "copy")
    assert content(copy) == rows(b"a")
    write(copy, rows(b"c"))
    assert content(backend) == {**rows(b"a"), **rows(b"b")}
    copy.close()


def test_files_go_with_the_last_row_in_them(tmp_path, monkeypatch):
    monkeypatch.setattr(payload_files, "FILE_BYTES", 1)  # one file per group
    backend = RocksBackend(tmp_path)
    for run in (b"a", b"b", b"a", b"c"):
        write(backend, rows(run, count=NUM_ROWS + len(files(tmp_path))))
    backend.get(Table.PAYLOADS, b"a\0solver\0000")  # it is mapped
    batch = Batch()
    batch.deleted_ranges.append((Table.PAYLOADS, b"a\0", b"a\1"))
    backend.write([batch])
    backend.compact(Table.PAYLOADS, b"a\0", b"a\1")
    assert [path.name for path in files(tmp_path)] == ["00000002", "00000004"]
    assert len(content(backend)) == NUM_ROWS + 1 + NUM_ROWS + 3
    backend.close()


def test_no_more_files_are_mapped_than_are_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr(payload_files, "FILE_BYTES", 1)
    monkeypatch.setattr(payload_files, "_MAX_MAPPED", 2)
    backend = RocksBackend(tmp_path)
    runs = [b"a", b"b", b"c", b"d"]
    for run in runs:
        write(backend, rows(run))
    for run in (*runs, *reversed(runs)):
        key, value = next(iter(rows(run).items()))
        assert backend.get(Table.PAYLOADS, key) == value
        assert len(backend._payloads._maps) <= 2
    backend.close()

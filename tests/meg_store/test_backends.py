"""The contract of a backend, on both of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.meg_store.backend import Backend, Batch, Table
from flexmarl.meg_store.memory_backend import MemoryBackend
from flexmarl.meg_store.rocks_backend import RocksBackend


@pytest.fixture(params=["memory", "rocks"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    opened = MemoryBackend() if request.param == "memory" else RocksBackend(tmp_path / "db")
    yield opened
    opened.close()


def put(backend: Backend, *pairs: tuple[bytes, bytes | None], table: Table = Table.META) -> None:
    batch = Batch()
    for key, value in pairs:
        batch.put(table, key, value)
    backend.write([batch])


def test_values_are_found_in_their_table_only(backend):
    put(backend, (b"a", b"1"))
    assert backend.get(Table.META, b"a") == b"1"
    assert backend.get(Table.ROWS, b"a") is None
    assert backend.get_many(Table.META, [b"x", b"a"]) == [None, b"1"]
    assert backend.get_many(Table.META, []) == []


def test_later_batch_of_a_group_wins(backend):
    first, second = Batch(), Batch()
    first.put(Table.META, b"a", b"1")
    second.put(Table.META, b"a", None)
    second.put(Table.META, b"b", b"2")
    backend.write([first, second])
    backend.flush()
    assert backend.get_many(Table.META, [b"a", b"b"]) == [None, b"2"]


def test_scans_have_an_open_end_and_both_directions(backend):
    put(backend, *[(bytes((byte,)), b"") for byte in b"bcdf"])

    def scanned(start: bytes, end: bytes | None, reverse: bool = False) -> bytes:
        return b"".join(key for key, _ in backend.scan(Table.META, start, end, reverse=reverse))

    assert scanned(b"c", b"f") == b"cd"
    assert scanned(b"c", None) == b"cdf"
    assert scanned(b"a", b"e", reverse=True) == b"dcb"
    assert scanned(b"c", b"f", reverse=True) == b"dc"
    assert scanned(b"c", None, reverse=True) == b"fdc"
    assert scanned(b"g", None) == b""


def test_bound_of_a_scan_lives_as_long_as_the_scan(backend):
    put(backend, *[(b"key-%06d-%s" % (number, b"a" * 40), b"") for number in range(200)])
    end = b"key-%06d" % 100
    scans = [backend.scan(Table.META, b"key", end) for _ in range(50)]
    del end
    assert [sum(1 for _ in scan) for scan in scans] == [100] * 50


def test_range_is_deleted_after_the_writes_of_its_batch(backend):
    batch = Batch()
    for key in (b"a", b"b", b"c"):
        batch.put(Table.EVENTS, key, b"x")
    batch.deleted_ranges.append((Table.EVENTS, b"a", b"c"))
    backend.write([batch])
    assert [key for key, _ in backend.scan(Table.EVENTS, b"", None)] == [b"c"]


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(st.binary(min_size=1, max_size=3), st.none() | st.binary(max_size=3)),
        max_size=30,
    )
)
def test_both_backends_agree(tmp_path_factory, operations):
    rocks = RocksBackend(tmp_path_factory.mktemp("db"))
    twin = MemoryBackend()
    try:
        for pair in operations:
            put(rocks, pair)
            put(twin, pair)
        for reverse in (False, True):
            assert list(rocks.scan(Table.META, b"", None, reverse=reverse)) == list(
                twin.scan(Table.META, b"", None, reverse=reverse)
            )
    finally:
        rocks.close()


def test_second_opener_is_refused_and_close_releases(tmp_path):
    first = RocksBackend(tmp_path)
    put(first, (b"a", b"1"))
    for _ in range(2):  # a refused opener must not release the first one's lock
        with pytest.raises(DomainError) as caught:
            RocksBackend(tmp_path)
        assert caught.value.reason is ErrorReason.STORE_LOCKED
    first.close()
    assert (tmp_path / "LOCK").exists()  # its presence means nothing
    second = RocksBackend(tmp_path)
    assert second.get(Table.META, b"a") == b"1"
    second.close()


def test_torn_last_record_does_not_keep_the_database_from_opening(tmp_path):
    first = RocksBackend(tmp_path / "live")
    for number in range(100):
        put(first, (b"%03d" % number, b"x" * 100))
    first.flush()
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in (tmp_path / "live").iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    first.close()
    log = max(copy.glob("*.log"), key=lambda path: path.stat().st_size)
    log.write_bytes(log.read_bytes()[:-37])
    second = RocksBackend(copy)
    kept = [key for key, _ in second.scan(Table.META, b"", None)]
    second.close()
    assert kept == [b"%03d" % number for number in range(99)]


@pytest.mark.parametrize("reverse", [False, True])
def test_damaged_block_is_an_error_and_never_the_end_of_a_scan(tmp_path, reverse):
    first = RocksBackend(tmp_path)
    put(first, *((b"%06d" % n, b"%d" % n * 50) for n in range(5000)), table=Table.ROWS)
    first.close()
    (table,) = tmp_path.glob("*.sst")
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 0xFF
    table.write_bytes(data)
    second = RocksBackend(tmp_path)
    with pytest.raises(DomainError, match="store check") as caught:
        _ = [second.get(Table.ROWS, b"%06d" % n) for n in range(5000)]
    assert caught.value.reason is ErrorReason.CHECKSUM_MISMATCH
    with pytest.raises(DomainError, match="table rows is damaged"):
        second.get_many(Table.ROWS, [b"%06d" % n for n in range(5000)])
    with pytest.raises(DomainError, match="table rows is damaged"):
        _ = list(second.scan(Table.ROWS, b"", None, reverse=reverse))
    put(second, (b"a", b"1"))
    assert second.get(Table.META, b"a") == b"1"
    second.close()

"""The RocksDB backend.

`write` holds the interpreter's lock, `flush_wal(True)` releases it: hence writes are not synced by
themselves, and one writer thread (writer.py) flushes per group. A write reaches the operating
system before it returns, so the death of this process loses nothing that was written.

Payloads of large groups go to files of their own (payload_files.py): RocksDB would write each of
their bytes twice and compute a checksum of it without the processor's help.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    Checkpoint,
    DBCompressionType,
    DBRecoveryMode,
    Options,
    Rdict,
    RdictIter,
    ReadOptions,
    WriteBatch,
    WriteOptions,
)

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.meg_store.backend import TABLES, Batch, Table
from flexmarl.meg_store.payload_files import PayloadFiles, file_of, is_place

_Pairs: TypeAlias = Generator[tuple[bytes, bytes], None, None]

_MAX_WAL_BYTES = 256 << 20
_WRITE_BUFFER_BYTES = 64 << 20
_MIN_BLOB_BYTES = 64 << 10
_CACHE_BYTES = 256 << 20
_MIN_APART_BYTES = 1 << 10
"""Payloads of less stay in their table."""

_MIN_APART_GROUP_BYTES = 64 << 10
"""So does what a smaller group brings: a second sync costs more than is saved."""


class RocksBackend:
    """One open database; exclusive over its folder until `close`.

    Args:
        path: Folder, made if it is missing.
        read_only: Change nothing and take no lock.
        payloads_apart: Write large groups' payloads into files of their own, which are synced at
            once; without it, all that was written before is read as well.

    Attributes:
        torn_log: What the library says of the log's end, when it is not whole; empty otherwise.

    Raises:
        DomainError: STORE_LOCKED while another process, or this one, has it open.
    """

    def __init__(self, path: Path, *, read_only: bool = False, payloads_apart: bool = True) -> None:
        if not read_only:
            path.mkdir(parents=True, exist_ok=True)
        self.torn_log = ""
        self._read_only = read_only
        try:
            self._db = _open(path, DBRecoveryMode.absolute_consistency(), read_only=read_only)
        except Exception as error:  # noqa: BLE001 - the library has no other class
            message = str(error)
            if "lock" in message.lower() and "block" not in message.lower():
                raise DomainError(
                    ErrorReason.STORE_LOCKED,
                    f"the store at {path} is open in another process",
                    {"path": str(path)},
                ) from None
            # A torn last record (power loss) ends recovery at the last whole one instead of
            # refusing to open; whatever else is damaged fails again.
            self._db = _open(path, DBRecoveryMode.point_in_time(), read_only=read_only)
            self.torn_log = message
        self._payloads = PayloadFiles(path / "payloads")
        self._payloads_apart = payloads_apart
        self._files_kept = threading.Lock()
        names = [t.name.lower() for t in TABLES]
        self._tables = [self._db.get_column_family(name) for name in names]
        self._handles = [self._db.get_column_family_handle(name) for name in names]
        self._compacting = threading.Lock()
        self._write_options = WriteOptions()
        self._write_options.sync = False

    def get(self, table: Table, key: bytes) -> bytes | None:
        """The value, or None."""
        try:
            value: bytes | None = self._tables[table].get(key)
            if table is Table.PAYLOADS and value and is_place(value):
                (value,) = self._payloads.read((value,))
        except Exception as error:
            raise _damaged(table) from error
        return value

    def get_many(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values, in order."""
        try:
            values: list[bytes | None] = self._tables[table].get(list(keys)) or []
            if table is Table.PAYLOADS:
                return self._payloads_at(values)
        except Exception as error:
            raise _damaged(table) from error
        return values

    def scan(
        self, table: Table, start: bytes, end: bytes | None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Pairs with start <= key < end; the iterator sees the table of its first step."""
        scan = self._scan_back if reverse else self._scan_on
        pairs = scan(table, start, end)
        return self._with_payloads(pairs) if table is Table.PAYLOADS else pairs

    def _payloads_at(self, values: list[bytes | None]) -> list[bytes | None]:
        places = [value for value in values if value and is_place(value)]
        if not places:
            return values
        read = iter(self._payloads.read(places))
        if len(places) == len(values):
            return list(read)
        return [next(read) if value and is_place(value) else value for value in values]

    def _with_payloads(self, pairs: _Pairs) -> _Pairs:
        with closing(pairs):  # an error must not keep an iterator, and so the database, open
            for key, value in pairs:
                try:
                    (payload,) = self._payloads.read((value,)) if is_place(value) else (value,)
                except (OSError, ValueError) as error:
                    raise _damaged(Table.PAYLOADS) from error
                yield key, payload

    def _scan_on(self, table: Table, start: bytes, end: bytes | None) -> _Pairs:
        # Three traps of rocksdict 0.3.29: the bound's memory belongs to the options, which must
        # outlive the iterator (hence a generator that holds them); `set_iterate_lower_bound` sets
        # an upper one (hence the first key as the bound); and an iteration that meets a damaged
        # block ends as if nothing followed (hence the look at what comes after the last key).
        options = ReadOptions()
        if end is not None:
            options.set_iterate_upper_bound(end)
        items: Any = self._tables[table].items(from_key=start, read_opt=options)
        last = None
        for pair in items:
            last = pair[0]
            yield pair
        cursor = self._tables[table].iter(options)
        cursor.seek(start if last is None else last)
        if last is not None and cursor.valid():
            cursor.next()
        _check_status(table, cursor)

    def _scan_back(self, table: Table, start: bytes, end: bytes | None) -> _Pairs:
        last = end
        for key, value in self._tables[table].items(backwards=True, from_key=end):
            assert isinstance(key, bytes)
            if key < start:
                return
            if key != end:
                last = key
                yield key, value
        cursor = self._tables[table].iter()
        if last is None:
            cursor.seek_to_last()
        else:
            cursor.seek_for_prev(last)
            if cursor.valid():
                cursor.prev()
        _check_status(table, cursor)

    def write(self, batches: Sequence[Batch]) -> None:
        """Apply batches as one RocksDB write batch."""
        group = WriteBatch(raw_mode=True)
        places = self._write_apart(batches)
        for batch in batches:
            for table, writes in enumerate(batch.writes):
                handle = self._handles[table]
                apart = places if table == Table.PAYLOADS else None
                for key, value in writes.items():
                    if value is None:
                        group.delete(key, handle)
                    elif apart is not None and len(value) >= _MIN_APART_BYTES:
                        group.put(key, next(apart), handle)
                    else:
                        group.put(key, value, handle)
            for range_table, start, end in batch.deleted_ranges:
                group.delete_range(start, end, self._handles[range_table])
        if not group.is_empty():
            self._db.write(group, self._write_options)

    def _write_apart(self, batches: Sequence[Batch]) -> Iterator[bytes] | None:
        """Write the large payloads of a large group; returns their places, in order."""
        if not self._payloads_apart:
            return None
        payloads = [
            value
            for batch in batches
            for value in batch.writes[Table.PAYLOADS].values()
            if value is not None and len(value) >= _MIN_APART_BYTES
        ]
        if sum(map(len, payloads)) < _MIN_APART_GROUP_BYTES:
            return None
        return iter(self._payloads.append(payloads))

    def flush(self) -> None:
        """Sync the write-ahead log."""
        self._db.flush_wal(True)

    def checkpoint(self, path: Path) -> None:
        """A consistent copy of all tables; their files are linked, so it costs little."""
        with self._files_kept:
            Checkpoint(self._db).create_checkpoint(str(path))
            self._payloads.copy_to(path / "payloads")

    def compact(self, table: Table, start: bytes | None, end: bytes | None) -> None:
        """Compact a range; takes as long as its data is large, and leaves the interpreter free."""
        with self._compacting:
            if not self._tables:  # closed meanwhile
                return
            self._tables[table].compact_range(start, end)
            if table is Table.PAYLOADS:
                self._remove_payload_files()

    def _remove_payload_files(self) -> None:
        """Remove the files that no place names any more."""
        with self._files_kept:  # a copy that is being made may name more than the table does
            unused = set(self._payloads.closed())
            if unused:
                values = (value for _, value in self._scan_on(Table.PAYLOADS, b"", None))
                unused -= {file_of(value) for value in values if is_place(value)}
                self._payloads.remove(unused)

    def close(self) -> None:
        """Flush, close, release the lock; without it the lock lives until garbage collection.

        Waits for a compaction that somebody asked for: its thread uses the tables.
        """
        if not self._read_only:
            self._db.flush_wal(True)
        with self._compacting:
            for table in self._tables:
                table.close()
            # Handles keep the database, and so its lock, alive.
            self._handles.clear()
            self._tables.clear()
        self._payloads.close()
        self._db.close()


def _check_status(table: Table, cursor: RdictIter) -> None:
    try:
        cursor.status()
    except Exception as error:
        raise _damaged(table) from error


def _damaged(table: Table) -> DomainError:
    return DomainError(
        ErrorReason.CHECKSUM_MISMATCH,
        f"table {table.name.lower()} is damaged; stop the store and run `flexmarl store check`",
        {"table": table.name.lower()},
    )


def _open(path: Path, recovery: DBRecoveryMode, *, read_only: bool) -> Rdict:
    cache = Cache(_CACHE_BYTES)
    options = _database_options(cache)
    options.set_wal_recovery_mode(recovery)
    return Rdict(
        str(path),
        options=options,
        column_families={t.name.lower(): _table_options(t, cache) for t in TABLES},
        access_type=AccessType.read_only() if read_only else AccessType.read_write(),
    )


def _database_options(cache: Cache) -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_max_total_wal_size(_MAX_WAL_BYTES)
    options.set_max_background_jobs(2)
    options.set_keep_log_file_num(3)
    options.set_max_open_files(512)
    options.set_block_based_table_factory(_block_options(cache))
    return options


def _table_options(table: Table, cache: Cache) -> Options:
    options = Options(raw_mode=True)
    options.set_write_buffer_size(_WRITE_BUFFER_BYTES)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_block_based_table_factory(_block_options(cache))
    options.set_memtable_whole_key_filtering(True)
    options.set_memtable_prefix_bloom_ratio(0.02)
    if table is Table.BLOBS:
        # Pieces are large and immutable: compaction should move their keys, not them.
        options.set_compression_type(DBCompressionType.none())
        options.set_enable_blob_files(True)
        options.set_min_blob_size(_MIN_BLOB_BYTES)
        options.set_enable_blob_gc(True)
        # Compactions are asked for when objects were removed: then all files are looked at.
        options.set_blob_gc_age_cutoff(1.0)
    return options


def _block_options(cache: Cache) -> BlockBasedOptions:
    block = BlockBasedOptions()
    block.set_block_cache(cache)
    block.set_bloom_filter(10, False)
    block.set_cache_index_and_filter_blocks(False)
    return block

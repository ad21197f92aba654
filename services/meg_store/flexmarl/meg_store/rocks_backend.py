"""The RocksDB backend.

`write` holds the interpreter's lock, `flush_wal(True)` releases it: hence writes are not synced by
themselves, and one writer thread (writer.py) flushes per group. A write reaches the operating
system before it returns, so the death of this process loses nothing that was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rocksdict import (
    BlockBasedOptions,
    Cache,
    DBCompressionType,
    DBRecoveryMode,
    Options,
    Rdict,
    ReadOptions,
    WriteBatch,
    WriteOptions,
)

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.meg_store.backend import TABLES, Batch, Table

_MAX_WAL_BYTES = 256 << 20
_WRITE_BUFFER_BYTES = 64 << 20
_MIN_BLOB_BYTES = 64 << 10
_CACHE_BYTES = 256 << 20


class RocksBackend:
    """One open database; exclusive over its folder until `close`.

    Args:
        path: Folder, made if it is missing.

    Raises:
        DomainError: STORE_LOCKED while another process, or this one, has it open.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        cache = Cache(_CACHE_BYTES)
        try:
            self._db = Rdict(
                str(path),
                options=_database_options(cache),
                column_families={t.name.lower(): _table_options(t, cache) for t in TABLES},
            )
        except Exception as error:
            if "lock" not in str(error).lower():
                raise
            raise DomainError(
                ErrorReason.STORE_LOCKED,
                f"the store at {path} is open in another process",
                {"path": str(path)},
            ) from None
        names = [t.name.lower() for t in TABLES]
        self._tables = [self._db.get_column_family(name) for name in names]
        self._handles = [self._db.get_column_family_handle(name) for name in names]
        self._write_options = WriteOptions()
        self._write_options.sync = False

    def get(self, table: Table, key: bytes) -> bytes | None:
        """The value, or None."""
        value: bytes | None = self._tables[table].get(key)
        return value

    def get_many(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values, in order."""
        values: list[bytes | None] = self._tables[table].get(list(keys)) or []
        return values

    def scan(
        self, table: Table, start: bytes, end: bytes | None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Pairs with start <= key < end; the iterator sees the table of its first step."""
        if reverse:
            return self._scan_back(table, start, end)
        return self._scan_on(table, start, end)

    def _scan_on(
        self, table: Table, start: bytes, end: bytes | None
    ) -> Iterator[tuple[bytes, bytes]]:
        # Two traps of rocksdict 0.3.29: the bound's memory belongs to the options, which must
        # outlive the iterator (hence a generator that holds them), and `set_iterate_lower_bound`
        # sets an upper one (hence the first key as the bound).
        options = ReadOptions()
        if end is not None:
            options.set_iterate_upper_bound(end)
        items: Any = self._tables[table].items(from_key=start, read_opt=options)
        yield from items

    def _scan_back(
        self, table: Table, start: bytes, end: bytes | None
    ) -> Iterator[tuple[bytes, bytes]]:
        for key, value in self._tables[table].items(backwards=True, from_key=end):
            assert isinstance(key, bytes)
            if key < start:
                return
            if key != end:
                yield key, value

    def write(self, batches: Sequence[Batch]) -> None:
        """Apply batches as one RocksDB write batch."""
        group = WriteBatch(raw_mode=True)
        for batch in batches:
            for table, writes in enumerate(batch.writes):
                handle = self._handles[table]
                for key, value in writes.items():
                    if value is None:
                        group.delete(key, handle)
                    else:
                        group.put(key, value, handle)
            for range_table, start, end in batch.deleted_ranges:
                group.delete_range(start, end, self._handles[range_table])
        if not group.is_empty():
            self._db.write(group, self._write_options)

    def flush(self) -> None:
        """Sync the write-ahead log."""
        self._db.flush_wal(True)

    def close(self) -> None:
        """Flush, close, release the lock; without it the lock lives until garbage collection."""
        self._db.flush_wal(True)
        for table in self._tables:
            table.close()
        # Handles keep the database, and so its lock, alive.
        self._handles.clear()
        self._tables.clear()
        self._db.close()


def _database_options(cache: Cache) -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    # A torn last record (kill, power loss) ends recovery at the last whole one instead of refusing.
    options.set_wal_recovery_mode(DBRecoveryMode.point_in_time())
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
    return options


def _block_options(cache: Cache) -> BlockBasedOptions:
    block = BlockBasedOptions()
    block.set_block_cache(cache)
    block.set_bloom_filter(10, False)
    block.set_cache_index_and_filter_blocks(False)
    return block

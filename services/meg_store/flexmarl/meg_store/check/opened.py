"""A store's folder, or a snapshot, open to be read."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.meg_store.backend import SHARD_KEY, TABLES, Backend, Table
from flexmarl.meg_store.check.report import CheckReport, ShardReport
from flexmarl.meg_store.rocks_backend import RocksBackend

_ROW_TABLES: Final = frozenset((Table.ROWS, Table.PAYLOADS, Table.GRAPH, Table.MARKS))


@dataclass(frozen=True, slots=True)
class OpenStore:
    """One store at rest.

    Attributes:
        shard: Its name.
        folder: Where it lies.
        backend: Its data.
        unreadable: Tables with a damaged block; what they hold cannot be judged.
        report: Where its findings go.
    """

    shard: str
    folder: Path
    backend: Backend
    unreadable: frozenset[Table]
    report: ShardReport

    @property
    def has_rows(self) -> bool:
        """Whether its rows, and what is kept of each, can be read."""
        return not self.unreadable & _ROW_TABLES

    def scan(self, table: Table, *parts: str) -> Iterator[tuple[bytes, bytes]]:
        """Pairs below these parts of a key."""
        prefix = keys.prefix(*parts)
        return self.backend.scan(table, prefix, keys.after(prefix))

    def runs(self) -> list[graph_pb2.Run]:
        """Its runs."""
        runs = []
        for key, value in self.scan(Table.META, "run"):
            run_id = key.decode().partition("\0")[2]
            run = self.report.read("run", run_id, graph_pb2.Run.FromString, value)
            if run is not None:
                runs.append(run)
        return runs


def refuse_unreadable(folder: Path) -> None:
    """Refuse a folder that cannot be checked.

    Raises:
        DomainError: NOT_FOUND where there is no store, STORE_LOCKED while it runs.
    """
    if not (folder / "db").is_dir():
        raise DomainError(ErrorReason.NOT_FOUND, f"{folder}: holds no store, it has no folder db")
    path = folder / "db" / "LOCK"
    if not path.exists():
        return
    with path.open("r+b") as file:
        try:
            # Who holds the lock runs; that the file is there means nothing.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DomainError(
                ErrorReason.STORE_LOCKED,
                f"{folder}: the store runs; check a snapshot of it (`flexmarl store snapshot`)",
                {"path": str(folder)},
            ) from None


def open_database(folder: Path, report: CheckReport) -> RocksBackend | None:
    """The database of a folder; None, and a finding, where it cannot be opened."""
    try:
        return RocksBackend(folder / "db", read_only=True)
    except Exception as error:  # noqa: BLE001 - whatever the library says of a damaged database
        report.of("").add("database", str(folder / "db"), f"cannot be opened: {error}")
        return None


def read_store(folder: Path, backend: RocksBackend, report: CheckReport) -> OpenStore:
    """Read all tables of a store once: every block is compared with its checksum."""
    shard = _shard_of(backend)
    own = report.of(shard)
    if backend.torn_log:
        told = f"what follows is dropped at the start: {backend.torn_log}"
        own.add("log", str(folder / "db"), told)
    unreadable = frozenset(table for table in TABLES if not _is_readable(backend, table, own))
    return OpenStore(shard, folder, backend, unreadable, own)


def _shard_of(backend: Backend) -> str:
    try:
        value = backend.get(Table.META, SHARD_KEY)
    except DomainError:
        return ""  # its table is reported
    return "" if value is None else value.decode(errors="replace")


def _is_readable(backend: Backend, table: Table, report: ShardReport) -> bool:
    last = b""
    try:
        for key, _ in backend.scan(table, b"", None):
            last = key
            report.checked["keys"] += 1
    except DomainError as error:
        report.add("table", table.name.lower(), f"after key {last!r}: {error.__cause__}")
        return False
    return True

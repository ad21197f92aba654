"""The check of one store's folder, or of a snapshot."""

from __future__ import annotations

import fcntl
from collections import Counter
from pathlib import Path

from flexmarl.api.meg_store.v1alpha1 import graph_pb2
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.meg_store.backend import SHARD_KEY, TABLES, Backend, Table
from flexmarl.meg_store.check.objects import check_objects, check_segments
from flexmarl.meg_store.check.report import CheckReport
from flexmarl.meg_store.check.rows import RowCheck
from flexmarl.meg_store.check.training import TrainingCheck, TrainingRecord
from flexmarl.meg_store.rocks_backend import RocksBackend
from flexmarl.meg_store.runs import object_keys


def check_store(folder: Path) -> CheckReport:
    """Verify the data of a store that does not run; nothing is changed.

    Raises:
        DomainError: NOT_FOUND where there is no store, STORE_LOCKED while it runs.
    """
    database = folder / "db"
    if not database.is_dir():
        raise DomainError(ErrorReason.NOT_FOUND, f"{folder}: holds no store, it has no folder db")
    _refuse_running(folder)
    report = CheckReport()
    try:
        backend = RocksBackend(database, read_only=True)
    except Exception as error:  # noqa: BLE001 - whatever the library says of a damaged database
        report.add("database", str(database), f"cannot be opened: {error}")
        return report
    try:
        if backend.torn_log:
            report.add(
                "log", str(database), f"what follows is dropped at the start: {backend.torn_log}"
            )
        _check(backend, folder, report)
    finally:
        backend.close()
    return report


def _check(backend: Backend, folder: Path, report: CheckReport) -> None:
    unreadable = [table for table in TABLES if not _is_readable(backend, table, report)]
    if Table.META in unreadable:
        return  # everything else is found through it
    prefix = keys.prefix("run")
    runs = [
        graph_pb2.Run.FromString(value)
        for _, value in backend.scan(Table.META, prefix, keys.after(prefix))
    ]
    shard = _shard_of(backend)
    references = Counter(key for run in runs for key in object_keys(run, shard=shard))
    rows_readable = not {Table.ROWS, Table.PAYLOADS, Table.GRAPH, Table.MARKS} & set(unreadable)
    for run in runs:
        report.checked["runs"] += 1
        if rows_readable:
            record = TrainingRecord.read(backend, run.run_id)
            facts = RowCheck(backend, run, report, shard=shard, consumed=record.consumed()).run()
            references.update(facts.objects)
            TrainingCheck(backend, run, record, facts, report, shard=shard).check()
    if rows_readable and Table.BLOBS not in unreadable:
        check_objects(backend, references, report)
    check_segments(backend, folder, report)


def _shard_of(backend: Backend) -> str:
    value = backend.get(Table.META, SHARD_KEY)
    return "" if value is None else value.decode()


def _is_readable(backend: Backend, table: Table, report: CheckReport) -> bool:
    """Read a table whole: every block is compared with its checksum."""
    last = b""
    try:
        for key, _ in backend.scan(table, b"", None):
            last = key
            report.checked["keys"] += 1
    except DomainError as error:
        report.add("table", table.name.lower(), f"after key {last!r}: {error.__cause__}")
        return False
    return True


def _refuse_running(folder: Path) -> None:
    """Refuse while a process holds the database's lock; the lock's file alone means nothing."""
    path = folder / "db" / "LOCK"
    if not path.exists():
        return
    with path.open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DomainError(
                ErrorReason.STORE_LOCKED,
                f"{folder}: the store runs; check a snapshot of it (`flexmarl store snapshot`)",
                {"path": str(folder)},
            ) from None

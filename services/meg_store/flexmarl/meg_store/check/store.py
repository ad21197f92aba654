"""The check of stores at rest, or of snapshots: of one, or of all that runs are spread over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.check.events import check_events
from flexmarl.meg_store.check.micro_batches import MicroBatchCheck
from flexmarl.meg_store.check.objects import check_objects, check_run_objects, check_segments
from flexmarl.meg_store.check.opened import (
    OpenStore,
    open_database,
    read_store,
    refuse_unreadable,
)
from flexmarl.meg_store.check.record import TrainingRecord
from flexmarl.meg_store.check.report import CheckReport
from flexmarl.meg_store.check.rows import RowCheck, RowFacts
from flexmarl.meg_store.check.spread import SpreadRun, check_places, check_terms, find_runs
from flexmarl.meg_store.check.training import TrainingCheck
from flexmarl.meg_store.runs import object_keys


def check_stores(folders: Sequence[Path]) -> CheckReport:
    """Verify the data of stores that do not run; nothing is changed.

    What a run has on several of them is compared: records and marks, ledgers and states, counts,
    places of groups, terms.

    Args:
        folders: Data folders or snapshots, in any order, each of another shard.

    Raises:
        DomainError: NOT_FOUND where there is no store, STORE_LOCKED while one runs,
            INVALID_ARGUMENT for two folders of the same shard.
    """
    for folder in folders:
        refuse_unreadable(folder)
    report = CheckReport()
    with ExitStack() as stack:
        _check(_open(folders, report, stack), report)
    return report


def _open(folders: Sequence[Path], report: CheckReport, stack: ExitStack) -> dict[str, OpenStore]:
    stores: dict[str, OpenStore] = {}
    for folder in folders:
        backend = open_database(folder, report)
        if backend is None:
            continue
        stack.callback(backend.close)
        store = read_store(folder, backend, report)
        if store.shard and store.shard in report.stores:
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT,
                f"{folder} and {report.stores[store.shard]} both hold store shard "
                f"{store.shard!r}: give one folder of each shard",
                {"shard": store.shard},
            )
        report.stores[store.shard] = folder
        if Table.META not in store.unreadable:  # everything else is found through it
            stores[store.shard] = store
    return stores


def _check(stores: Mapping[str, OpenStore], report: CheckReport) -> None:
    references = {name: Counter[str]() for name in stores}
    for run in find_runs(stores, report):
        _check_run(run, {name: stores[name] for name in run.rows}, references)
    for name, store in stores.items():
        if store.has_rows and Table.BLOBS not in store.unreadable:
            check_objects(store, references[name])
        check_segments(store)


def _check_run(
    run: SpreadRun, holders: Mapping[str, OpenStore], references: Mapping[str, Counter[str]]
) -> None:
    record = TrainingRecord() if run.home is None else TrainingRecord.read(run.home, run.run_id)
    facts: dict[str, RowFacts] = {}
    for name, store in holders.items():
        row = run.rows[name]
        own = object_keys(row, shard=name)
        references[name].update(own)
        check_run_objects(store, run.run_id, own)
        if Table.EVENTS not in store.unreadable:
            check_events(store, run.run_id)
        if store.has_rows:
            facts[name] = RowCheck(store, row, consumed=record.consumed()).run()
            references[name].update(facts[name].objects)
    check_places(run, facts)
    if run.home is not None:
        check_terms(run)
        if run.home.has_rows:
            MicroBatchCheck(run, record, facts).check()
            TrainingCheck(run, record, facts).check()

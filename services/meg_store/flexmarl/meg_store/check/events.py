"""The event log of a run: no gap, since a watch goes on at the next number."""

from __future__ import annotations

from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.core import store_keys as keys
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.check.opened import OpenStore


def check_events(store: OpenStore, run_id: str) -> None:
    """Check the events that are kept."""
    expected = None
    for key, value in store.scan(Table.EVENTS, run_id):
        number = keys.number_of(key)
        where = f"{run_id} event {number}"
        store.report.checked["events"] += 1
        store.report.expect(
            expected in (None, number), "event", where, f"event {expected} is missing"
        )
        expected = number + 1
        event = store.report.read("event", where, pb.Event.FromString, value[1:])
        if event is not None:
            store.report.expect(
                (event.cursor, event.kind) == (number, value[0]),
                "event",
                where,
                f"says that it is event {event.cursor}, of kind {event.kind}",
            )

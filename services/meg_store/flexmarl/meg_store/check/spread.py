"""Runs over several stores: who has the run, which groups belong where, which terms are known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.core import fencing
from flexmarl.core.shard_placement import rendezvous
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.check.opened import OpenStore
from flexmarl.meg_store.check.report import CheckReport
from flexmarl.meg_store.check.rows import RowFacts
from flexmarl.meg_store.runs import identity


@dataclass(frozen=True, slots=True)
class SpreadRun:
    """A run, and those of its stores that are read.

    Attributes:
        run: As its home shard has it; where that is not read, as another one does.
        names: Its shards, the home shard first.
        rows: The run as each of the stores that hold it has it, by shard.
        stores: The stores that are read and not lost, by shard.
        left_out: Shards that are neither.
    """

    run: graph_pb2.Run
    names: Sequence[str]
    rows: Mapping[str, graph_pb2.Run]
    stores: Mapping[str, OpenStore]
    left_out: Sequence[str]

    @property
    def run_id(self) -> str:
        """Its id."""
        return self.run.run_id

    @property
    def home(self) -> OpenStore | None:
        """The store of its records, ledgers, states and manifests."""
        return self.stores.get(self.names[0])


def find_runs(stores: Mapping[str, OpenStore], report: CheckReport) -> list[SpreadRun]:
    """The runs of these stores, each once, however many of them it is spread over."""
    found: dict[tuple[str, tuple[str, ...]], dict[str, graph_pb2.Run]] = {}
    for name, store in stores.items():
        for run in store.runs():
            names = tuple(shard.name for shard in run.shards) or (name,)
            found.setdefault((run.run_id, names), {})[name] = run
    spread = [_spread(names, rows, stores) for (_, names), rows in sorted(found.items())]
    for each in spread:
        report.checked["runs"] += 1
        if each.left_out:
            report.left_out[each.run_id] = list(each.left_out)
        _check_holders(each)
    return spread


def _spread(
    names: tuple[str, ...], rows: Mapping[str, graph_pb2.Run], stores: Mapping[str, OpenStore]
) -> SpreadRun:
    run = rows.get(names[0]) or next(iter(rows.values()))
    kept = [name for name in names if name not in run.lost_shards]
    return SpreadRun(
        run=run,
        names=names,
        rows=rows,
        stores={name: stores[name] for name in kept if name in stores},
        left_out=[name for name in kept if name not in stores],
    )


def _check_holders(run: SpreadRun) -> None:
    for name, store in run.stores.items():
        row = run.rows.get(name)
        if row is None:
            others = ", ".join(sorted(run.rows))
            store.report.add("run", run.run_id, f"is not here, but on its other shards: {others}")
        elif identity(row) != identity(run.run):
            store.report.add("run", run.run_id, "is another one than on its other shards")


def check_places(run: SpreadRun, facts: Mapping[str, RowFacts]) -> None:
    """Every group lies where readers look for it: on the shard that hashing of its id gives."""
    for name, found in facts.items():
        if name not in run.stores:
            continue  # lost: nobody looks there
        for group_id, lost_shard in found.groups.items():
            report = run.stores[name].report
            report.expect(
                bool(lost_shard) or name in _places(run, group_id),
                "place",
                f"{run.run_id} group {group_id}",
                f"belongs on store shard {next(_places(run, group_id))!r}: nobody finds it here",
            )


def _places(run: SpreadRun, group_id: str) -> Iterator[str]:
    """Where a group may lie; what was admitted before a loss lies where it was put then."""
    lost = list(run.run.lost_shards)
    for number in range(len(lost) + 1):
        gone = lost[:number]
        yield rendezvous(group_id, tuple(name for name in run.names if name not in gone))


def check_terms(run: SpreadRun) -> None:
    """No store knows a newer term than the home shard has issued: it would refuse the next one."""
    assert run.home is not None
    issued = terms_of(run.home, run.run_id)
    for name, store in run.stores.items():
        for scope, term in terms_of(store, run.run_id).items():
            store.report.expect(
                term <= issued.get(scope, 0),
                "term",
                f"{run.run_id} {scope}",
                f"{name!r} knows term {term}, the home shard has issued {issued.get(scope, 0)}",
            )


def terms_of(store: OpenStore, run_id: str) -> dict[str, int]:
    """Newest term by scope, as a store knows it."""
    return {
        key.decode().rpartition("\0")[2]: int.from_bytes(value, "big")
        for key, value in store.scan(Table.META, "term", run_id)
    }


def newest_term(home: OpenStore, run_id: str) -> int:
    """Newest term that the home shard has issued to the run's orchestrators; 0 before the first."""
    return terms_of(home, run_id).get(fencing.ORCHESTRATOR_SCOPE, 0)

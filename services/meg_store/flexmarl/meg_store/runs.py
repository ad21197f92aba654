"""Runs and terms: who exists, and who may write."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.enums import RUN_STATUS
from flexmarl.core import fencing
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ids import check_name
from flexmarl.core.states import RUN, RunStatus
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.columns import check_columns
from flexmarl.meg_store.database import Database, Draft
from flexmarl.meg_store.objects import Objects

_MAX_CONFIG_BYTES = 4 << 20


@dataclass(slots=True)
class RunEntry:
    """What decisions need of a run, kept in memory."""

    run: graph_pb2.Run
    issues_terms: bool
    columns: dict[str, int]
    required: tuple[str, ...]
    """Declared columns that a row must have before it can be claimed."""
    agents: set[str] = field(default_factory=set)
    terms: dict[str, int] = field(default_factory=dict)

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self.run.run_id


class Runs:
    """All runs of this shard, read at start."""

    def __init__(self, database: Database, objects: Objects, *, shard: str) -> None:
        self._database = database
        self._objects = objects
        self._shard = shard
        self._entries: dict[str, RunEntry] = {}
        self._deleting: set[str] = set()
        for _, value in database.scan(Table.META, keys.prefix("run")):
            run = graph_pb2.Run.FromString(value)
            self._entries[run.run_id] = self._entry(run)
        for key, _ in database.scan(Table.META, keys.prefix("agent")):
            _, run_id, agent = key.decode().split("\0")
            self._entries[run_id].agents.add(agent)
        for key, value in database.scan(Table.META, keys.prefix("term")):
            _, run_id, scope = key.decode().split("\0")
            self._entries[run_id].terms[scope] = int.from_bytes(value, "big")

    def __len__(self) -> int:
        return len(self._entries)

    def ids(self) -> list[str]:
        """Ids of all runs, newest first."""
        entries = self._entries.values()
        newest = sorted(entries, key=lambda e: (-e.run.created_unix_ns, e.run_id))
        return [entry.run_id for entry in newest]

    def require(self, run_id: str) -> RunEntry:
        """The entry of a run.

        Raises:
            DomainError: RUN_NOT_FOUND.
        """
        entry = self._entries.get(run_id)
        if entry is None or run_id in self._deleting:
            raise DomainError(
                ErrorReason.RUN_NOT_FOUND,
                f"no run {run_id!r} in store shard {self._shard!r}",
                {"run": run_id},
            )
        return entry

    def declared(self, run_id: str) -> Mapping[str, int]:
        """Types of the columns that a run declares; an unknown one declares none."""
        entry = self._entries.get(run_id)
        return {} if entry is None else entry.columns

    def describe(self, run_id: str) -> graph_pb2.Run:
        """The run without its configuration."""
        return self.require(run_id).run

    def read(self, run_id: str) -> graph_pb2.Run:
        """The run as stored.

        Raises:
            DomainError: RUN_NOT_FOUND.
        """
        self.require(run_id)
        value = self._database.staged(Table.META, keys.join("run", run_id))
        assert value is not None
        return graph_pb2.Run.FromString(value)

    def create(self, draft: Draft, request: pb.CreateRunRequest) -> pb.CreateRunResponse:
        """Store a run, or answer the same one.

        Raises:
            DomainError: INVALID_ARGUMENT, ALREADY_EXISTS, OBJECT_NOT_FOUND.
        """
        run = graph_pb2.Run()
        run.CopyFrom(request.run)
        self._check(run)
        if run.run_id in self._deleting:
            raise DomainError(
                ErrorReason.NOT_READY, f"run {run.run_id!r} is being deleted", {"run": run.run_id}
            )
        if run.run_id in self._entries:
            stored = self.read(run.run_id)
            if identity(stored) != identity(run):
                raise DomainError(
                    ErrorReason.ALREADY_EXISTS,
                    f"run {run.run_id!r} exists with other content; choose another run id",
                    {"run": run.run_id},
                )
            return pb.CreateRunResponse(run=stored)
        run.status = common_pb2.RUN_STATUS_SUBMITTED
        run.created_unix_ns = time.time_ns()
        for key in object_keys(run, shard=self._shard):
            self._objects.refer(draft, key)
        self.put(draft, run)
        return pb.CreateRunResponse(run=run)

    @contextmanager
    def deleting(self, run_id: str) -> Iterator[RunEntry]:
        """The entry of an ended run; for the block, nobody else finds the run.

        Raises:
            DomainError: RUN_NOT_FOUND, STATE_TRANSITION_REFUSED for a run that is driven.
        """
        entry = self.require(run_id)
        status = RUN_STATUS.to_core(entry.run.status)
        if status is RunStatus.RUNNING:
            raise DomainError(
                ErrorReason.STATE_TRANSITION_REFUSED,
                f"run {run_id!r} is {status}; stop it before it is deleted",
                {"run": run_id, "status": status.value},
            )
        self._deleting.add(run_id)
        try:
            yield entry
        finally:
            self._deleting.discard(run_id)

    def forget(self, run_id: str) -> None:
        """Drop the entry of a deleted run."""
        self._entries.pop(run_id, None)

    def update_status(
        self, draft: Draft, request: pb.UpdateRunStatusRequest
    ) -> pb.UpdateRunStatusResponse:
        """Move a run to a state; the state it is in is answered unchanged.

        Raises:
            DomainError: RUN_NOT_FOUND, TERM_STALE, STATE_TRANSITION_REFUSED, INVALID_ARGUMENT for
                another list of shards.
        """
        entry = self.require(request.run_id)
        if request.term != 0 or request.status != common_pb2.RUN_STATUS_STOPPED:
            self.check_term(draft, entry, fencing.ORCHESTRATOR_SCOPE, request.term)
        run = self.read(request.run_id)
        old, new = RUN_STATUS.to_core(run.status), RUN_STATUS.to_core(request.status)
        changed = _move_shards(run, request.shards)
        if request.config_json not in (b"", run.config_json):
            changed = True
            run.config_json = request.config_json
        if old is not new:
            if not RUN.allows(old, new):
                raise DomainError(
                    ErrorReason.STATE_TRANSITION_REFUSED,
                    f"run {run.run_id!r} is {old}; it cannot become {new}",
                    {"run": run.run_id, "status": old.value},
                )
            run.status = request.status
            run.ClearField("failure")
            if request.HasField("failure"):
                run.failure.CopyFrom(request.failure)
        if old is not new or changed:
            self.put(draft, run)
        return pb.UpdateRunStatusResponse(run=run)

    def acquire_term(self, draft: Draft, request: pb.AcquireTermRequest) -> pb.AcquireTermResponse:
        """Raise the term of a scope.

        Raises:
            DomainError: RUN_NOT_FOUND, INVALID_ARGUMENT for a scope, or away from the home shard.
        """
        entry = self.require(request.run_id)
        self.require_home(entry)
        fencing.check_scope(request.scope)
        term = entry.terms.get(request.scope, 0) + 1
        self._put_term(draft, entry, request.scope, term)
        return pb.AcquireTermResponse(term=term)

    def check_term(self, draft: Draft, entry: RunEntry, scope: str, term: int) -> None:
        """Refuse an older term.

        Raises:
            DomainError: TERM_STALE, INVALID_ARGUMENT for one never issued.
        """
        is_news = fencing.check_term(
            scope=scope,
            current=entry.terms.get(scope, 0),
            term=term,
            issued_here=entry.issues_terms,
        )
        if is_news:
            self._put_term(draft, entry, scope, term)

    def require_home(self, entry: RunEntry) -> None:
        """Refuse what belongs to the run's home shard.

        Raises:
            DomainError: INVALID_ARGUMENT naming the home shard.
        """
        if not entry.issues_terms:
            home = entry.run.shards[0].name
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT,
                f"run {entry.run_id!r}: ask its home shard {home!r}, this is {self._shard!r}",
                {"home": home},
            )

    def note_agent(self, draft: Draft, entry: RunEntry, agent: str) -> None:
        """Remember that an agent has a vertex table."""
        if agent not in entry.agents:
            draft.put(Table.META, keys.join("agent", entry.run_id, agent), b"")
            draft.at_commit.append(lambda: entry.agents.add(agent))

    def _check(self, run: graph_pb2.Run) -> None:
        check_name(run.run_id, what="run id")
        if run.status or run.created_unix_ns or run.lost_shards or run.returns:
            raise _invalid(
                "run.status, created_unix_ns, lost_shards and returns are set by the store"
            )
        if len(run.config_json) > _MAX_CONFIG_BYTES:
            raise _invalid(f"run.config_json is larger than {_MAX_CONFIG_BYTES} bytes")
        names = [check_name(shard.name, what="shard") for shard in run.shards]
        if len(set(names)) < len(names):
            raise _invalid("run.shards: a shard is named twice")
        if names and self._shard not in names:
            raise _invalid(f"run.shards does not name this shard, {self._shard!r}")
        for policy in run.models:
            check_name(policy, what="policy")
        check_columns(run.columns)

    def put(self, draft: Draft, run: graph_pb2.Run) -> None:
        """Write a run's row, and tell its watchers."""
        draft.put(Table.META, keys.join("run", run.run_id), run.SerializeToString())
        entry = self._entry(run)
        known = self._entries.get(run.run_id)
        if known is not None:
            entry.agents, entry.terms = known.agents, known.terms

        def keep() -> None:
            self._entries[run.run_id] = entry

        draft.at_commit.append(keep)
        draft.event(run.run_id, pb.Event(kind=pb.EVENT_KIND_RUN, run=entry.run))

    def _put_term(self, draft: Draft, entry: RunEntry, scope: str, term: int) -> None:
        draft.put(Table.META, keys.join("term", entry.run_id, scope), term.to_bytes(8, "big"))
        draft.at_commit.append(lambda: entry.terms.__setitem__(scope, term))

    def _entry(self, run: graph_pb2.Run) -> RunEntry:
        brief = graph_pb2.Run()
        brief.CopyFrom(run)
        brief.ClearField("config_json")
        return RunEntry(
            run=brief,
            issues_terms=not run.shards or run.shards[0].name == self._shard,
            columns={column.name: column.type for column in run.columns},
            required=tuple(column.name for column in run.columns if column.required),
        )


def _move_shards(run: graph_pb2.Run, shards: Sequence[common_pb2.ShardAddress]) -> bool:
    """Note where shards are now; returns whether any has moved."""
    if shards and [shard.name for shard in shards] != [shard.name for shard in run.shards]:
        raise _invalid(f"run {run.run_id!r}: its list of store shards is fixed")
    moved = False
    for known, shard in zip(run.shards, shards, strict=False):
        moved |= known.address != shard.address
        known.address = shard.address
    return moved


def identity(run: graph_pb2.Run) -> bytes:
    """What makes a run the same one: not its state, nor the port that a shard listens on today."""
    kept = graph_pb2.Run()
    kept.CopyFrom(run)
    for name in ("status", "failure", "created_unix_ns", "lost_shards", "returns"):
        kept.ClearField(name)
    for shard in kept.shards:
        shard.ClearField("address")
    return kept.SerializeToString(deterministic=True)


def object_keys(run: graph_pb2.Run, *, shard: str) -> list[str]:
    """Objects of a shard that a run itself refers to."""
    references = [run.workflow_bundle, run.dataset, run.evaluation_dataset]
    references += [run.models[name].archive for name in sorted(run.models)]
    return [ref.key for ref in references if ref.key and ref.shard in ("", shard)]


def _invalid(message: str) -> DomainError:
    return DomainError(ErrorReason.INVALID_ARGUMENT, message)

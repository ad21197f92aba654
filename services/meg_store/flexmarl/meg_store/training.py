"""State records and manifests: what training saved, what the team is at each version.

SaveState is one write of {object references, ledger, term}; Commit is one compare-and-set write of
the next manifest. After either, segments that nothing needs any more are freed in the same write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.core import fencing, retention
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ids import check_name
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.database import Database, Draft
from flexmarl.meg_store.paging import PAGE_BYTES
from flexmarl.meg_store.pins import Pins
from flexmarl.meg_store.runs import RunEntry, Runs
from flexmarl.meg_store.segments import Segments


class _Books:
    """What is saved for one run: segment keys by manifest version and by (policy, version)."""

    def __init__(self) -> None:
        self.manifests: dict[int, frozenset[str]] = {}
        self.saved: dict[tuple[str, int], frozenset[str]] = {}

    @property
    def newest(self) -> int | None:
        """Newest committed version."""
        return max(self.manifests, default=None)


class Training:
    """State directory and manifests of the runs whose home is here."""

    def __init__(
        self,
        database: Database,
        runs: Runs,
        segments: Segments,
        pins: Pins,
        *,
        retain_versions: int,
        on_commit: Callable[[str, int, frozenset[str]], None],
    ) -> None:
        self._database = database
        self._runs = runs
        self._segments = segments
        self._pins = pins
        self._retain_versions = retain_versions
        self._on_commit = on_commit
        self._books: dict[str, _Books] = {}
        for run_id in runs.ids():
            self._read_books(run_id)

    def save_state(self, draft: Draft, request: pb.SaveStateRequest) -> pb.SaveStateResponse:
        """Write a state record.

        Raises:
            DomainError: RUN_NOT_FOUND, TERM_STALE, SEGMENT_NOT_FOUND.
        """
        state = graph_pb2.StateRecord()
        state.CopyFrom(request.state)
        entry = self._runs.require(request.run_id)
        self._runs.require_home(entry)
        policy = check_name(state.policy, what="policy")
        self._runs.check_term(draft, entry, fencing.policy_scope(policy), state.term)
        self._segments.check_sealed(_refs_of_state(state))
        state.saved_unix_ns = time.time_ns()
        draft.put(
            Table.META,
            keys.numbered(state.version, "state", request.run_id, policy),
            state.SerializeToString(),
        )
        draft.event(request.run_id, pb.Event(kind=pb.EVENT_KIND_STATE, state=state))
        named = _keys_of_state(state)
        self._segments.refer(named)
        books = self._of(request.run_id)
        saved = {**books.saved, (policy, state.version): named}
        self._retire(draft, entry, books.manifests, saved)
        return pb.SaveStateResponse()

    def commit(self, draft: Draft, request: pb.CommitRequest) -> pb.CommitResponse:
        """Write the next manifest.

        Raises:
            DomainError: RUN_NOT_FOUND, TERM_STALE, VERSION_MISMATCH, SEGMENT_NOT_FOUND.
        """
        manifest = graph_pb2.Manifest()
        manifest.CopyFrom(request.manifest)
        entry = self._runs.require(request.run_id)
        self._runs.require_home(entry)
        self._runs.check_term(draft, entry, fencing.ORCHESTRATOR_SCOPE, manifest.term)
        books = self._of(request.run_id)
        expected = request.expected_version if request.HasField("expected_version") else None
        fencing.check_commit(newest=books.newest, expected=expected, version=manifest.version)
        for policy in manifest.policies:
            check_name(policy, what="policy")  # exports name folders after it
        self._segments.check_sealed(_refs_of_manifest(manifest))
        manifest.committed_unix_ns = time.time_ns()
        draft.put(
            Table.META,
            keys.numbered(manifest.version, "manifest", request.run_id),
            manifest.SerializeToString(),
        )
        draft.event(request.run_id, pb.Event(kind=pb.EVENT_KIND_COMMIT, manifest=manifest))
        named = _keys_of_manifest(manifest)
        self._segments.refer(named)
        manifests = {**books.manifests, manifest.version: named}
        self._retire(draft, entry, manifests, books.saved)
        draft.after_ack.append(lambda: self._on_commit(entry.run_id, manifest.version, named))
        return pb.CommitResponse()

    def pin(self, draft: Draft, request: pb.PinVersionRequest) -> pb.PinVersionResponse:
        """Keep a version, and with it all later ones, until a deadline.

        Raises:
            DomainError: RUN_NOT_FOUND, NOT_FOUND for a version that is not kept any more.
            ValueError: `ttl_s` is out of range.
        """
        entry = self._runs.require(request.run_id)
        self._runs.require_home(entry)
        if request.version not in self._of(request.run_id).manifests:
            raise DomainError(
                ErrorReason.NOT_FOUND,
                f"run {request.run_id!r} keeps no state of version {request.version}",
                {"version": str(request.version)},
            )
        return pb.PinVersionResponse(pin_id=self._pins.add(draft, request))

    def unpin(self, draft: Draft, request: pb.UnpinVersionRequest) -> pb.UnpinVersionResponse:
        """Give a pin up."""
        self._pins.remove(draft, request.run_id, request.pin_id)
        return pb.UnpinVersionResponse()

    def whole_versions(self, run_id: str) -> pb.FindWholeVersionsResponse:
        """Versions that the run could return to now.

        Raises:
            DomainError: RUN_NOT_FOUND, INVALID_ARGUMENT away from the home shard.
        """
        self._runs.require_home(self._runs.require(run_id))
        manifests = self._of(run_id).manifests
        whole = (v for v in manifests if self._segments.is_whole(manifests[v]))
        return pb.FindWholeVersionsResponse(
            newest_whole=max(whole, default=None), newest_on_disk=self._newest_on_disk(manifests)
        )

    def named(
        self, run_id: str
    ) -> tuple[Mapping[int, frozenset[str]], Mapping[tuple[str, int], frozenset[str]]]:
        """Segment keys of the kept manifests by version, of state records by policy and version."""
        books = self._of(run_id)
        return books.manifests, books.saved

    def give_up(
        self,
        draft: Draft,
        entry: RunEntry,
        *,
        after: int | None,
        states: Iterable[graph_pb2.StateRecord],
        policies: Collection[str],
    ) -> None:
        """Delete manifests after a version, and have these states be all that is saved of policies.

        Args:
            draft: Where it is written.
            entry: The run.
            after: The version; None deletes no manifest.
            states: What is saved of the policies from now on.
            policies: The policies.
        """
        run_id, books = entry.run_id, self._of(entry.run_id)
        manifests = {v: k for v, k in books.manifests.items() if after is None or v <= after}
        saved = {key: named for key, named in books.saved.items() if key[0] not in policies}
        for version in sorted(set(books.manifests) - set(manifests)):
            draft.delete(Table.META, keys.numbered(version, "manifest", run_id))
        for policy, version in sorted(set(books.saved) - set(saved)):
            draft.delete(Table.META, keys.numbered(version, "state", run_id, policy))
        for state in states:
            key = keys.numbered(state.version, "state", run_id, state.policy)
            draft.put(Table.META, key, state.SerializeToString())
            draft.event(run_id, pb.Event(kind=pb.EVENT_KIND_STATE, state=state))
            saved[state.policy, state.version] = _keys_of_state(state)
        self._retire(draft, entry, manifests, saved)

    def forget(self, run_id: str) -> None:
        """Drop what is remembered of a deleted run."""
        self._books.pop(run_id, None)
        self._pins.forget(run_id)

    def unfinished_checksums(self, manifest: graph_pb2.Manifest) -> list[str]:
        """Keys of named segments whose checksum is still being computed: a commit waits for it."""
        missing = set(self._segments.without_checksum())
        return sorted(missing & _keys_of_manifest(manifest))

    def state(self, request: pb.GetStateRequest) -> graph_pb2.StateRecord | None:
        """The record of a policy at a version, or its newest."""
        self._runs.require(request.run_id)
        prefix = keys.prefix("state", request.run_id, request.policy)
        if request.HasField("version"):
            value = self._database.get(
                Table.META,
                keys.numbered(request.version, "state", request.run_id, request.policy),
            )
        else:
            value = self._last(prefix)
        return None if value is None else graph_pb2.StateRecord.FromString(value)

    def manifest(self, request: pb.GetManifestRequest) -> graph_pb2.Manifest | None:
        """The manifest of a version, or the newest."""
        self._runs.require(request.run_id)
        if request.HasField("version"):
            key = keys.numbered(request.version, "manifest", request.run_id)
            value = self._database.get(Table.META, key)
        else:
            value = self._last(keys.prefix("manifest", request.run_id))
        return None if value is None else graph_pb2.Manifest.FromString(value)

    def manifests(self, run_id: str, *, start: int, limit: int) -> Iterator[graph_pb2.Manifest]:
        """Manifests from a version on, oldest first, as many as fit into a message."""
        self._runs.require(run_id)
        first = keys.numbered(start, "manifest", run_id)
        end = keys.after(keys.prefix("manifest", run_id))
        pairs = self._database.backend.scan(Table.META, first, end)
        size_bytes = 0
        for (_, value), _ in zip(pairs, range(limit), strict=False):
            yield graph_pb2.Manifest.FromString(value)
            size_bytes += len(value)
            if size_bytes >= PAGE_BYTES:
                return

    def _retire(
        self,
        draft: Draft,
        entry: RunEntry,
        manifests: Mapping[int, frozenset[str]],
        saved: Mapping[tuple[str, int], frozenset[str]],
    ) -> None:
        run_id = entry.run_id
        kept = retention.keep(
            manifests=manifests,
            saved=[
                retention.SavedSet(policy=policy, version=version, keys=named)
                for (policy, version), named in sorted(saved.items())
            ],
            retain_versions=self._retain_versions,
            on_disk=self._newest_on_disk(manifests),
            pinned=self._pins.versions(run_id),
        )
        for policy, version in sorted(set(saved) - kept.records):
            draft.delete(Table.META, keys.numbered(version, "state", run_id, policy))
        # Never named by anything saved: it may be on its way into the next record.
        for segment in self._segments.of_run(run_id):
            if segment.sealed and segment.referenced and segment.key not in kept.keys:
                self._segments.free(draft, segment)

        def keep() -> None:
            books = self._of(run_id)
            books.manifests = {v: named for v, named in manifests.items() if v >= kept.floor}
            books.saved = {key: saved[key] for key in saved if key in kept.records}

        draft.at_commit.append(keep)

    def _newest_on_disk(self, manifests: Mapping[int, frozenset[str]]) -> int | None:
        newest_first = sorted(manifests, reverse=True)
        return next((v for v in newest_first if self._segments.is_on_disk(manifests[v])), None)

    def _read_books(self, run_id: str) -> None:
        books = self._of(run_id)
        for state in self._stored_states(run_id):
            books.saved[state.policy, state.version] = _keys_of_state(state)
            self._segments.refer(_keys_of_state(state))
        prefix = keys.prefix("manifest", run_id)
        newest = self._database.backend.scan(Table.META, prefix, keys.after(prefix), reverse=True)
        for number, (_, value) in enumerate(newest):
            manifest = graph_pb2.Manifest.FromString(value)
            named = _keys_of_manifest(manifest)
            if number >= self._retain_versions and not self._segments.are_known(named):
                return  # retired, and so are all older ones
            books.manifests[manifest.version] = named
            self._segments.refer(named)

    def _of(self, run_id: str) -> _Books:
        return self._books.setdefault(run_id, _Books())

    def _stored_states(self, run_id: str) -> Iterator[graph_pb2.StateRecord]:
        for _, value in self._database.scan(Table.META, keys.prefix("state", run_id)):
            yield graph_pb2.StateRecord.FromString(value)

    def _last(self, prefix: bytes) -> bytes | None:
        pairs = self._database.backend.scan(Table.META, prefix, keys.after(prefix), reverse=True)
        last = next(pairs, None)
        return None if last is None else last[1]


def _refs_of_state(state: graph_pb2.StateRecord) -> list[common_pb2.ObjectRef]:
    refs = (state.weights, state.master, state.moments, state.gradients)
    return [ref for ref in refs if ref.key]


def _refs_of_manifest(manifest: graph_pb2.Manifest) -> list[common_pb2.ObjectRef]:
    policies = [manifest.policies[name] for name in sorted(manifest.policies)]
    refs = (ref for p in policies for ref in (p.weights, p.master, p.moments))
    return [ref for ref in refs if ref.key]


def _keys_of_state(state: graph_pb2.StateRecord) -> frozenset[str]:
    return frozenset(ref.key for ref in _refs_of_state(state))


def _keys_of_manifest(manifest: graph_pb2.Manifest) -> frozenset[str]:
    return frozenset(ref.key for ref in _refs_of_manifest(manifest))

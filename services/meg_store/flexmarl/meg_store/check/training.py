"""Ledgers, states and manifests of a run, and the counts that manifests state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.core import retention
from flexmarl.core import store_keys as keys
from flexmarl.core.batch_account import BatchAccount
from flexmarl.core.ids import parse_batch
from flexmarl.meg_store.backend import Table
from flexmarl.meg_store.check.record import TrainingRecord
from flexmarl.meg_store.check.rows import RowFacts
from flexmarl.meg_store.check.spread import SpreadRun, newest_term


class TrainingCheck:
    """Checks what training saved for one run.

    Args:
        run: The run; its home shard is read.
        record: What is stored of its training.
        facts: Of its rows, by shard.
    """

    def __init__(
        self, run: SpreadRun, record: TrainingRecord, facts: Mapping[str, RowFacts]
    ) -> None:
        assert run.home is not None
        self._run = run
        self._run_id = run.run_id
        self._home = run.home
        self._report = run.home.report
        self._record = record
        self._facts = facts
        self._newest_term = newest_term(run.home, run.run_id)

    def check(self) -> None:
        """Check everything."""
        for state in self._record.states:
            self._check_state(state)
        self._check_needed_states()
        self._check_manifests()
        # A batch is counted over all its rows; with a shard those of former batches are lost.
        if not self._run.run.lost_shards and set(self._run.names) <= self._facts.keys():
            for manifest in self._record.manifests:
                if manifest.HasField("batch"):
                    self._check_counts(manifest.batch)

    def _check_state(self, state: graph_pb2.StateRecord) -> None:
        self._report.checked["states"] += 1
        where = f"{self._run_id} state {state.policy} v{state.version}"
        ids = [*state.ledger, *state.dropped]
        self._report.expect(
            len(set(ids)) == len(ids), "ledger", where, "a micro-batch is in it twice"
        )
        batch = state.version - 1 if state.applied else state.version
        for name in ids:
            record = self._record.micro_batches.get(name)
            if record is None:
                self._report.add("ledger", where, f"micro-batch {name} has no record")
            elif (record.policy, record.batch) != (state.policy, batch):
                self._report.add(
                    "ledger",
                    where,
                    f"micro-batch {name} is of policy {record.policy}, batch {record.batch}",
                )

    def _check_needed_states(self) -> None:
        """What a run goes on from is there."""
        manifests = self._record.manifests
        states = {(state.policy, state.version): state for state in self._record.states}
        saved = [
            retention.SavedSet(policy=policy, version=version, keys=frozenset())
            for policy, version in states
        ]
        committed = manifests[-1].version if manifests else -1
        for needed in retention.needed_sets(saved, committed=committed):
            state = states[needed.policy, needed.version]
            where = f"{self._run_id} state {state.policy} v{state.version}"
            named = [state.weights, state.master, state.moments, state.gradients]
            self._check_named(named, where)

    def _check_manifests(self) -> None:
        used: dict[str, int] = {}
        for expected, manifest in enumerate(self._record.manifests):
            self._report.checked["manifests"] += 1
            where = f"{self._run_id} version {manifest.version}"
            self._report.expect(
                manifest.version == expected, "manifest", where, f"version {expected} is missing"
            )
            self._report.expect(
                manifest.term <= self._newest_term,
                "term",
                where,
                f"was written under term {manifest.term}, the newest is {self._newest_term}",
            )
            for name in manifest.batch.consumed_micro_batch_ids:
                first = used.setdefault(name, manifest.version)
                self._report.expect(
                    first == manifest.version,
                    "ledger",
                    where,
                    f"micro-batch {name} was consumed by version {first} already",
                )
                self._report.expect(
                    name in self._record.micro_batches
                    and parse_batch(name).batch == manifest.batch.batch,
                    "ledger",
                    where,
                    f"micro-batch {name} has no record, or is of another batch",
                )
            self._check_applied(manifest, where)
        if self._record.manifests:
            newest = self._record.manifests[-1]
            where = f"{self._run_id} version {newest.version}"
            for policy in newest.policies.values():
                self._check_named([policy.weights, policy.master, policy.moments], where)

    def _check_applied(self, manifest: graph_pb2.Manifest, where: str) -> None:
        """What a version says it consumed is what its updates say they applied."""
        for state in self._record.states:
            if not state.applied or state.version != manifest.version:
                continue
            said = {
                name
                for name in manifest.batch.consumed_micro_batch_ids
                if name in self._record.micro_batches
                and self._record.micro_batches[name].policy == state.policy
            }
            self._report.expect(
                said == set(state.ledger),
                "ledger",
                where,
                f"policy {state.policy}: it says that {sorted(said)} are consumed, "
                f"the update was made of {sorted(state.ledger)}",
            )

    def _check_named(self, refs: Iterable[common_pb2.ObjectRef], where: str) -> None:
        for ref in refs:
            store = self._run.stores.get(ref.shard or self._home.shard)
            if ref.key and store is not None:
                stored = store.backend.get(Table.META, keys.join("segment", ref.key))
                self._report.expect(
                    stored is not None, "reference", where, f"segment {ref.key} is missing"
                )

    def _check_counts(self, batch: graph_pb2.BatchRecord) -> None:
        scope = (batch.batch, batch.batch_attempt)
        found = [facts.accounts[scope] for facts in self._facts.values() if scope in facts.accounts]
        for policy, stated in batch.policies.items():
            where = f"{self._run_id} batch {batch.batch} policy {policy or '(none)'}"
            finished, consumed, voided, untrained = _sum(found, policy=policy)
            said = (stated.finished, stated.consumed, sum(stated.voided.values()))
            self._report.expect(
                (finished, consumed, voided) == said,
                "count",
                where,
                f"finished, consumed, void are {finished}, {consumed}, {voided}"
                + "; the manifest says {}, {}, {}".format(*said),
            )
            self._report.expect(
                finished == consumed + voided + untrained,
                "count",
                where,
                "finished is not consumed + void",
            )


def _sum(accounts: Iterable[BatchAccount], *, policy: str) -> tuple[int, int, int, int]:
    """Finished, consumed, void and untrained rows of a policy over all shards."""
    found = [account.policies[policy] for account in accounts if policy in account.policies]
    return (
        sum(counts.finished for counts in found),
        sum(counts.consumed for counts in found),
        sum(sum(counts.voided.values()) for counts in found),
        sum(counts.untrained for counts in found),
    )

"""State records: what one SaveState writes, what may be loaded from one, and for which batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ledger import ApplyCheck, Counts, Ledger
from flexmarl.core.trainer_slots import Claim

_MAX_NAMED: Final = 5

Refs = Mapping[str, common_pb2.ObjectRef]


def check_loadable(
    state: graph_pb2.StateRecord | None, *, policy: str, version: int | None
) -> None:
    """Checks a policy's newest saved state against the newest committed version.

    It may be of that version, older (the policy did not step), or one ahead (its update of the
    batch in progress).

    Raises:
        DomainError: VERSION_MISMATCH.
    """
    newest = 0 if version is None else version + 1
    if state is None and version is not None:
        found = "none"
    elif state is not None and state.version > newest:
        found = f"that of version {state.version}"
    else:
        return
    raise DomainError(
        ErrorReason.VERSION_MISMATCH,
        f"policy {policy}: the newest saved state is {found}, which does not go with committed "
        f"version {version}",
        {"policy": policy},
    )


def ledger_of(state: graph_pb2.StateRecord, *, version: int | None) -> Ledger:
    """Returns the ledger of the sum that a binding starts with.

    A set that ApplyUpdate made names what it applied and has no sum yet. A sum of an older batch
    than the committed version is history.
    """
    batch = max(version or 0, state.version)
    if state.applied or state.version < batch:
        return Ledger(batch=batch)
    counts = Counts(num_rows=state.counts.num_rows, num_tokens=state.counts.num_tokens)
    return Ledger(
        batch=batch, added=tuple(state.ledger), dropped=tuple(state.dropped), counts=counts
    )


def applied_ledger(state: graph_pb2.StateRecord) -> Ledger | None:
    """Returns what the update that made this set applied; None for a set that no update made."""
    if not state.applied:
        return None
    return Ledger(batch=state.version - 1, added=tuple(state.ledger), dropped=tuple(state.dropped))


def ledger_for(ledger: Ledger, *, batch: int, what: str) -> Ledger:
    """Returns the ledger that work on `batch` goes on with: this one, or a new one after it.

    Raises:
        DomainError: VERSION_MISMATCH when the sum is of another batch.
    """
    if ledger.batch == batch:
        return ledger
    if batch > ledger.batch and not ledger.added:
        return Ledger(batch=batch)
    raise DomainError(
        ErrorReason.VERSION_MISMATCH,
        f"{what} is of batch {batch}, the gradient sum of batch {ledger.batch}",
        {"expected": str(ledger.batch), "actual": str(batch)},
    )


def check_weights(state: graph_pb2.StateRecord, weights_hash: str, *, what: str) -> None:
    """Checks that rows were sampled by the weights that are bound (I4).

    Raises:
        DomainError: WEIGHTS_MISMATCH.
    """
    if state.weights_hash != weights_hash:
        raise DomainError(
            ErrorReason.WEIGHTS_MISMATCH,
            f"{what}: its rows are of weights {weights_hash}, bound are {state.weights_hash}",
            {"expected": state.weights_hash, "actual": weights_hash},
        )


def check_exact(check: ApplyCheck, policy: str) -> None:
    """Refuses an update whose sum is not exactly what was asked for.

    Raises:
        DomainError: STATE_TRANSITION_REFUSED with the ids.
    """
    if check.exact:
        return
    parts = []
    for word, ids in (("lacks", check.missing), ("has beyond it", check.unexpected)):
        if ids:
            more = f" and {len(ids) - _MAX_NAMED} more" if len(ids) > _MAX_NAMED else ""
            parts.append(f"{word} {', '.join(ids[:_MAX_NAMED])}{more}")
    raise DomainError(
        ErrorReason.STATE_TRANSITION_REFUSED,
        f"policy {policy}: the gradient sum is not what the update names: it {'; '.join(parts)}",
        {"missing": ",".join(check.missing), "unexpected": ",".join(check.unexpected)},
    )


def first_state(claim: Claim, refs: Refs, *, weights_hash: str) -> graph_pb2.StateRecord:
    """Returns the record of set 0; a frozen policy has weights only."""
    return graph_pb2.StateRecord(
        policy=claim.key.policy,
        version=0,
        term=claim.term,
        weights=refs["weights"],
        weights_hash=weights_hash,
        master=refs.get("master"),
        moments=refs.get("moments"),
    )


def applied_state(
    claim: Claim,
    refs: Refs,
    *,
    weights_hash: str,
    ledger: Ledger,
    num_updates: int,
    metrics: Mapping[str, float],
) -> graph_pb2.StateRecord:
    """Returns the record of the set that an update made of a sum."""
    return graph_pb2.StateRecord(
        policy=claim.key.policy,
        version=ledger.batch + 1,
        term=claim.term,
        num_updates=num_updates,
        weights=refs["weights"],
        weights_hash=weights_hash,
        master=refs["master"],
        moments=refs["moments"],
        ledger=ledger.added,
        dropped=ledger.dropped,
        counts=_counts(ledger),
        applied=True,
        metrics=metrics,
    )


def with_sum(
    state: graph_pb2.StateRecord,
    claim: Claim,
    ledger: Ledger,
    gradients: common_pb2.ObjectRef | None,
) -> graph_pb2.StateRecord:
    """Returns the record of the same weights with a gradient sum of batch `ledger.batch`."""
    return graph_pb2.StateRecord(
        policy=state.policy,
        version=ledger.batch,
        term=claim.term,
        num_updates=state.num_updates,
        weights=state.weights,
        weights_hash=state.weights_hash,
        master=state.master,
        moments=state.moments,
        gradients=gradients,
        ledger=ledger.added,
        dropped=ledger.dropped,
        counts=_counts(ledger),
    )


def _counts(ledger: Ledger) -> graph_pb2.GradientCounts:
    return graph_pb2.GradientCounts(
        num_rows=ledger.counts.num_rows, num_tokens=ledger.counts.num_tokens
    )

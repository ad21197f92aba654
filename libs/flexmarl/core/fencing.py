"""Terms and versions: who may still write, and which version comes next."""

from __future__ import annotations

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ids import check_name

ORCHESTRATOR_SCOPE = "orchestrator"
"""Scope of the term of a run's orchestrator."""


def policy_scope(policy: str) -> str:
    """Scope of the term of the process group that a policy is bound to."""
    return f"policy/{policy}"


def check_scope(scope: str) -> None:
    """Checks the name of a scope.

    Raises:
        ValueError: It is neither the orchestrator's nor a policy's.
    """
    kind, _, policy = scope.partition("/")
    if scope == ORCHESTRATOR_SCOPE:
        return
    if kind != "policy":
        raise ValueError(f"scope {scope!r}: use 'orchestrator' or 'policy/<name>'")
    check_name(policy, what="policy")


def check_term(*, scope: str, current: int, term: int, issued_here: bool) -> bool:
    """Checks the term that a mutation carries.

    Args:
        scope: What is owned.
        current: Newest term known here; 0 before the first.
        term: The caller's.
        issued_here: This store issues the run's terms, so that a newer one cannot exist.

    Returns:
        Whether the term is news: a shard that does not issue terms learns them from writes.

    Raises:
        DomainError: TERM_STALE for an older one, INVALID_ARGUMENT for one never issued.
    """
    if term < current:
        raise DomainError(
            ErrorReason.TERM_STALE,
            f"{scope}: term {term} is older than the current {current}",
            {"scope": scope, "term": str(term), "current": str(current)},
        )
    if term > current and issued_here:
        raise DomainError(
            ErrorReason.INVALID_ARGUMENT,
            f"{scope}: term {term} was never issued, the newest is {current}",
            {"scope": scope},
        )
    return term > current


def check_commit(*, newest: int | None, expected: int | None, version: int) -> None:
    """Checks the compare-and-set of a commit: one version after the expected newest one.

    Raises:
        DomainError: VERSION_MISMATCH, or INVALID_ARGUMENT when the manifest is not the next.
    """
    if newest != expected:
        raise DomainError(
            ErrorReason.VERSION_MISMATCH,
            f"the newest version is {_say(newest)}, expected was {_say(expected)}",
            {"expected": _say(expected), "actual": _say(newest)},
        )
    following = 0 if newest is None else newest + 1
    if version != following:
        raise DomainError(
            ErrorReason.INVALID_ARGUMENT,
            f"the manifest says version {version}, the next one is {following}",
        )


def _say(version: int | None) -> str:
    return "none" if version is None else str(version)

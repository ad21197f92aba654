"""Which policy holds which device slots of one trainer, under which term.

A slot is held by one policy at most. A policy's term never falls here: whoever comes with an older
one is refused, and a newer one ends the policy's older binding wherever it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flexmarl.core.errors import DomainError, ErrorReason


@dataclass(frozen=True, slots=True)
class PolicyKey:
    """A policy of a run."""

    run_id: str
    policy: str

    def __str__(self) -> str:
        return f"{self.run_id}/{self.policy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A binding: a policy, the term it was acquired under, and its slots in order of rank."""

    key: PolicyKey
    term: int
    slots: tuple[str, ...]


class SlotTable:
    """The claims on a trainer's slots.

    Args:
        slots: Names of the slots.
    """

    def __init__(self, slots: Iterable[str]) -> None:
        self._slots = tuple(slots)
        self._claims: dict[PolicyKey, Claim] = {}
        self._terms: dict[PolicyKey, int] = {}

    def holder(self, slot: str) -> Claim | None:
        """Returns the claim that holds a slot."""
        return next((claim for claim in self._claims.values() if slot in claim.slots), None)

    def claims_of_run(self, run_id: str) -> list[Claim]:
        """Returns the claims of a run, by policy."""
        claims = (claim for key, claim in self._claims.items() if key.run_id == run_id)
        return sorted(claims, key=lambda claim: claim.key.policy)

    def claim(self, key: PolicyKey, *, term: int, slots: Sequence[str]) -> Claim | None:
        """Gives slots to a policy.

        Returns:
            The policy's older claim, which this one ended, if there was one.

        Raises:
            DomainError: TERM_STALE; INVALID_ARGUMENT for slots that are unknown, repeated or none;
                STATE_TRANSITION_REFUSED when another policy holds one, or the term is in use.
        """
        self.check_slots(slots)
        self._check_term(key, term)
        older = self._claims.get(key)
        if older is not None and older.term == term:
            raise DomainError(
                ErrorReason.STATE_TRANSITION_REFUSED,
                f"{key} is bound under term {term} already; acquire a new term to bind again",
                {"policy": key.policy, "term": str(term)},
            )
        for slot in slots:
            holder = self.holder(slot)
            if holder is not None and holder.key != key:
                raise DomainError(
                    ErrorReason.STATE_TRANSITION_REFUSED,
                    f"slot {slot} is held by {holder.key}; suspend it first",
                    {"slot": slot, "holder": holder.key.policy},
                )
        self._terms[key] = term
        self._claims[key] = Claim(key=key, term=term, slots=tuple(slots))
        return older

    def check(self, key: PolicyKey, *, term: int) -> Claim:
        """Returns the policy's claim if it is of this term.

        Raises:
            DomainError: TERM_STALE for an older term, STATE_TRANSITION_REFUSED when not bound.
        """
        self._check_term(key, term)
        claim = self._claims.get(key)
        if claim is None or claim.term != term:
            raise DomainError(
                ErrorReason.STATE_TRANSITION_REFUSED,
                f"{key} is not bound under term {term} here",
                {"policy": key.policy, "term": str(term)},
            )
        return claim

    def release(self, claim: Claim) -> bool:
        """Gives a claim's slots back; False when it holds none any more."""
        if self._claims.get(claim.key) != claim:
            return False
        del self._claims[claim.key]
        return True

    def forget_run(self, run_id: str) -> None:
        """Forgets the terms of a run that has no claims left."""
        assert not self.claims_of_run(run_id), "release the run's claims first"
        self._terms = {key: term for key, term in self._terms.items() if key.run_id != run_id}

    def check_slots(self, slots: Sequence[str]) -> None:
        """Checks that slots are named once each and known.

        Raises:
            DomainError: INVALID_ARGUMENT.
        """
        unknown = [slot for slot in slots if slot not in self._slots]
        if unknown or not slots or len(set(slots)) < len(slots):
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT,
                f"slots {list(slots)}: name each once, out of {', '.join(self._slots)}",
                {"slots": ",".join(slots)},
            )

    def _check_term(self, key: PolicyKey, term: int) -> None:
        known = self._terms.get(key, 0)
        if term < known:
            raise DomainError(
                ErrorReason.TERM_STALE,
                f"{key}: term {term} is older than {known}",
                {"policy": key.policy, "term": str(term), "current": str(known)},
            )

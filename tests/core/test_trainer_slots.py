from __future__ import annotations

import pytest

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.trainer_slots import Claim, PolicyKey, SlotTable

A, B = PolicyKey("r", "a"), PolicyKey("r", "b")


def refused(reason: ErrorReason):
    return pytest.raises(DomainError, check=lambda error: error.reason is reason)


def test_a_claim_holds_slots_until_it_is_released() -> None:
    table = SlotTable(["s0", "s1"])
    assert table.claim(A, term=1, slots=["s1", "s0"]) is None
    claim = Claim(key=A, term=1, slots=("s1", "s0"))
    assert table.check(A, term=1) == claim
    assert table.holder("s0") == claim
    assert table.release(claim)
    assert not table.release(claim)
    assert table.holder("s0") is None
    with refused(ErrorReason.STATE_TRANSITION_REFUSED):
        table.check(A, term=1)


def test_a_newer_term_takes_the_policys_place_and_an_older_one_is_refused() -> None:
    table = SlotTable(["s0", "s1"])
    table.claim(A, term=3, slots=["s0"])
    older = table.claim(A, term=5, slots=["s0"])
    assert older == Claim(key=A, term=3, slots=("s0",))
    assert not table.release(older)
    for term in (3, 4):
        with refused(ErrorReason.TERM_STALE):
            table.check(A, term=term)
        with refused(ErrorReason.TERM_STALE):
            table.claim(A, term=term, slots=["s1"])
    with refused(ErrorReason.STATE_TRANSITION_REFUSED):
        table.claim(A, term=5, slots=["s1"])
    with refused(ErrorReason.STATE_TRANSITION_REFUSED):
        table.check(A, term=6)
    table.release(Claim(key=A, term=5, slots=("s0",)))
    with refused(ErrorReason.TERM_STALE):
        table.claim(A, term=4, slots=["s0"])


def test_a_slot_that_another_policy_holds_is_refused_by_name() -> None:
    table = SlotTable(["s0", "s1"])
    table.claim(A, term=1, slots=["s0"])
    with pytest.raises(DomainError, match="r/a"):
        table.claim(B, term=1, slots=["s1", "s0"])
    assert table.claim(B, term=1, slots=["s1"]) is None


@pytest.mark.parametrize("slots", [[], ["nope"], ["s0", "s0"]])
def test_slots_are_named_once_and_known(slots: list[str]) -> None:
    with refused(ErrorReason.INVALID_ARGUMENT):
        SlotTable(["s0", "s1"]).claim(A, term=1, slots=slots)


def test_a_run_is_forgotten_with_its_terms() -> None:
    table = SlotTable(["s0", "s1"])
    table.claim(B, term=1, slots=["s1"])
    table.claim(A, term=9, slots=["s0"])
    other = PolicyKey("other", "a")
    claims = table.claims_of_run("r")
    assert [claim.key for claim in claims] == [A, B]
    for claim in claims:
        table.release(claim)
    table.claim(other, term=2, slots=["s0"])
    table.forget_run("r")
    table.claim(A, term=1, slots=["s1"])
    with refused(ErrorReason.TERM_STALE):
        table.claim(other, term=1, slots=["s0"])

"""The error catalogue is whole and consistent."""

import grpc
import pytest

from flexmarl.core.errors import DomainError, ErrorFamily, ErrorReason, find_reason, not_built


def test_every_reason_is_its_own_wire_text():
    assert {reason.value for reason in ErrorReason} == set(ErrorReason.__members__)


def test_every_reason_has_a_status_that_grpc_knows_and_a_remedy():
    for reason in ErrorReason:
        assert grpc.StatusCode[reason.status] is not grpc.StatusCode.OK
        assert reason.remedy.strip() == reason.remedy != ""


def test_every_family_has_a_reason():
    assert {reason.family for reason in ErrorReason} == set(ErrorFamily)


def test_only_what_passes_by_itself_is_retried():
    retried = {reason for reason in ErrorReason if reason.status == "UNAVAILABLE"}
    assert retried == {ErrorReason.UNAVAILABLE, ErrorReason.NOT_READY, ErrorReason.DRAINING}


def test_find_reason_knows_the_catalogue_and_nothing_else():
    assert find_reason("TERM_STALE") is ErrorReason.TERM_STALE
    assert find_reason("OF_A_LATER_RELEASE") is None


def test_domain_error_keeps_its_parts_and_a_copy_of_the_metadata():
    details = {"expected": "3"}
    error = DomainError(ErrorReason.VERSION_MISMATCH, "run r1 is at 4", details)
    details["expected"] = "5"
    assert (error.reason, error.message) == (ErrorReason.VERSION_MISMATCH, "run r1 is at 4")
    assert error.metadata == {"expected": "3"}
    assert str(error) == "VERSION_MISMATCH: run r1 is at 4"
    with pytest.raises(TypeError):
        error.metadata["expected"] = "6"  # type: ignore[index]


def test_not_built_names_what():
    error = not_built("staleness above 0")
    assert error.reason.status == "UNIMPLEMENTED"
    assert "staleness above 0" in error.message

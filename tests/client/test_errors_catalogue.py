"""The catalogue and the client's exceptions are complete in both directions."""

import grpc
import pytest
from runtime.echo_service import Echo, path, serving

from flexmarl.client import errors
from flexmarl.client.channel import connect
from flexmarl.client.errors import CLASSES, FlexMarlError, make_error
from flexmarl.core.errors import ErrorFamily, ErrorReason


def test_every_family_has_its_class_and_every_class_its_family():
    assert set(CLASSES) == set(ErrorFamily)
    assert {family.value: kind.__name__ for family, kind in CLASSES.items()} == {
        family.value: family.value for family in ErrorFamily
    }
    written = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, FlexMarlError) and kind is not FlexMarlError
    }
    assert written == set(CLASSES.values())


def test_every_status_that_grpc_makes_by_itself_has_a_reason_of_that_status():
    for code, reason in errors._BY_CODE.items():
        assert reason.status == code.name
    told = {reason.status for reason in ErrorReason} - {"INTERNAL"}
    assert told <= {code.name for code in errors._BY_CODE}


async def test_every_reason_survives_the_wire():
    async with serving(Echo()) as server, connect(server.address) as channel:
        fail = channel.unary_unary(path("Fail"))
        for reason in ErrorReason:
            with pytest.raises(CLASSES[reason.family]) as caught:
                await fail(reason.value.encode())
            assert caught.value.reason is reason
            assert caught.value.message == "as asked"
            assert caught.value.metadata == {"key": "value"}
            assert caught.value.code.name == reason.status


async def test_a_reason_of_a_later_release_becomes_its_status_and_keeps_its_name():
    async with serving(Echo()) as server, connect(server.address) as channel:
        with pytest.raises(errors.ConflictError, match="OF_A_LATER_RELEASE: from the future"):
            await channel.unary_unary(path("UnknownReason"))(b"")


async def test_errors_without_details_are_typed_by_their_status():
    async with serving(Echo()) as server, connect(server.address) as channel:
        with pytest.raises(errors.DataError, match="by hand"):
            await channel.unary_unary(path("Abort"))(b"")
        with pytest.raises(errors.NotBuiltError, match="Nope"):
            await channel.unary_unary(path("Nope"))(b"")


def test_make_error_takes_the_status_of_the_reason():
    error = make_error(ErrorReason.TERM_STALE, "old")
    assert isinstance(error, errors.ConflictError)
    assert error.code is grpc.StatusCode.ABORTED

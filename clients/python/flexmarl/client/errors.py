"""Typed errors of remote calls: one exception class per family of the catalogue.

They are `DomainError`s, so a service that calls another and fails passes the reason on unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, cast

import grpc
from google.rpc import error_details_pb2, status_pb2

from flexmarl.core.errors import ERROR_DOMAIN, DomainError, ErrorFamily, ErrorReason, find_reason

_DETAILS_KEY: Final = "grpc-status-details-bin"


class FlexMarlError(DomainError):
    """A call that failed.

    Attributes:
        reason: Entry of the catalogue; a reason newer than this client becomes its status' default.
        message: What failed, as the service said it.
        metadata: Machine-readable details.
        code: gRPC status code.
    """

    def __init__(
        self,
        reason: ErrorReason,
        message: str,
        metadata: Mapping[str, str],
        code: grpc.StatusCode,
    ) -> None:
        super().__init__(reason, message, metadata)
        self.code = code


class InvalidError(FlexMarlError):
    """What was asked for is malformed; repeating it changes nothing."""


class NotFoundError(FlexMarlError):
    """What was asked for is not there."""


class ExistsError(FlexMarlError):
    """It exists already, with other content."""


class ConflictError(FlexMarlError):
    """Somebody else moved on (term, version, weights): read again, then decide."""


class RefusedError(FlexMarlError):
    """The state forbids it."""


class OutOfRangeError(FlexMarlError):
    """A cursor points outside of what is kept."""


class ExhaustedError(FlexMarlError):
    """Something is full."""


class UnavailableError(FlexMarlError):
    """The service cannot be reached or is not ready."""


class DeadlineError(FlexMarlError):
    """The deadline passed; the call may or may not have taken effect."""


class CancelledCallError(FlexMarlError):
    """The other side cancelled the call."""


class NotBuiltError(FlexMarlError):
    """The contract has room for it, but it is not built."""


class UserCodeError(FlexMarlError):
    """The user's workflow, tool or reward failed."""


class PermissionDeniedError(FlexMarlError):
    """The caller may not do it."""


class UnauthenticatedError(FlexMarlError):
    """The service does not know the caller."""


class DataError(FlexMarlError):
    """Stored data is broken."""


class InternalError(FlexMarlError):
    """The service failed; its log has the cause."""


CLASSES: Final[Mapping[ErrorFamily, type[FlexMarlError]]] = {
    ErrorFamily.INVALID: InvalidError,
    ErrorFamily.NOT_FOUND: NotFoundError,
    ErrorFamily.EXISTS: ExistsError,
    ErrorFamily.CONFLICT: ConflictError,
    ErrorFamily.REFUSED: RefusedError,
    ErrorFamily.OUT_OF_RANGE: OutOfRangeError,
    ErrorFamily.EXHAUSTED: ExhaustedError,
    ErrorFamily.UNAVAILABLE: UnavailableError,
    ErrorFamily.DEADLINE: DeadlineError,
    ErrorFamily.CANCELLED: CancelledCallError,
    ErrorFamily.NOT_BUILT: NotBuiltError,
    ErrorFamily.USER_CODE: UserCodeError,
    ErrorFamily.PERMISSION: PermissionDeniedError,
    ErrorFamily.UNAUTHENTICATED: UnauthenticatedError,
    ErrorFamily.DATA: DataError,
    ErrorFamily.INTERNAL: InternalError,
}
"""Exception class of each family; a test keeps it complete."""

# Errors that gRPC itself makes carry no ErrorInfo: these reasons stand for them.
_BY_CODE: Final[Mapping[grpc.StatusCode, ErrorReason]] = {
    grpc.StatusCode.INVALID_ARGUMENT: ErrorReason.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND: ErrorReason.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS: ErrorReason.ALREADY_EXISTS,
    grpc.StatusCode.ABORTED: ErrorReason.VERSION_MISMATCH,
    grpc.StatusCode.FAILED_PRECONDITION: ErrorReason.STATE_TRANSITION_REFUSED,
    grpc.StatusCode.OUT_OF_RANGE: ErrorReason.CURSOR_OUT_OF_RANGE,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorReason.MESSAGE_TOO_LARGE,
    grpc.StatusCode.UNAVAILABLE: ErrorReason.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorReason.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED: ErrorReason.CANCELLED,
    grpc.StatusCode.UNIMPLEMENTED: ErrorReason.NOT_BUILT,
    grpc.StatusCode.DATA_LOSS: ErrorReason.CHECKSUM_MISMATCH,
    grpc.StatusCode.PERMISSION_DENIED: ErrorReason.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED: ErrorReason.UNAUTHENTICATED,
}


def make_error(
    reason: ErrorReason,
    message: str,
    metadata: Mapping[str, str] | None = None,
    code: grpc.StatusCode | None = None,
) -> FlexMarlError:
    """The exception of a reason's family."""
    code = code or grpc.StatusCode[reason.status]
    return CLASSES[reason.family](reason, message, metadata or {}, code)


def from_rpc_error(error: grpc.RpcError, *, method: str = "") -> FlexMarlError:
    """Turn gRPC's error into the typed one.

    Args:
        error: As raised by a grpc.aio call.
        method: Full method name, put into the message of errors that no service wrote.
    """
    if not isinstance(error, grpc.aio.AioRpcError):
        return make_error(ErrorReason.INTERNAL, f"{method}: {error}")
    code = error.code()
    details = error.details() or ""
    info = _error_info(error)
    if info is None:
        reason = _BY_CODE.get(code, ErrorReason.INTERNAL)
        return make_error(reason, f"{method}: {details}" if method else details, None, code)
    known = find_reason(info.reason)
    if known is not None:
        return make_error(known, details, dict(info.metadata), code)
    # A newer server's reason: keep its name for the reader, act on the status code.
    reason = _BY_CODE.get(code, ErrorReason.INTERNAL)
    return make_error(reason, f"{info.reason}: {details}", dict(info.metadata), code)


def _error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    # The type stubs take the metadata for one pair; it is an iterable of pairs.
    pairs = cast("Iterable[tuple[str, bytes]]", error.trailing_metadata() or ())
    for key, value in pairs:
        if key != _DETAILS_KEY:
            continue
        status = status_pb2.Status.FromString(value)
        for detail in status.details:
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
                return info
    return None

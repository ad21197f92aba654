"""The one catalogue of expected failures, shared by every service and the client.

A reason is stable text that crosses the wire in `google.rpc.ErrorInfo.reason`. Its family fixes the
gRPC status code and the client's exception class, so a new reason is one line in `ErrorReason`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Final

ERROR_DOMAIN: Final = "flexmarl"
"""`google.rpc.ErrorInfo.domain` of every error that this project raises."""

_NO_METADATA: Final[Mapping[str, str]] = MappingProxyType({})


class ErrorFamily(Enum):
    """What a caller can do about a failure; the value is the family's client exception name."""

    status: str

    INVALID = "InvalidError", "INVALID_ARGUMENT"
    NOT_FOUND = "NotFoundError", "NOT_FOUND"
    EXISTS = "ExistsError", "ALREADY_EXISTS"
    CONFLICT = "ConflictError", "ABORTED"
    REFUSED = "RefusedError", "FAILED_PRECONDITION"
    OUT_OF_RANGE = "OutOfRangeError", "OUT_OF_RANGE"
    EXHAUSTED = "ExhaustedError", "RESOURCE_EXHAUSTED"
    UNAVAILABLE = "UnavailableError", "UNAVAILABLE"
    DEADLINE = "DeadlineError", "DEADLINE_EXCEEDED"
    CANCELLED = "CancelledCallError", "CANCELLED"
    NOT_BUILT = "NotBuiltError", "UNIMPLEMENTED"
    USER_CODE = "UserCodeError", "FAILED_PRECONDITION"
    PERMISSION = "PermissionDeniedError", "PERMISSION_DENIED"
    UNAUTHENTICATED = "UnauthenticatedError", "UNAUTHENTICATED"
    DATA = "DataError", "DATA_LOSS"
    INTERNAL = "InternalError", "INTERNAL"

    def __new__(cls, exception_name: str, status: str) -> ErrorFamily:
        """Keep the exception's name as the value and the gRPC status name beside it."""
        member = object.__new__(cls)
        member._value_ = exception_name
        member.status = status
        return member


_F = ErrorFamily


class ErrorReason(StrEnum):
    """Every reason, with its family and what the reader of the error can do.

    Only `UNAVAILABLE`-family reasons are retried by the client, with the same request id.
    """

    family: ErrorFamily
    remedy: str

    # What was asked for is malformed.
    INVALID_ARGUMENT = "INVALID_ARGUMENT", _F.INVALID, "correct the named field"
    UNKNOWN_CONFIG_KEY = "UNKNOWN_CONFIG_KEY", _F.INVALID, "remove or rename the key"
    DEADLINE_REQUIRED = "DEADLINE_REQUIRED", _F.INVALID, "pass a timeout with the call"
    UNKNOWN_AGENT = "UNKNOWN_AGENT", _F.INVALID, "name an agent of the run's config"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG", _F.INVALID, "shorten the prompt or raise the limit"
    ROW_TOO_LARGE = "ROW_TOO_LARGE", _F.INVALID, "make it smaller, or pass on where it lies"
    REWARD_INVALID = "REWARD_INVALID", _F.USER_CODE, "return finite numbers from the reward"
    # What was asked for is not there.
    NOT_FOUND = "NOT_FOUND", _F.NOT_FOUND, "check the id"
    RUN_NOT_FOUND = "RUN_NOT_FOUND", _F.NOT_FOUND, "check the run id and the store's address"
    SHARD_NOT_FOUND = "SHARD_NOT_FOUND", _F.NOT_FOUND, "check the run's shard list"
    OBJECT_NOT_FOUND = "OBJECT_NOT_FOUND", _F.NOT_FOUND, "check the key; it may have been retired"
    SEGMENT_NOT_FOUND = "SEGMENT_NOT_FOUND", _F.NOT_FOUND, "allocate the segment again"
    VERTEX_NOT_FOUND = "VERTEX_NOT_FOUND", _F.NOT_FOUND, "check the vertex reference"
    # It is there already.
    ALREADY_EXISTS = "ALREADY_EXISTS", _F.EXISTS, "use another id or read the existing one"
    CONTENT_MISMATCH = "CONTENT_MISMATCH", _F.EXISTS, "write new content under a new key"
    REQUEST_ID_REUSED = "REQUEST_ID_REUSED", _F.EXISTS, "make one request id per logical call"
    # Somebody else moved on: read again, then decide.
    TERM_STALE = "TERM_STALE", _F.CONFLICT, "stop acting: another owner holds a newer term"
    VERSION_MISMATCH = "VERSION_MISMATCH", _F.CONFLICT, "read the current version and retry"
    WEIGHTS_MISMATCH = "WEIGHTS_MISMATCH", _F.CONFLICT, "load the weights that the manifest names"
    CHILD_DIED = "CHILD_DIED", _F.CONFLICT, "see the child's log; start the work again"
    # The state forbids it.
    STATE_TRANSITION_REFUSED = "STATE_TRANSITION_REFUSED", _F.REFUSED, "read the current state"
    ROW_ALREADY_MARKED = "ROW_ALREADY_MARKED", _F.REFUSED, "skip the row: it is taken"
    SUBGRAPH_CLOSED = "SUBGRAPH_CLOSED", _F.REFUSED, "no more rows of this policy in this batch"
    MODEL_INVALID = "MODEL_INVALID", _F.REFUSED, "give a Hugging Face model folder"
    DATASET_INVALID = "DATASET_INVALID", _F.REFUSED, "correct the named dataset file"
    NOT_ENOUGH_INSTANCES = "NOT_ENOUGH_INSTANCES", _F.REFUSED, "add instances or drop policies"
    PORT_IN_USE = "PORT_IN_USE", _F.REFUSED, "choose another port, or 0 for a free one"
    STORE_LOCKED = "STORE_LOCKED", _F.REFUSED, "stop the other process that holds the store"
    NON_FINITE = "NON_FINITE", _F.REFUSED, "inspect the rows and the learning rate"
    SHARD_LOST = "SHARD_LOST", _F.REFUSED, "resume the run: it goes on over the other shards"
    CURSOR_OUT_OF_RANGE = "CURSOR_OUT_OF_RANGE", _F.OUT_OF_RANGE, "start from a newer cursor"
    # Something is full.
    QUEUE_FULL = "QUEUE_FULL", _F.EXHAUSTED, "send more slowly"
    MEMORY_TIER_FULL = "MEMORY_TIER_FULL", _F.EXHAUSTED, "enlarge the memory tier or free segments"
    DISK_FULL = "DISK_FULL", _F.EXHAUSTED, "free disk space"
    OUT_OF_MEMORY = "OUT_OF_MEMORY", _F.EXHAUSTED, "use more slots, or less per pass"
    RATE_LIMITED = "RATE_LIMITED", _F.EXHAUSTED, "send more slowly"
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE", _F.EXHAUSTED, "send it in chunks"
    # Not now.
    UNAVAILABLE = "UNAVAILABLE", _F.UNAVAILABLE, "check that the service runs at this address"
    NOT_READY = "NOT_READY", _F.UNAVAILABLE, "wait until the service reports SERVING"
    DRAINING = "DRAINING", _F.UNAVAILABLE, "wait for the service to come back"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED", _F.DEADLINE, "allow more time or find what is stuck"
    CANCELLED = "CANCELLED", _F.CANCELLED, "nothing: the caller gave up"
    NOT_BUILT = "NOT_BUILT", _F.NOT_BUILT, "use what the documentation lists as built"
    # The user's own code.
    WORKFLOW_IMPORT_FAILED = "WORKFLOW_IMPORT_FAILED", _F.USER_CODE, "make the module importable"
    WORKFLOW_RAISED = "WORKFLOW_RAISED", _F.USER_CODE, "see the traceback of the workflow"
    REWARD_RAISED = "REWARD_RAISED", _F.USER_CODE, "see the traceback of the reward"
    ADVANTAGE_RAISED = "ADVANTAGE_RAISED", _F.USER_CODE, "correct the run's own estimator"
    LOSS_RAISED = "LOSS_RAISED", _F.USER_CODE, "correct the run's own loss function"
    TOOL_RAISED = "TOOL_RAISED", _F.USER_CODE, "see the traceback of the tool"
    # Who may do it.
    PERMISSION_DENIED = "PERMISSION_DENIED", _F.PERMISSION, "send a token that allows this"
    UNAUTHENTICATED = "UNAUTHENTICATED", _F.UNAUTHENTICATED, "send a token that the service knows"
    # Broken.
    CHECKSUM_MISMATCH = "CHECKSUM_MISMATCH", _F.DATA, "restore the object from another tier"
    INTERNAL = "INTERNAL", _F.INTERNAL, "see the service's log"

    def __new__(cls, value: str, family: ErrorFamily, remedy: str) -> ErrorReason:
        """Keep the reason's text as the value, its family and remedy beside it."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.family = family
        member.remedy = remedy
        return member

    @property
    def status(self) -> str:
        """Name of the gRPC status code, such as `"NOT_FOUND"`."""
        return self.family.status


_BY_TEXT: Final[Mapping[str, ErrorReason]] = {reason.value: reason for reason in ErrorReason}


def find_reason(text: str) -> ErrorReason | None:
    """The reason with this wire text; None when it is newer than this catalogue."""
    return _BY_TEXT.get(text)


class DomainError(Exception):
    """An expected failure; crosses the wire with its reason, message and metadata.

    Args:
        reason: Entry of the catalogue.
        message: One line for a human: what failed, with the ids. It reaches the remote caller, so
            it never carries internal text.
        metadata: Machine-readable details such as `{"expected": "3", "actual": "4"}`.
    """

    def __init__(
        self,
        reason: ErrorReason,
        message: str,
        metadata: Mapping[str, str] = _NO_METADATA,
    ) -> None:
        super().__init__(f"{reason.value}: {message}")
        self.reason = reason
        self.message = message
        self.metadata: Mapping[str, str] = MappingProxyType(dict(metadata))


def not_built(what: str) -> DomainError:
    """The answer of a call that the contract has room for but that is not built."""
    return DomainError(ErrorReason.NOT_BUILT, f"{what} is not built", {"what": what})

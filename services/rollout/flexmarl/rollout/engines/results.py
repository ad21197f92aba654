"""Results of attempts as messages: built in one place, so that all engines answer alike."""

from __future__ import annotations

from collections.abc import Mapping

from flexmarl.api.common.v1.common_pb2 import Failure, VersionRun
from flexmarl.api.rollout.v1.engine_pb2 import GenerateRequest, GenerateResult
from flexmarl.core.errors import DomainError, ErrorReason


def failure(
    reason: ErrorReason, message: str, metadata: Mapping[str, str] | None = None
) -> Failure:
    """A typed failure."""
    return Failure(reason=reason.value, message=message, metadata=dict(metadata or {}))


def failure_of(error: DomainError) -> Failure:
    """The failure that an expected error stands for."""
    return failure(error.reason, error.message, error.metadata)


def failed(
    request: GenerateRequest, why: Failure, *, infrastructure: bool, now_ns: int
) -> GenerateResult:
    """The result of an attempt that made no tokens."""
    return GenerateResult(
        attempt_id=request.attempt_id,
        instance_id=request.instance_id,
        version=request.version,
        failure=why,
        infrastructure=infrastructure,
        started_unix_ns=now_ns,
        finished_unix_ns=now_ns,
    )


def refused_version(
    request: GenerateRequest, *, version: int | None, now_ns: int
) -> GenerateResult:
    """The refusal of a request for a version that is not served (C1, F1, I11)."""
    served = "none" if version is None else str(version)
    return failed(
        request,
        failure(
            ErrorReason.WEIGHTS_MISMATCH,
            f"{request.instance_id} serves version {served}, not {request.version}",
            {"served": served, "asked": str(request.version)},
        ),
        infrastructure=True,
        now_ns=now_ns,
    )


def cut_by_load(request: GenerateRequest, *, version: int, now_ns: int) -> GenerateResult:
    """The end of a running attempt whose weights were replaced: it must not go on (I4)."""
    message = f"{request.attempt_id}: version {version} was loaded under it"
    why = failure(ErrorReason.WEIGHTS_MISMATCH, message)
    return failed(request, why, infrastructure=True, now_ns=now_ns)


def version_run(*, version: int, num_tokens: int) -> list[VersionRun]:
    """The single run of a response sampled under one version; empty for an empty response."""
    return [VersionRun(version=version, num_tokens=num_tokens)] if num_tokens else []

"""Work in progress and its ends, by the request that started it."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from google.protobuf.message import Message

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.trainer.v1 import trainer_pb2
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.aio import Background
from flexmarl.runtime.logging import get_logger

Work = Callable[[], Awaitable[Message]]
"""Does the work and returns its result, one of those that an Operation can hold."""

_RESULT_FIELDS = {
    "BindPolicyResult": "bind",
    "ComputeGradientsResult": "gradients",
    "StateResult": "state",
    "PrefetchResult": "prefetch",
}

_log = get_logger(__name__)


@dataclass(slots=True)
class _Entry:
    run_id: str
    payload_hash: bytes
    operation: trainer_pb2.Operation
    done: asyncio.Event
    task: asyncio.Task[None] | None = None


class Operations:
    """Starts operations, answers who waits for them, keeps ended ones for a while.

    Attributes:
        failures: Those that failed, by reason.

    Args:
        background: Owner of the tasks.
        max_kept: Most operations remembered; the oldest ended ones go first.
    """

    def __init__(self, background: Background, *, max_kept: int) -> None:
        self.failures: Counter[str] = Counter()
        self._background = background
        self._max_kept = max_kept
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def start(
        self, request: Message, request_id: str, work: Work, *, run_id: str
    ) -> trainer_pb2.Operation:
        """Starts the work of a request, or finds it again.

        Raises:
            DomainError: REQUEST_ID_REUSED, QUEUE_FULL, INVALID_ARGUMENT without an id.
        """
        if not request_id:
            raise DomainError(ErrorReason.INVALID_ARGUMENT, "request_id is empty")
        payload_hash = hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
        entry = self._entries.get(request_id)
        if entry is not None:
            if entry.payload_hash != payload_hash:
                raise DomainError(
                    ErrorReason.REQUEST_ID_REUSED,
                    f"request {request_id} came before with another content",
                    {"request_id": request_id},
                )
            return entry.operation
        self._make_room()
        operation = trainer_pb2.Operation(operation_id=request_id)
        entry = self._entries[request_id] = _Entry(run_id, payload_hash, operation, asyncio.Event())
        name = f"{type(request).__name__} {request_id}"
        entry.task = self._background.start(name, self._run(entry, work))
        entry.task.add_done_callback(lambda _: self._ended(entry))
        return operation

    async def wait(self, operation_id: str, *, timeout_s: float) -> trainer_pb2.Operation:
        """Waits for the end, at most `timeout_s`; returns the operation, ended or not.

        Raises:
            DomainError: NOT_FOUND.
        """
        entry = self._require(operation_id)
        try:
            async with asyncio.timeout(timeout_s):
                await entry.done.wait()
        except TimeoutError:
            pass
        return entry.operation

    def cancel(self, operation_id: str) -> None:
        """Asks an operation to stop; one that has ended stays as it is.

        Raises:
            DomainError: NOT_FOUND.
        """
        entry = self._require(operation_id)
        if entry.task is not None:
            entry.task.cancel()

    def of_run(self, run_id: str) -> list[asyncio.Task[None]]:
        """Returns the operations of a run that have not ended."""
        entries = (entry for entry in self._entries.values() if entry.run_id == run_id)
        return [entry.task for entry in entries if entry.task is not None and not entry.task.done()]

    async def _run(self, entry: _Entry, work: Work) -> None:
        operation = entry.operation
        try:
            result = await work()
            getattr(operation, _RESULT_FIELDS[type(result).__name__]).CopyFrom(result)
        except DomainError as error:
            operation.failure.CopyFrom(
                common_pb2.Failure(
                    reason=error.reason, message=error.message, metadata=dict(error.metadata)
                )
            )
            _log.warning("operation_failed", operation=operation.operation_id, error=str(error))
        except Exception:  # noqa: BLE001 - the edge of an operation: its caller learns of it
            _log.exception("operation_broke", operation=operation.operation_id)
            operation.failure.CopyFrom(
                common_pb2.Failure(reason=ErrorReason.INTERNAL, message="see the trainer's log")
            )

    def _ended(self, entry: _Entry) -> None:
        _end(entry)
        if entry.operation.HasField("failure"):
            self.failures[entry.operation.failure.reason] += 1

    def _make_room(self) -> None:
        while len(self._entries) >= self._max_kept:
            ended = next((key for key, entry in self._entries.items() if entry.done.is_set()), None)
            if ended is None:
                raise DomainError(
                    ErrorReason.QUEUE_FULL, f"{len(self._entries)} operations are in progress"
                )
            del self._entries[ended]

    def _require(self, operation_id: str) -> _Entry:
        entry = self._entries.get(operation_id)
        if entry is None:
            raise DomainError(
                ErrorReason.NOT_FOUND,
                f"no operation {operation_id} here; it may be of an earlier start of the trainer",
                {"operation": operation_id},
            )
        return entry


def _end(entry: _Entry) -> None:
    """Frees who waits; a task that was cancelled, even before its first step, has no result."""
    if entry.operation.WhichOneof("result") is None:
        entry.operation.failure.CopyFrom(
            common_pb2.Failure(reason=ErrorReason.CANCELLED, message="the operation was cancelled")
        )
    entry.operation.done = True
    entry.done.set()

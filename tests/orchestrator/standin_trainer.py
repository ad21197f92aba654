"""A trainer that speaks the contract and keeps real state in the store, without torch.

A policy's "weights" are one number: how many micro-batches were applied to it. Slots can be held by
one policy at a time, an operation on a binding that is gone fails, and what was not saved is lost.
"""

from __future__ import annotations

import asyncio
import struct
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from typing import Any

from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.api.trainer.v1 import trainer_pb2 as pb
from flexmarl.api.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer
from flexmarl.client.buffers import BufferSpec
from flexmarl.client.store import StoreClient
from flexmarl.core.errors import DomainError, ErrorReason

SPECS = [BufferSpec("count", "F64", (1,))]


@dataclass
class Bound:
    """What a process group holds in memory."""

    run_id: str
    policy: str
    term: int
    slots: tuple[str, ...]
    state: graph.StateRecord
    ledger: list[str] = field(default_factory=list)
    counts: graph.GradientCounts = field(default_factory=graph.GradientCounts)


class StandInTrainer(TrainerServiceServicer):
    """One trainer node.

    Args:
        num_slots: Devices.
        pause_s: Seconds per micro-batch.
    """

    def __init__(self, *, num_slots: int = 2, pause_s: float = 0.0) -> None:
        self.incarnation = uuid.uuid4().hex
        self.slots = tuple(f"slot{i}" for i in range(num_slots))
        self.computed: list[str] = []
        self.applied: list[tuple[str, int]] = []
        self.suspended: list[str] = []
        self.bindings: list[tuple[str, tuple[str, ...]]] = []
        self.hints: list[str] = []
        self.fail_next: DomainError | None = None
        self._pause_s = pause_s
        self._bound: dict[str, Bound] = {}
        self._operations: dict[str, asyncio.Task[pb.Operation]] = {}
        self._runs: set[str] = set()
        self._busy_s = 0.0
        self._store: StoreClient | None = None

    @property
    def bound(self) -> tuple[str, ...]:
        """Policies that hold slots now."""
        return tuple(sorted(self._bound))

    async def OpenRun(self, request: pb.OpenRunRequest, _: object) -> pb.OpenRunResponse:
        if self._store is None:
            self._store = StoreClient.connect(request.shards[0].address)
        self._runs.add(request.run_id)
        return pb.OpenRunResponse(incarnation=self.incarnation, slots=self.slots)

    async def CloseRun(self, request: pb.CloseRunRequest, _: object) -> pb.CloseRunResponse:
        self._runs.discard(request.run_id)
        self._bound.clear()
        return pb.CloseRunResponse()

    async def BindPolicy(self, request: pb.BindPolicyRequest, _: object) -> pb.BindPolicyResponse:
        if request.run_id not in self._runs:
            raise DomainError(ErrorReason.RUN_NOT_FOUND, f"no run {request.run_id}")
        self._bound.pop(request.policy, None)
        taken = {slot for bound in self._bound.values() for slot in bound.slots}
        if taken & set(request.slots):
            raise DomainError(ErrorReason.STATE_TRANSITION_REFUSED, "a slot is held")
        self.bindings.append((request.policy, tuple(request.slots)))
        work = self._bind(request)
        return pb.BindPolicyResponse(operation=await self._begin(request.request_id, work))

    async def ComputeGradients(
        self, request: pb.ComputeGradientsRequest, _: object
    ) -> pb.ComputeGradientsResponse:
        bound = self._require(request.micro_batch.policy, request.term)
        work = self._compute(request, bound)
        return pb.ComputeGradientsResponse(operation=await self._begin(request.request_id, work))

    async def SaveGradients(
        self, request: pb.SaveGradientsRequest, _: object
    ) -> pb.SaveGradientsResponse:
        work = self._save(request.run_id, self._require(request.policy, request.term))
        return pb.SaveGradientsResponse(operation=await self._begin(request.request_id, work))

    async def ApplyUpdate(
        self, request: pb.ApplyUpdateRequest, _: object
    ) -> pb.ApplyUpdateResponse:
        work = self._apply(request, self._require(request.policy, request.term))
        return pb.ApplyUpdateResponse(operation=await self._begin(request.request_id, work))

    async def SuspendPolicy(
        self, request: pb.SuspendPolicyRequest, _: object
    ) -> pb.SuspendPolicyResponse:
        bound = self._require(request.policy, request.term)

        async def work() -> pb.Operation:
            operation = await self._save(request.run_id, bound)
            self._bound.pop(request.policy, None)
            self.suspended.append(request.policy)
            return operation

        return pb.SuspendPolicyResponse(operation=await self._begin(request.request_id, work()))

    async def PrefetchPolicy(
        self, request: pb.PrefetchPolicyRequest, _: object
    ) -> pb.PrefetchPolicyResponse:
        self.hints.append(request.policy)
        work = self._prefetch()
        return pb.PrefetchPolicyResponse(operation=await self._begin(request.request_id, work))

    async def WaitOperation(
        self, request: pb.WaitOperationRequest, context: Any
    ) -> pb.WaitOperationResponse:
        task = self._operations.get(request.operation_id)
        if task is None:
            raise DomainError(ErrorReason.NOT_FOUND, f"no operation {request.operation_id}")
        await asyncio.wait([task], timeout=max(context.time_remaining() - 0.2, 0.0))
        return pb.WaitOperationResponse(operation=self._describe(request.operation_id, task))

    async def GetStatus(self, request: pb.GetStatusRequest, _: object) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(status=self._status())

    async def WatchStatus(
        self, request: pb.WatchStatusRequest, _: object
    ) -> AsyncIterator[pb.WatchStatusResponse]:
        while True:
            yield pb.WatchStatusResponse(status=self._status())
            await asyncio.sleep((request.interval_ms or 500) / 1000)

    def forget(self) -> None:
        """Become another process."""
        self.incarnation = uuid.uuid4().hex
        for task in self._operations.values():
            task.cancel()
        self._operations.clear()
        self._bound.clear()
        self._runs.clear()

    async def close(self) -> None:
        self.forget()
        if self._store is not None:
            await self._store.close()

    async def _begin(self, operation_id: str, work: Awaitable[pb.Operation]) -> pb.Operation:
        task = self._operations.get(operation_id)
        if task is None:
            task = asyncio.ensure_future(work)
            self._operations[operation_id] = task
        return self._describe(operation_id, task)

    def _describe(self, operation_id: str, task: asyncio.Task[pb.Operation]) -> pb.Operation:
        if not task.done():
            return pb.Operation(operation_id=operation_id)
        operation = pb.Operation(operation_id=operation_id, done=True)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, DomainError):
            operation.failure.reason = error.reason.value
            operation.failure.message = error.message
        else:
            operation.MergeFrom(task.result())
        return operation

    def _require(self, policy: str, term: int) -> Bound:
        bound = self._bound.get(policy)
        if bound is None or bound.term != term:
            raise DomainError(ErrorReason.CHILD_DIED, f"policy {policy} is not bound under {term}")
        return bound

    async def _bind(self, request: pb.BindPolicyRequest) -> pb.Operation:
        assert self._store is not None
        state = await self._store.get_state(request.run_id, request.policy)
        if state is None:
            state = await self._write_set(request.run_id, request.policy, 0, 0.0, request.term, {})
        bound = Bound(request.run_id, request.policy, request.term, tuple(request.slots), state)
        if not state.applied or state.version <= request.version:
            bound.ledger = [] if state.applied else list(state.ledger)
            bound.counts.CopyFrom(state.counts)
        self._bound[request.policy] = bound
        return pb.Operation(bind=pb.BindPolicyResult(state=state))

    async def _prefetch(self) -> pb.Operation:
        return pb.Operation(prefetch=pb.PrefetchResult())

    async def _compute(self, request: pb.ComputeGradientsRequest, bound: Bound) -> pb.Operation:
        assert self._store is not None
        begun = time.monotonic()
        record = request.micro_batch
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            self._bound.pop(bound.policy, None)
            raise error
        vertices = await self._store.get_vertices(request.run_id, record.rows)
        for vertex in vertices:
            meta = vertex.meta
            assert meta.policy == record.policy
            assert meta.policy_version == request.version
            assert meta.weights_hash == request.weights_hash
            assert meta.HasField("advantage")
        await asyncio.sleep(self._pause_s)
        if self._bound.get(bound.policy) is not bound:
            raise DomainError(ErrorReason.CHILD_DIED, "the process group ended")
        assert record.micro_batch_id not in bound.ledger, "handed over twice"
        bound.ledger.append(record.micro_batch_id)
        counts = graph.GradientCounts(
            num_rows=len(vertices), num_tokens=sum(v.meta.num_response_tokens for v in vertices)
        )
        bound.counts.num_rows += counts.num_rows
        bound.counts.num_tokens += counts.num_tokens
        self.computed.append(record.micro_batch_id)
        self._busy_s += time.monotonic() - begun
        result = pb.ComputeGradientsResult(
            micro_batch_id=record.micro_batch_id,
            added=True,
            counts=counts,
            metrics={"loss": -0.5, "entropy": 1.25},
        )
        return pb.Operation(gradients=result)

    async def _save(self, run_id: str, bound: Bound) -> pb.Operation:
        assert self._store is not None
        if bound.ledger:
            state = graph.StateRecord()
            state.CopyFrom(bound.state)
            state.term = bound.term
            state.applied = False
            del state.ledger[:]
            state.ledger.extend(bound.ledger)
            state.counts.CopyFrom(bound.counts)
            await self._store.save_state(run_id, state)
            return pb.Operation(state=pb.StateResult(state=state))
        return pb.Operation(state=pb.StateResult(state=bound.state))

    async def _apply(self, request: pb.ApplyUpdateRequest, bound: Bound) -> pb.Operation:
        assert self._store is not None
        if bound.state.version == request.batch + 1:
            return pb.Operation(state=pb.StateResult(state=bound.state))
        if sorted(request.micro_batch_ids) != sorted(bound.ledger):
            missing = set(request.micro_batch_ids) ^ set(bound.ledger)
            raise DomainError(ErrorReason.INVALID_ARGUMENT, f"the sum differs: {sorted(missing)}")
        number = await self._read(request.run_id, bound.state.weights.key) + len(bound.ledger)
        state = await self._write_set(
            request.run_id,
            request.policy,
            request.batch + 1,
            number,
            bound.term,
            {"ledger": bound.ledger, "applied": True, "num_updates": bound.state.num_updates + 1},
        )
        bound.state, bound.ledger, bound.counts = state, [], graph.GradientCounts()
        self.applied.append((request.policy, request.batch))
        return pb.Operation(state=pb.StateResult(state=state, metrics={"grad_norm": 0.75}))

    async def _write_set(
        self, run_id: str, policy: str, version: int, number: float, term: int, more: dict[str, Any]
    ) -> graph.StateRecord:
        assert self._store is not None
        refs = {}
        for kind in ("weights", "master", "moments"):
            key = f"{run_id}.{policy}.v{version}.t{term}.{kind}"
            writer = await self._store.allocate_segment(run_id, key, SPECS)
            writer.buffers["count"].data[:] = struct.pack("d", number)
            checksum = writer.content_hash()
            refs[kind] = await writer.seal(checksum=checksum)
        state = graph.StateRecord(
            policy=policy,
            version=version,
            term=term,
            weights_hash=refs["weights"].checksum,
            **refs,
            **more,
        )
        await self._store.save_state(run_id, state)
        return state

    async def _read(self, run_id: str, key: str) -> float:
        assert self._store is not None
        async with self._store.open_segment(run_id, key, holder="stand-in") as reader:
            (number,) = struct.unpack("d", reader.buffers["count"].data)
        return float(number)

    def _status(self) -> pb.TrainerStatus:
        held = {slot: bound for bound in self._bound.values() for slot in bound.slots}
        slots = [
            pb.SlotStatus(
                slot=slot,
                run_id=held[slot].run_id if slot in held else "",
                policy=held[slot].policy if slot in held else "",
                busy_s=self._busy_s / len(self.slots),
            )
            for slot in self.slots
        ]
        return pb.TrainerStatus(incarnation=self.incarnation, slots=slots, ready=True)


async def weights_of(store: StoreClient, run_id: str, manifest: graph.Manifest) -> dict[str, float]:
    """The number that each policy's weights are."""
    numbers = {}
    for name, policy in sorted(manifest.policies.items()):
        async with store.open_segment(run_id, policy.weights.key, holder="test") as reader:
            (numbers[name],) = struct.unpack("d", reader.buffers["count"].data)
    return numbers

"""A rank worker that has no device: it answers the same commands, after the time of a model."""

from __future__ import annotations

import asyncio
import math
from array import array

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.core.errors import DomainError
from flexmarl.core.training_costs import TrainingCosts
from flexmarl.runtime.policy_config import PolicyConfig
from flexmarl.trainer.simulated.state import SimulatedState


class SimulatedRank:
    """One unit: the policy that it holds, bound or not, and what is bound.

    Suspending costs nothing here: state is moved out when another policy takes the unit.

    Args:
        costs: Model of time.
        seconds_scale: Real seconds per emulated one.
    """

    def __init__(self, costs: TrainingCosts, *, seconds_scale: float) -> None:
        self._costs = costs
        self._scale = seconds_scale
        self._held: str | None = None
        self._state = SimulatedState()
        self._rank = 0
        self._num_units = 1

    async def answer(self, frame: bytes) -> bytes:
        """Executes a command frame; returns the reply's."""
        command = rank_pb2.RankCommand.FromString(frame)
        reply = rank_pb2.RankReply(command_id=command.command_id)
        try:
            await self._execute(command, reply)
        except DomainError as error:
            reply.failure.CopyFrom(
                common_pb2.Failure(
                    reason=error.reason, message=error.message, metadata=dict(error.metadata)
                )
            )
        return reply.SerializeToString()

    async def _execute(self, command: rank_pb2.RankCommand, reply: rank_pb2.RankReply) -> None:
        match command.WhichOneof("command"):
            case "bind":
                reply.bound.CopyFrom(await self._bind(command.bind))
            case "gradients":
                reply.added.CopyFrom(await self._add(command.gradients))
            case "apply":
                reply.written.CopyFrom(await self._apply(command.apply))
            case "export":
                reply.written.CopyFrom(await self._export(list(command.export.targets)))
            case "unbind":
                self._state.total = None
                reply.unbound.SetInParent()
            case "forget":
                reply.forgotten.SetInParent()
            case "prefetch":  # nothing: moving state in is always paid when the unit takes it
                reply.prefetched.SetInParent()
            case kind:
                raise ValueError(f"unknown command {kind}")

    async def _bind(self, command: rank_pb2.RankBind) -> rank_pb2.RankBound:
        config = PolicyConfig.model_validate_json(command.policy_json)
        taken_s = 0.0
        if config.kind == "trained" and self._held != command.binding:
            held = None if self._held is None else _policy_of(self._held)
            taken_s = await self._spend(self._costs.take_s(_policy_of(command.binding), held=held))
        self._held = command.binding
        self._rank, self._num_units = command.rank, len(command.members)
        self._state.total = None
        if command.WhichOneof("source") == "initial":
            self._state.set_initial(command.initial.seed)
        for segment in command.saved.segments:
            self._state.load(segment)
        parameters = self._state.describe()
        return rank_pb2.RankBound(
            parameters=parameters,
            state_bytes=sum(item.size_bytes for item in parameters),
            has_moments=True,
            seconds={"load": taken_s},
        )

    async def _add(self, command: rank_pb2.RankGradients) -> rank_pb2.RankAdded:
        lengths = array("i")
        lengths.frombytes(command.prompt_lengths)
        lengths.frombytes(command.response_lengths)
        num_sampled = len(command.logprobs) // 8
        forward_s = await self._spend(
            self._costs.gradients_s(
                self._policy(), num_tokens=sum(lengths), num_units=self._num_units
            )
        )
        gradient = self._state.gradient(command)
        finite = math.isfinite(gradient)
        if finite:
            self._state.total = gradient + (self._state.total or 0.0)
        return rank_pb2.RankAdded(
            finite=finite,
            # Every rank reports the whole, so that means over ranks are those of the micro-batch.
            num_tokens=num_sampled,
            sums={"ratio": float(num_sampled), "loss": -gradient if finite else 0.0},
            seconds={"forward": forward_s},
        )

    async def _apply(self, command: rank_pb2.RankApply) -> rank_pb2.RankWritten:
        metrics = {"skipped": 1.0}
        step_s = 0.0
        if command.denominator > 0 and self._state.total is not None:
            step_s = await self._spend(self._costs.apply_s(self._policy()))
            metrics = self._state.step(command.denominator)
        written = await self._export(list(command.targets))
        written.metrics.update(metrics)
        written.seconds["step"] = step_s
        return written

    async def _export(self, targets: list[rank_pb2.MappedSegment]) -> rank_pb2.RankWritten:
        publish_s = 0.0
        if any(target.kind == "weights" for target in targets):
            publish_s = await self._spend(self._costs.publish_s(self._policy()))
        # All ranks hold the same numbers; one writes them.
        digest = self._state.export(targets) if self._rank == 0 else ""
        return rank_pb2.RankWritten(weights_hash=digest, seconds={"write": publish_s})

    def _policy(self) -> str:
        assert self._held is not None, "work without a binding"
        return _policy_of(self._held)

    async def _spend(self, emulated_s: float) -> float:
        """Lets emulated time pass; returns the real seconds that were meant to pass."""
        seconds = emulated_s * self._scale
        if seconds:
            await asyncio.sleep(seconds)
        return seconds


def _policy_of(binding: str) -> str:
    return binding.rpartition("/")[2]

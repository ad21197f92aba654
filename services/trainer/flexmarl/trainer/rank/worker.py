"""What a rank worker does with commands; one policy is bound at a time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from flexmarl.api.trainer.v1alpha1 import rank_pb2
from flexmarl.client.segments import hash_file
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.run_config import PolicyConfig
from flexmarl.trainer.rank.construct import architecture_of
from flexmarl.trainer.rank.frozen import FrozenWeights
from flexmarl.trainer.rank.gradients import Learner, add_micro_batch
from flexmarl.trainer.rank.groups import Groups, mesh_of
from flexmarl.trainer.rank.initial import initial_weights
from flexmarl.trainer.rank.losses.choose import choose
from flexmarl.trainer.rank.model import build_sharded
from flexmarl.trainer.rank.optimizer import step
from flexmarl.trainer.rank.packing import Rows
from flexmarl.trainer.rank.reference import Reference, References
from flexmarl.trainer.rank.residence import (
    ModuleKey,
    Resident,
    Residents,
    StateKeys,
)
from flexmarl.trainer.rank.segments import mapped
from flexmarl.trainer.rank.shards import ShardedState


@dataclass(slots=True, kw_only=True)
class _Bound:
    """The policy that is bound; `resident` and `learner` are None for a frozen one."""

    config: PolicyConfig
    state: ShardedState | FrozenWeights
    resident: Resident | None
    learner: Learner | None
    rank: int


class RankWorker:
    """Executes commands, strictly one after the other.

    Args:
        position: Number of this worker in its trainer.
        device: Its device.
        timeout_s: Longest wait in a collective.
        max_resident_bytes: Bound of state kept between bindings.
    """

    def __init__(
        self, *, position: int, device: torch.device, timeout_s: float, max_resident_bytes: int
    ) -> None:
        self._device = device
        self._groups = Groups(position=position, device=device, timeout_s=timeout_s)
        self._residents = Residents(max_bytes=max_resident_bytes)
        self._references = References(max_bytes=max_resident_bytes)
        self._bound: _Bound | None = None

    def bind(self, command: rank_pb2.RankBind) -> rank_pb2.RankBound:
        """Binds a policy; nothing stays bound when it fails.

        Raises:
            DomainError: MODEL_INVALID, WORKFLOW_IMPORT_FAILED.
        """
        self.unbind()
        seconds: dict[str, float] = defaultdict(float)
        config = PolicyConfig.model_validate_json(command.policy_json)
        model_path = Path(command.model_path)
        if config.kind == "frozen":
            frozen = FrozenWeights(_first_weights(command, config, seed=command.initial.seed))
            bound = _Bound(
                config=config, state=frozen, resident=None, learner=None, rank=command.rank
            )
        else:
            started = time.perf_counter()
            resident = self._resident(command, config, model_path)
            seconds["group"] = (now := time.perf_counter()) - started
            self._fill(resident, command, config)
            part = "init" if command.WhichOneof("source") == "initial" else "load"
            seconds[part] = time.perf_counter() - now
            bound = _Bound(
                config=config,
                state=resident.state,
                resident=resident,
                learner=self._learner(resident, command, config),
                rank=command.rank,
            )
        self._bound = bound
        return rank_pb2.RankBound(
            parameters=bound.state.describe(),
            state_bytes=bound.state.state_bytes(),
            seconds=seconds,
        )

    def add(self, command: rank_pb2.RankGradients) -> rank_pb2.RankAdded:
        """Adds the gradient of a micro-batch.

        Raises:
            DomainError: INVALID_ARGUMENT for tokens outside of the vocabulary; LOSS_RAISED.
        """
        bound, resident = self._trained()
        assert bound.learner is not None, "a trained policy learns"
        rows = Rows.parse(command)
        self._check_tokens(rows, resident, command.micro_batch_id)
        stats = add_micro_batch(rows, bound.learner, num_updates=command.num_updates)
        return rank_pb2.RankAdded(
            finite=stats.finite,
            num_tokens=stats.num_tokens,
            sums=stats.sums,
            maxima=stats.maxima,
            seconds=stats.seconds,
        )

    def apply(self, command: rank_pb2.RankApply) -> rank_pb2.RankWritten:
        """Steps the optimizer, unless nothing was accumulated, and writes the state."""
        bound, resident = self._trained()
        seconds: dict[str, float] = defaultdict(float)
        metrics = {"skipped": 1.0}
        started = time.perf_counter()
        if command.denominator > 0 and resident.state.total is not None:
            resident.keys = None
            metrics = step(
                resident.state,
                config=bound.config.optimizer,
                denominator=command.denominator,
                num_updates=command.num_updates,
                group=resident.group,
                device=self._device,
            )
        resident.state.total = None
        seconds["step"] = time.perf_counter() - started
        written = self._export(bound, command.targets, seconds)
        return rank_pb2.RankWritten(weights_hash=written, metrics=metrics, seconds=seconds)

    def export(self, command: rank_pb2.RankExport) -> rank_pb2.RankWritten:
        """Writes state into segments."""
        assert self._bound is not None, "export without a binding"
        seconds: dict[str, float] = defaultdict(float)
        written = self._export(self._bound, command.targets, seconds)
        return rank_pb2.RankWritten(weights_hash=written, seconds=seconds)

    def unbind(self) -> None:
        """Drops the sum; the module stays resident within the bound."""
        bound, self._bound = self._bound, None
        if bound is not None and bound.resident is not None:
            bound.resident.state.total = None

    def _trained(self) -> tuple[_Bound, Resident]:
        assert self._bound is not None, "work without a binding"
        assert self._bound.resident is not None, "gradients of a frozen policy"
        return self._bound, self._bound.resident

    def _resident(
        self, command: rank_pb2.RankBind, config: PolicyConfig, model_path: Path
    ) -> Resident:
        members = tuple(command.members)
        group = self._groups.get(
            members=members,
            prefix=command.group_prefix,
            host=command.store_host,
            port=command.store_port,
        )

        def build() -> Resident:
            model = build_sharded(
                model_path,
                compute_dtype=config.trainer.compute_dtype,
                checkpointing=config.trainer.gradient_checkpointing,
                mesh=mesh_of(group, self._device),
                device=self._device,
            )
            state = ShardedState(model, rank=command.rank, world_size=len(members), prefix="lm.")
            return Resident(model=model, state=state, group=group)

        key = ModuleKey(
            architecture=architecture_of(model_path),
            compute_dtype=config.trainer.compute_dtype,
            checkpointing=config.trainer.gradient_checkpointing,
            members=members,
            group_prefix=command.group_prefix,
        )
        return self._residents.get(key, build)

    def _learner(
        self, resident: Resident, command: rank_pb2.RankBind, config: PolicyConfig
    ) -> Learner:
        reference = None
        if config.loss.kl is not None:
            seed = command.reference.seed
            key = (resident.state, command.model_path, config.model.init, seed)
            reference = self._references.get(
                key,
                lambda: Reference(resident.state, _first_weights(command, config, seed=seed)),
            )
        return Learner(
            config=config,
            model=resident.model,
            state=resident.state,
            policy_loss=choose(config.loss.kind, package=Path(command.package_path)),
            reference=reference,
            group=resident.group,
            device=self._device,
        )

    def _fill(self, resident: Resident, command: rank_pb2.RankBind, config: PolicyConfig) -> None:
        if command.WhichOneof("source") == "initial":
            resident.keys = None
            resident.state.set_initial(_first_weights(command, config, seed=command.initial.seed))
            return
        saved = command.saved
        keys = StateKeys(master=saved.master_key, moments=saved.moments_key)
        segments = {segment.kind: segment for segment in saved.segments}
        if resident.keys != keys:
            resident.keys = None
            for kind in ("master", "moments"):
                with mapped(segments[kind], write=False) as buffers:
                    resident.state.load(kind, buffers)
            resident.keys = keys
        if "gradients" in segments:
            with mapped(segments["gradients"], write=False) as buffers:
                resident.state.load("gradients", buffers)

    def _export(
        self,
        bound: _Bound,
        targets: Iterable[rank_pb2.MappedSegment],
        seconds: dict[str, float],
    ) -> str:
        by_kind = {target.kind: target for target in targets}
        started = time.perf_counter()
        for kind, target in by_kind.items():
            with mapped(target, write=True) as buffers:
                bound.state.export(kind, buffers)
        resident = bound.resident
        if resident is not None:
            if {"master", "moments"} <= by_kind.keys():
                resident.keys = StateKeys(
                    master=by_kind["master"].key, moments=by_kind["moments"].key
                )
            self._wait_for_all(resident.group)
        seconds["write"] += (now := time.perf_counter()) - started
        weights = by_kind.get("weights")
        if weights is None or bound.rank != 0:
            return ""
        digest = hash_file(Path(weights.path), list(weights.buffers))
        seconds["hash"] += time.perf_counter() - now
        return digest

    def _wait_for_all(self, group: dist.ProcessGroup) -> None:
        # The hash is over all ranks' ranges, so rank 0 waits until they are written.
        if group.size() > 1:
            flag = torch.ones(1, device=self._device)
            dist.all_reduce(flag, group=group)
            flag.item()

    def _check_tokens(self, rows: Rows, resident: Resident, micro_batch_id: str) -> None:
        # Every rank checks all rows, so all refuse alike and none waits in a collective.
        vocab = resident.model.lm.config.get_text_config().vocab_size
        if rows.tokens.size and (rows.tokens.min() < 0 or rows.tokens.max() >= vocab):
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT,
                f"{micro_batch_id}: a token is outside of the model's vocabulary of {vocab}",
                {"micro_batch_id": micro_batch_id, "vocabulary": str(vocab)},
            )


def _first_weights(
    command: rank_pb2.RankBind, config: PolicyConfig, *, seed: int
) -> Iterable[tuple[str, torch.Tensor]]:
    return initial_weights(Path(command.model_path), init=config.model.init, seed=seed)

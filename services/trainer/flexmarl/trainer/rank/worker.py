"""What a rank worker does with commands; one policy is bound at a time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.client.segments import hash_file
from flexmarl.core.activations import smaller_pass
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.policy_config import PolicyConfig
from flexmarl.trainer.rank.bound_state import BoundStates, Trained
from flexmarl.trainer.rank.failures import agree, told_apart
from flexmarl.trainer.rank.frozen import FrozenWeights, mark_of
from flexmarl.trainer.rank.gradients import Learner, add_micro_batch
from flexmarl.trainer.rank.initial import initial_weights
from flexmarl.trainer.rank.lora import first_adapter
from flexmarl.trainer.rank.losses.choose import choose
from flexmarl.trainer.rank.memory import DeviceMemory, StateKey
from flexmarl.trainer.rank.modules import Modules
from flexmarl.trainer.rank.optimizer import step
from flexmarl.trainer.rank.packing import Rows
from flexmarl.trainer.rank.pass_size import max_tokens_of
from flexmarl.trainer.rank.probe import probe_logprobs
from flexmarl.trainer.rank.reference import Reference, References
from flexmarl.trainer.rank.residence import Resident
from flexmarl.trainer.rank.state_files import StateFiles, rows_of, weight_rows


class RankWorker:
    """Executes commands, strictly one after the other.

    Args:
        modules: Modules and groups.
        memory: Where state lies.
        files: State to and from segments.
        states: Puts state where it belongs.
        references: First weights that divergences are measured from.
        device: The device.
    """

    def __init__(
        self,
        *,
        modules: Modules,
        memory: DeviceMemory,
        files: StateFiles,
        states: BoundStates,
        references: References,
        device: torch.device,
    ) -> None:
        self._modules = modules
        self._memory = memory
        self._states = states
        self._references = references
        self._files = files
        self._device = device
        self._trained: Trained | None = None
        self._frozen: FrozenWeights | None = None

    def bind(self, command: rank_pb2.RankBind) -> rank_pb2.RankBound:
        """Binds a policy; nothing stays bound when it fails.

        Raises:
            DomainError: MODEL_INVALID, WORKFLOW_IMPORT_FAILED; OUT_OF_MEMORY when its state does
                not fit; what loading it raises.
        """
        self.unbind()
        config = PolicyConfig.model_validate_json(command.policy_json)
        if config.kind == "frozen":
            self._frozen = FrozenWeights(_first_weights(command, config, seed=command.initial.seed))
            return rank_pb2.RankBound(
                parameters=self._frozen.describe(), state_bytes=self._frozen.size_bytes()
            )
        seconds: dict[str, float] = {}
        started = time.perf_counter()
        resident = self._modules.get(command, config)
        seconds["group"] = (now := time.perf_counter()) - started
        self._trained = self._states.place(resident, command, config)
        try:
            if command.WhichOneof("source") == "initial":
                first = _first_of(self._trained, seed=command.initial.seed)
                self._trained.state.set_initial(first)
            else:
                self._states.load(self._trained, command.saved)
            self._trained.learner = self._learner(self._trained)
        except BaseException:
            self._trained.key = None
            self.unbind()
            raise
        part = "init" if command.WhichOneof("source") == "initial" else "load"
        seconds[part] = time.perf_counter() - now
        return rank_pb2.RankBound(
            parameters=resident.parameters,
            published=() if resident.model.base is None else resident.published,
            state_bytes=self._trained.state.size_bytes(),
            has_moments=self._trained.has_moments,
            seconds=seconds,
            loaded_bytes=self._trained.loaded_bytes,
        )

    def add(self, command: rank_pb2.RankGradients) -> rank_pb2.RankAdded:
        """Adds the gradient of a micro-batch.

        Raises:
            DomainError: INVALID_ARGUMENT for tokens outside of the vocabulary; LOSS_RAISED;
                OUT_OF_MEMORY.
        """
        bound = self._require_trained()
        assert bound.learner is not None, "a trained policy learns"
        rows = Rows.parse(command)
        self._check_tokens(rows, bound.resident, command.micro_batch_id)
        try:
            learner = bound.learner
            if command.max_tokens_per_pass:
                smaller = smaller_pass(learner.max_tokens, asked=command.max_tokens_per_pass)
                learner = replace(learner, max_tokens=smaller)
            stats = add_micro_batch(rows, learner, num_updates=command.num_updates)
        except Exception as error:
            self._rebuild(bound)
            known = told_apart(error)
            if known is None or known is error:
                raise
            raise known from error
        return rank_pb2.RankAdded(
            finite=stats.finite,
            num_tokens=stats.num_tokens,
            sums=stats.sums,
            maxima=stats.maxima,
            seconds=stats.seconds,
        )

    def apply(self, command: rank_pb2.RankApply) -> rank_pb2.RankWritten:
        """Steps the optimizer, unless nothing was accumulated, and writes the state.

        Raises:
            DomainError: What loading the moments raises, on all ranks; nothing has changed then.
        """
        bound = self._require_trained()
        metrics = {"skipped": 1.0}
        seconds: dict[str, float] = defaultdict(float)
        started = time.perf_counter()
        self._states.bring_moments(bound, command.sources)
        seconds["moments"] = (now := time.perf_counter()) - started
        if command.denominator > 0 and bound.state.total is not None:
            bound.key = None
            metrics = step(
                bound.state,
                config=bound.config.optimizer,
                denominator=command.denominator,
                num_updates=command.num_updates,
                group=bound.resident.group,
                device=self._device,
            )
        bound.state.total = None
        seconds["step"] = time.perf_counter() - now
        written = self._export(bound, command.targets, seconds)
        written.metrics.update(metrics)
        return written

    def export(self, command: rank_pb2.RankExport) -> rank_pb2.RankWritten:
        """Writes state into segments."""
        seconds: dict[str, float] = defaultdict(float)
        if self._frozen is not None:
            (target,) = command.targets
            self._files.store(target, weight_rows(target, self._frozen))
            return rank_pb2.RankWritten(weights_hash=_hash(target, seconds), seconds=seconds)
        return self._export(self._require_trained(), command.targets, seconds)

    def unbind(self) -> rank_pb2.RankUnbound:
        """Drops the sum and leaves the memory: afterwards nothing of it is in use."""
        self._frozen = None
        bound, self._trained = self._trained, None
        if bound is not None:
            bound.state.total = None
            bound.state.drop_gradients()
            self._memory.leave(bound.room, bound.key)
        return rank_pb2.RankUnbound(used_bytes=self._memory.used_bytes)

    def forget(self, command: rank_pb2.RankForget) -> None:
        """Destroys the groups that a worker was in that is gone, and their modules."""
        if self._trained is not None and command.position in self._trained.members:
            self.unbind()
        self._modules.forget(command.position)

    def _rebuild(self, bound: Trained) -> None:
        """Replaces a module that broke off in the middle of a pass.

        Its hooks are in disorder, and it still has weights gathered, which whoever is bound to it
        next would compute with in place of its own.
        """
        total = bound.state.total
        bound.state.drop_gradients()
        self._modules.drop(bound.resident)
        bound.resident = self._modules.get(bound.command, bound.config)
        bound.state = bound.resident.at(bound.room)
        if total is not None:
            bound.state.set_sum()
        bound.learner = self._learner(bound)

    def _learner(self, bound: Trained) -> Learner:
        command, config, resident = bound.command, bound.config, bound.resident
        reference = None
        if config.loss.kl is not None:
            seed = command.reference.seed
            key = (
                command.model_path,
                command.model_hash,
                config.model.init,
                config.trainer.compute_dtype,
                config.lora,
                seed,
                bound.rank,
                len(bound.members),
            )
            reference = self._references.get(
                key, lambda: Reference(bound.state, _first_of(bound, seed=seed))
            )
        return Learner(
            loss=config.loss,
            model=resident.model,
            state=bound.state,
            policy_loss=choose(config.loss.kind, package=Path(command.package_path)),
            max_tokens=max_tokens_of(resident.model, config.trainer, device=self._device),
            reference=reference,
            group=resident.group,
            device=self._device,
        )

    def _require_trained(self) -> Trained:
        assert self._trained is not None, "work without a trained policy"
        return self._trained

    def _export(
        self,
        bound: Trained,
        targets: Iterable[rank_pb2.MappedSegment],
        seconds: dict[str, float],
    ) -> rank_pb2.RankWritten:
        by_kind = {target.kind: target for target in targets}
        started = time.perf_counter()
        failure = None
        try:
            self._store(bound, by_kind)
        except DomainError as error:
            failure = error
        # Rank 0 hashes what all wrote, so it waits for them; and none may fail alone.
        agree(failure, group=bound.resident.group, device=self._device)
        seconds["write"] += time.perf_counter() - started
        if {"master", "moments"} <= by_kind.keys():
            bound.key = StateKey(
                master=by_kind["master"].key,
                moments=by_kind["moments"].key,
                rank=bound.rank,
                world_size=len(bound.members),
            )
        written = rank_pb2.RankWritten()
        if (weights := by_kind.get("weights")) is not None:
            if bound.config.rollout.engine == "vllm":
                written.probe_logprobs.extend(
                    probe_logprobs(bound.resident.model, device=self._device)
                )
            written.weights_hash = _hash(weights, seconds) if bound.rank == 0 else ""
        written.seconds.update(seconds)
        return written

    def _store(self, bound: Trained, targets: dict[str, rank_pb2.MappedSegment]) -> None:
        """Writes all kinds, also after one that failed: ranks of other nodes hand theirs over."""
        failure = None
        for kind, target in targets.items():
            rows = (
                weight_rows(target, bound.state)
                if kind == "weights"
                else rows_of(target, bound.resident.block, bound.state.flat(kind))
            )
            try:
                bound.far.store(target, rows)
            except DomainError as error:
                failure = failure or error
        if failure is not None:
            raise failure

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
    if config.rollout.engine == "external" and config.rollout.external is not None:
        return mark_of(config.rollout.external)
    return initial_weights(Path(command.model_path), init=config.model.init, seed=seed)


def _first_of(bound: Trained, *, seed: int) -> Iterable[tuple[str, torch.Tensor]]:
    """The first values of what is trained: the weights, or an adapter."""
    if bound.config.lora is None:
        return _first_weights(bound.command, bound.config, seed=seed)
    shapes = ((shard.name, torch.Size(shard.shape)) for shard in bound.state.shards)
    return first_adapter(shapes, seed=seed)


def _hash(weights: rank_pb2.MappedSegment, seconds: dict[str, float]) -> str:
    started = time.perf_counter()
    digest = hash_file(Path(weights.path), list(weights.buffers))
    seconds["hash"] += time.perf_counter() - started
    return digest

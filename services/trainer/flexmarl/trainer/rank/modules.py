"""Modules and process groups of a worker: made on demand, kept within bounds, ended together."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.runtime.policy_config import PolicyConfig
from flexmarl.trainer.rank.construct import architecture_of
from flexmarl.trainer.rank.groups import GroupKey, Groups, mesh_of
from flexmarl.trainer.rank.initial import initial_weights
from flexmarl.trainer.rank.model import build_sharded
from flexmarl.trainer.rank.residence import ModuleKey, Resident, Residents
from flexmarl.trainer.rank.shards import describe, describe_base
from flexmarl.trainer.state_layout import MOMENTS, block_of


class Modules:
    """See the module's text.

    Args:
        groups: Groups; one that is destroyed takes its modules along.
        max_modules: Most modules kept.
        device: The device.
    """

    def __init__(self, groups: Groups, *, max_modules: int, device: torch.device) -> None:
        self._groups = groups
        self._residents = Residents(max_modules=max_modules)
        self._device = device

    def get(self, command: rank_pb2.RankBind, config: PolicyConfig) -> Resident:
        """Returns the module and group of a binding; waits for the other members of a new group.

        Raises:
            DomainError: MODEL_INVALID.
        """
        model_path = Path(command.model_path)
        architecture = architecture_of(model_path)  # a bad folder is told before anybody waits
        self._destroy(self._groups.without(command.kept_groups))
        group_key = GroupKey(members=tuple(command.members), prefix=command.group_prefix)
        group = self._groups.get(group_key, host=command.store_host, port=command.store_port)
        key = ModuleKey(
            architecture=architecture,
            compute_dtype=config.trainer.compute_dtype,
            checkpointing=config.trainer.gradient_checkpointing,
            optimizer=config.optimizer.kind,
            adapter=_adapter_of(command, config),
            group=group_key,
        )
        return self._residents.get(key, lambda: self._build(model_path, command, config, group))

    def drop(self, resident: Resident) -> None:
        """Drops a module."""
        self._residents.drop(lambda _, other: other is resident)

    def drop_others(self, resident: Resident) -> None:
        """Drops all modules but one."""
        self._residents.drop(lambda _, other: other is not resident)

    def forget(self, position: int) -> None:
        """Destroys all groups that a worker was in."""
        self._destroy(self._groups.of(position))

    def _build(
        self,
        model_path: Path,
        command: rank_pb2.RankBind,
        config: PolicyConfig,
        group: dist.ProcessGroup,
    ) -> Resident:
        model = build_sharded(
            model_path,
            compute_dtype=config.trainer.compute_dtype,
            checkpointing=config.trainer.gradient_checkpointing,
            mesh=mesh_of(group, self._device),
            device=self._device,
            lora=config.lora,
            weights=()
            if config.lora is None
            else initial_weights(model_path, init=config.model.init, seed=command.reference.seed),
        )
        parameters = describe(model, prefix="lm.")
        published = parameters if model.base is None else describe_base(model.base, parameters)
        rank, world_size = command.rank, len(command.members)
        return Resident(
            model=model,
            group=group,
            parameters=parameters,
            published=published,
            block=block_of(
                parameters,
                rank=rank,
                world_size=world_size,
                moments=MOMENTS[config.optimizer.kind],
            ),
            published_block=block_of(published, rank=rank, world_size=world_size),
        )

    def _destroy(self, groups: list[GroupKey]) -> None:
        self._residents.drop(lambda key, _: key.group in groups)
        for key in groups:
            self._groups.destroy(key)


def _adapter_of(command: rank_pb2.RankBind, config: PolicyConfig) -> str:
    """What a module with an adapter depends on beyond its architecture: the weights below it."""
    if config.lora is None:
        return ""
    model = f"{command.model_path} {command.model_hash}"
    first = f"{model} {config.model.init} {command.reference.seed}"
    return f"{config.lora.model_dump_json()} {first}"

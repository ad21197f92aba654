"""Pays the costs of a process's first step before a policy waits for it: seconds, once."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from flexmarl.core.passes import Tile
from flexmarl.runtime.algorithm_config import LossConfig, OptimizerConfig
from flexmarl.trainer.rank.attention import PACKED, PackedRows, register
from flexmarl.trainer.rank.groups import make_group, mesh_of
from flexmarl.trainer.rank.losses.ppo_clip import ppo_clip
from flexmarl.trainer.rank.losses.total import Coefficients, LossInputs, total_loss
from flexmarl.trainer.rank.memory import DeviceMemory
from flexmarl.trainer.rank.model import PassInputs, shard
from flexmarl.trainer.rank.optimizer import step
from flexmarl.trainer.rank.shards import ShardedState, describe, state_bytes
from flexmarl.trainer.state_layout import block_of


def warm(*, position: int, device: torch.device, memory: DeviceMemory, timeout_s: float) -> None:
    """Runs two gradient passes and a step of a toy model in a group of one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    group = make_group(
        name="warm",
        members=(position,),
        position=position,
        store=HashStore(),
        device=device,
        timeout_s=timeout_s,
    )
    register()
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    config._attn_implementation = PACKED
    lm = torch.nn.Module.to(LlamaForCausalLM(config), device)
    model = shard(lm, compute_dtype="float32", checkpointing=False, mesh=mesh_of(group, device))
    block = block_of(describe(model, prefix="lm."), rank=0, world_size=1)
    room = memory.take(state_bytes(block))
    assert room is not None, "nothing else is in use"
    state = ShardedState(model, block=block, memory=room.memory, prefix="lm.")
    state.flat("master").zero_()
    state.flat("moments").zero_()
    index = torch.arange(3, device=device)
    values = torch.ones(3, device=device)
    inputs = PassInputs(
        tokens=torch.zeros((1, 4), dtype=torch.int64, device=device),
        positions=torch.arange(4, device=device)[None],
        rows=PackedRows(count=1, width=4, places=None),
        scored=index,
        targets=index,
        temperatures=values,
    )

    def loss(_: Tile, current: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        inputs = LossInputs(
            current=current,
            entropy=entropy,
            behaviour=current.detach(),
            reference=None,
            advantage=values,
            row=torch.zeros_like(index),
            row_tokens=torch.full_like(index, 3),
            mask=torch.ones(3, dtype=torch.bool, device=device),
            num_rows=1,
        )
        return total_loss(inputs, LossConfig(), Coefficients(entropy=0.1), ppo_clip).total

    for _ in range(2):
        state.begin_gradients()
        torch.autograd.backward(model.loss(inputs, loss, row_ends=(3,), entropy=True))
        state.add(state.gradients())
    step(
        state,
        config=OptimizerConfig(),
        denominator=1.0,
        num_updates=0,
        group=group,
        device=device,
    )
    memory.leave(room, None)
    dist.destroy_process_group(group)

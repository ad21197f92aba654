"""Pays the costs of a process's first step before a policy waits for it: seconds, once."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.core.activations import MAX_TOKENS
from flexmarl.runtime.algorithm_config import LossConfig, OptimizerConfig
from flexmarl.trainer.rank.attention import PACKED, register
from flexmarl.trainer.rank.gradients import Learner, add_micro_batch
from flexmarl.trainer.rank.groups import make_group, mesh_of
from flexmarl.trainer.rank.losses.ppo_clip import ppo_clip
from flexmarl.trainer.rank.memory import DeviceMemory
from flexmarl.trainer.rank.model import shard
from flexmarl.trainer.rank.optimizer import step
from flexmarl.trainer.rank.packing import Rows
from flexmarl.trainer.rank.shards import ShardedState, describe, state_bytes
from flexmarl.trainer.state_layout import block_of

_MICRO_BATCH: Final = rank_pb2.RankGradients(
    tokens=np.zeros(7, "<i4").tobytes(),
    prompt_lengths=np.array([1, 1], "<i4").tobytes(),
    response_lengths=np.array([3, 2], "<i4").tobytes(),
    advantages=np.ones(2).tobytes(),
    temperatures=np.ones(2).tobytes(),
    logprobs=np.zeros(5).tobytes(),
)


def warm(*, position: int, device: torch.device, memory: DeviceMemory, timeout_s: float) -> None:
    """Adds two micro-batches and makes a step of a toy model in a group of one, as work does."""
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
    learner = Learner(
        loss=LossConfig(entropy=0.1),
        model=model,
        state=state,
        policy_loss=ppo_clip,
        max_tokens=MAX_TOKENS,
        reference=None,
        group=group,
        device=device,
    )
    for _ in range(2):
        add_micro_batch(Rows.parse(_MICRO_BATCH), learner, num_updates=0)
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

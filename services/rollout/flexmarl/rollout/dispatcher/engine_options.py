"""What the instances of a policy are told beyond what every engine understands."""

from __future__ import annotations

from flexmarl.api.rollout.v1.engine_pb2 import (
    EngineOptions,
    SimulatedOptions,
    SimulatedPolicy,
)
from flexmarl.runtime.policy_config import SimulatedConfig
from flexmarl.runtime.run_config import RunConfig


def engine_options(config: RunConfig, policy: str) -> EngineOptions:
    """Options of a policy's instances; other policies' times go along, for moves between them."""
    rollout = config.policies[policy].rollout
    options = EngineOptions(kv_cache_bytes=rollout.kv_cache_bytes)
    if rollout.simulated is not None:
        options.simulated.CopyFrom(_simulated(config, rollout.simulated))
    if rollout.engine == "vllm":
        vllm = rollout.vllm
        options.vllm.tensor_parallel_size = vllm.tensor_parallel_size
        options.vllm.enforce_eager = vllm.enforce_eager
        options.vllm.seeded = vllm.seeded
        options.vllm.args.extend(vllm.args)
    if rollout.external is not None:
        options.external.url = rollout.external.url
        options.external.model = rollout.external.model
        options.external.api_key_variable = rollout.external.api_key_variable
    return options


def _simulated(config: RunConfig, simulated: SimulatedConfig) -> SimulatedOptions:
    return SimulatedOptions(
        time_scale=simulated.time_scale,
        prefill_tokens_per_s=simulated.prefill_tokens_per_s,
        policies={
            name: SimulatedPolicy(
                decode_tokens_per_s=times.decode_tokens_per_s,
                load_s=times.load_s,
                move_s=times.move_s,
            )
            for name, policy in config.policies.items()
            if (times := policy.rollout.simulated) is not None
        },
    )

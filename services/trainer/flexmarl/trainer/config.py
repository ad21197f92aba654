"""Configuration of a trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from flexmarl.core.ids import check_name
from flexmarl.core.process_groups import NUMBERS_OF_OTHERS
from flexmarl.core.state_paths import StatePath, StatePaths
from flexmarl.core.training_costs import PolicyCosts, TrainingCosts
from flexmarl.runtime.config import ServiceConfig
from flexmarl.runtime.config_section import Section

_NotNegative = Annotated[float, Field(ge=0)]
_Positive = Annotated[float, Field(gt=0)]


class SimulatedPolicyConfig(Section):
    """Size and speed of a policy on simulated devices."""

    params_b: _Positive
    """Parameters in billions."""
    tokens_per_s: _Positive
    """Prompt and response tokens that one slot trains per emulated second."""


class SimulatedConfig(Section):
    """The model of time of simulated devices; seconds are emulated ones."""

    policies: dict[str, SimulatedPolicyConfig] = Field(default_factory=dict)
    """By the name that a run's config gives them."""
    seconds_scale: _Positive = 1.0
    """Real seconds per emulated second."""
    scaling_efficiency: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of its speed that a slot keeps per further slot of the same policy."""
    swap_out_s_per_b: _NotNegative = 0.12
    """Seconds per billion parameters to move out what another policy finds on a slot."""
    swap_in_s_per_b: _NotNegative = 0.22
    """Seconds per billion parameters to move a policy in."""
    apply_s_per_b: _NotNegative = 0.07
    """Seconds per billion parameters of an update."""
    publish_s_per_b: _NotNegative = 0.0
    """Seconds per billion parameters until an update's weights can be loaded elsewhere."""

    def costs(self) -> TrainingCosts:
        """Returns the model."""
        return TrainingCosts(
            policies={
                name: PolicyCosts(params_b=policy.params_b, tokens_per_s=policy.tokens_per_s)
                for name, policy in self.policies.items()
            },
            scaling_efficiency=self.scaling_efficiency,
            swap_out_s_per_b=self.swap_out_s_per_b,
            swap_in_s_per_b=self.swap_in_s_per_b,
            apply_s_per_b=self.apply_s_per_b,
            publish_s_per_b=self.publish_s_per_b,
        )


class TrainerConfig(ServiceConfig):
    """One trainer: the devices of a node and a warm worker for each."""

    data_dir: Path = Path("var/trainer")
    """Record of children, cache of unpacked models, spans."""
    slots: tuple[str, ...] = ("slot0",)
    """Names of the device slots; each has a worker."""
    device: Literal["cpu", "cuda", "simulated"] = "cpu"
    """Kind of device; with cuda, slot n is device n; with simulated there is none, and work takes
    the time that `simulated` says."""
    simulated: SimulatedConfig = SimulatedConfig()
    """Simulated devices."""
    interface: str = "lo"
    """Network interface of process groups and of their rendezvous."""
    rendezvous_host: str = "127.0.0.1"
    """Address of that interface that workers meet at; those of other trainers, too, when this one
    leads a group over several."""
    threads_per_rank: Annotated[int, Field(ge=0)] = 1
    """Compute threads of each worker; 0 means the node's cores divided by the slots. More than one
    pays for large models on cores that nobody else uses: threads of a small one mostly wait for
    each other, for ever longer when the cores are shared."""
    arena_bytes: Annotated[int, Field(ge=0)] = 64 << 20
    """Memory for state that each worker allocates at its start; it grows when a policy needs more.
    With room for two, the next policy's state is loaded while the present one computes."""
    max_arena_bytes: Annotated[int, Field(ge=0)] = 0
    """Most that this memory may grow to; a policy that needs more is refused. 0 means no bound."""
    state_path: Literal["auto", "segments", "device"] = "auto"
    """How a policy's state comes to slots that do not keep it, where those that it left may: from
    the store's segments, or sent by those slots. auto takes what is faster by what was measured;
    at first, segments on CPUs and the devices' own transport on GPUs."""
    max_modules: Annotated[int, Field(ge=1)] = 8
    """Most modules, and most process groups, that a worker keeps for bindings to come."""
    max_reference_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    """Most bytes of first weights, for policies with a divergence, that a worker keeps."""
    cold_start: bool = False
    """Replace a slot's worker after each binding: nothing is kept from one policy to the next, and
    every activation pays for process, group, module and state."""
    verify_swaps: bool = False
    """Read state back after it was moved out, and compare checksums; compare them again with those
    of the store before it is moved in."""
    warm_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Longest start of a worker."""
    command_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Longest work of a rank on one command; a rank that takes longer is ended."""
    close_grace_s: Annotated[float, Field(ge=0)] = 5.0
    """How long the end of a run waits for what its policies have under way here; a worker that is
    at work for it after that is ended. Keep it well below the 10 s that an orchestrator waits."""
    collective_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Longest wait of a rank for the others."""
    peer_silence_s: Annotated[float, Field(gt=0)] = 10.0
    """Longest silence of another trainer that lends slots to a group led here, or leads one on
    slots lent by this one; then the group is ended, and its slots are free. Set it alike on all,
    and below the 11 s over which a refused binding is tried again."""
    store_patience_s: Annotated[float, Field(gt=0)] = 60.0
    """How long calls of a run's home store are repeated while it is unavailable."""
    shard_patience_s: Annotated[float, Field(gt=0)] = 900.0
    """The same for its other shards; longer than the orchestrator's, who decides over a loss."""
    max_queued_per_policy: Annotated[int, Field(ge=1)] = 16
    """Most operations of one policy that wait; further ones are refused with QUEUE_FULL."""
    max_operations: Annotated[int, Field(ge=16)] = 1024
    """Most operations remembered; the oldest ended ones are forgotten first."""

    @property
    def compute_threads(self) -> int:
        """Compute threads of each worker."""
        return self.threads_per_rank or max(1, len(os.sched_getaffinity(0)) // len(self.slots))

    def state_paths(self) -> StatePaths:
        """Returns how state comes to slots; simulated ones have it from nowhere else."""
        if self.device == "simulated":
            return StatePaths(device="cpu", forced=StatePath.SEGMENTS)
        forced = None if self.state_path == "auto" else StatePath(self.state_path)
        return StatePaths(device=self.device, forced=forced)

    @field_validator("slots")
    @classmethod
    def _named_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or len(set(value)) < len(value):
            raise ValueError("name at least one slot, each once")
        if len(value) > NUMBERS_OF_OTHERS:
            raise ValueError(f"a trainer has at most {NUMBERS_OF_OTHERS} slots")
        for name in value:
            check_name(name, what="slot")
        return value

    @model_validator(mode="after")
    def _costs_known(self) -> TrainerConfig:
        if self.device == "simulated" and not self.simulated.policies:
            raise ValueError('device = "simulated" needs simulated.policies.<name> for each policy')
        return self

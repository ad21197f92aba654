"""One policy of a run: its model, how it is drawn from, served and trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from flexmarl.runtime.algorithm_config import LoraConfig, LossConfig, OptimizerConfig
from flexmarl.runtime.config_section import MOST, Count, Section

_LEAST_TEMPERATURE: Final = 0.01


class ModelConfig(Section):
    """Base model of a policy."""

    path: Path
    """Hugging Face folder with config.json and tokenizer.json; relative to the config."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Load the folder's weights, or draw them from the run's seed as config.json says."""


class SamplingConfig(Section):
    """How a policy's agents draw tokens."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Softmax temperature; the trainer divides its logits by it too."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus; below 1 refused for trained policies unless `allow_truncated`."""
    top_k: Annotated[int, Field(ge=0, le=MOST)] = 0
    """Most likely tokens kept; above 0 refused for trained policies unless `allow_truncated`."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Cut tokens less likely than this share of the likeliest; refused like `top_k`."""
    allow_truncated: bool = False
    """Accept that log-probs and draws follow different distributions."""


class SimulatedConfig(Section):
    """Latency model of the engine "simulated"; seconds are emulated ones."""

    time_scale: Annotated[float, Field(gt=0)] = 1.0
    """Wall seconds that an emulated second takes."""
    prefill_tokens_per_s: Annotated[float, Field(gt=0)] = 8000.0
    """Prompt tokens per second of one request."""
    decode_tokens_per_s: Annotated[float, Field(gt=0)] = 40.0
    """Response tokens per second of one request, whatever else runs."""
    load_s: Annotated[float, Field(ge=0)] = 0.0
    """Taking over other weights; the instance serves nobody meanwhile."""
    move_s: Annotated[float, Field(ge=0)] = 0.0
    """Taking over this policy's weights after another policy's."""


class VllmConfig(Section):
    """Options of the engine "vllm"."""

    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Devices that share the model."""
    enforce_eager: bool = True
    """Skip graph compilation: starts in seconds; false computes faster on GPUs."""
    seeded: bool = True
    """Send each call's seed, so that a repeated attempt draws the same tokens."""
    args: tuple[str, ...] = ()
    """Further arguments of vLLM's OpenAI server; they win over ours."""


class ExternalConfig(Section):
    """Where the server of the engine "external" is; it runs already and is not updated."""

    url: str
    """Base URL of its OpenAI-compatible API, such as "http://host:8000"."""
    model: str
    """Model to ask it for."""
    api_key_variable: str = ""
    """Environment variable of the engine hosts that holds the API key; empty means none."""


class PolicyRolloutConfig(Section):
    """Inference instances of a policy."""

    engine: Literal["transformers", "vllm", "external", "simulated"] = "transformers"
    """Engine that serves it; "simulated" takes the time of a model and computes none."""
    vllm: VllmConfig = VllmConfig()
    """Options of engine "vllm"."""
    external: ExternalConfig | None = None
    """Where the server is; required with engine "external"."""
    simulated: SimulatedConfig | None = None
    """Latency model; required with engine "simulated"."""
    instances: Count = 1
    """Replicas at start."""
    max_concurrency: Count = 64
    """Most requests at once per instance."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Compute dtype."""
    max_context: Annotated[int, Field(ge=2, le=MOST)] | None = None
    """Longest prompt plus response in tokens; unset means the model's own limit."""

    kv_cache_bytes: Annotated[int, Field(ge=1 << 20, lt=1 << 63)] = 2 << 30
    """Most bytes of an instance's key-value cache."""

    @model_validator(mode="after")
    def _options_of_the_engine(self) -> PolicyRolloutConfig:
        for section in ("simulated", "external"):
            if self.engine == section and getattr(self, section) is None:
                raise ValueError(f'rollout.engine = "{section}" needs a section rollout.{section}')
        return self


class PolicyTrainerConfig(Section):
    """Training of a policy."""

    world_size: Annotated[int, Field(ge=1)] = 1
    """Slots that its process group binds at least."""
    max_world_size: Annotated[int, Field(ge=1)] | None = None
    """Most slots that it binds where more are free; unset means `world_size`."""
    micro_batch_rows: Annotated[int, Field(ge=1)] = 64
    """Most rows per micro-batch."""
    micro_batch_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens per micro-batch, prompts included; a longer row is one alone."""
    max_tokens_per_pass: Annotated[int, Field(ge=1)] | None = None
    """Tokens per forward pass; a micro-batch is cut into passes of at most this size. Unset means
    16,384, and on CPUs, where a lack of memory ends the process, no more than what 512 MiB of
    activations hold by the shape of the model."""
    compute_dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Dtype of forward and backward; master weights stay float32, or float64 with float64."""
    gradient_checkpointing: bool = False
    """Compute layers again in the backward instead of keeping what they made: less memory, about a
    third more time."""
    tier: Literal["memory", "disk"] = "memory"
    """Where its training state lies between bindings."""


class PolicyConfig(Section):
    """One set of weights."""

    kind: Literal["trained", "frozen"] = "trained"
    """Whether it is trained."""
    model: ModelConfig
    """Base model."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer."""
    loss: LossConfig = LossConfig()
    """Loss."""
    lora: LoraConfig | None = None
    """Train an adapter in place of the weights; unset means the weights themselves."""
    rollout: PolicyRolloutConfig = PolicyRolloutConfig()
    """Inference."""
    trainer: PolicyTrainerConfig = PolicyTrainerConfig()
    """Training."""

    @model_validator(mode="after")
    def _on_policy_draws(self) -> PolicyConfig:
        truncated = self.sampling.top_p < 1 or self.sampling.top_k > 0 or self.sampling.min_p > 0
        if self.kind == "trained" and truncated and not self.sampling.allow_truncated:
            raise ValueError(
                "sampling.top_p/top_k/min_p cut the distribution of a trained policy, so ratios "
                "would be wrong; remove them or set sampling.allow_truncated = true"
            )
        if self.kind == "trained" and self.rollout.engine == "external":
            raise ValueError(
                'rollout.engine = "external" serves what it has and takes no weights; '
                'use kind = "frozen"'
            )
        if self.kind == "frozen" and self.lora is not None:
            raise ValueError("lora: a frozen policy trains nothing; remove one of them")
        most_slots = self.trainer.max_world_size or self.trainer.world_size
        if self.kind == "frozen" and most_slots > 1:
            raise ValueError(
                "trainer.world_size: a frozen policy needs one slot, once, to publish its weights; "
                "remove it"
            )
        if 0 < self.sampling.temperature < _LEAST_TEMPERATURE:
            raise ValueError(
                f"sampling.temperature is below {_LEAST_TEMPERATURE}, where vLLM draws by "
                f"{_LEAST_TEMPERATURE} all the same; use 0 (greedy), or more"
            )
        if self.kind == "trained" and self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature = 0 (greedy) cannot be trained on; use a value above 0"
            )
        return self

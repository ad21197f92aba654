"""The configuration of a run: what a user writes in TOML, checked once, stored with the run.

Services read the resolved form from the MEG Store, so all of them see the same values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from flexmarl.core.balance import BalanceConfig
from flexmarl.core.ids import check_name
from flexmarl.runtime.algorithm_config import (
    AdvantageConfig,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class WorkflowConfig(_Section):
    """Where the user's code is."""

    package: Path = Path(".")
    """Folder stored with the run and put on the workers' import path; relative to the config."""
    entry: str
    """The workflow, "module:function": an async function of (ctx, query)."""
    reward: str
    """The reward function, "module:function": a function of the finished sample."""
    reward_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward function."""
    tools: dict[str, str] = Field(default_factory=dict)
    """Tools by name, each "module:function"."""
    sample_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest run of one sample; then it fails."""
    step_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Longest time that user code may hold its worker without await; then the sample fails."""
    reward_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Longest run of the reward function on one sample; then the sample fails."""
    reward_workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that run the reward function; an async one runs in the workflow's workers."""
    num_workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Worker processes that run workflows."""
    worker_memory_mib: Annotated[int, Field(ge=64)] = 4096
    """Most memory of one worker process; one that uses more is ended and started again."""
    max_samples_per_worker: Annotated[int, Field(ge=1)] = 1024
    """Most samples in progress in one worker; further ones wait."""


class FilterConfig(_Section):
    """Rows to keep: those whose column compares so with the value."""

    column: str
    """Column; a row without it is left out."""
    op: Literal["==", "!=", "<", "<=", ">", ">=", "in", "not in"] = "=="
    """Comparison; with "in" and "not in" the value is a list."""
    value: str | int | float | bool | list[str | int | float | bool]
    """What it is compared with."""

    @model_validator(mode="after")
    def _list_where_needed(self) -> FilterConfig:
        if (self.op in ("in", "not in")) != isinstance(self.value, list):
            raise ValueError(f'op = "{self.op}" with value = {self.value!r}: "in" takes a list')
        return self


class DatasetConfig(_Section):
    """The queries."""

    path: Path
    """JSONL or Parquet file, or a folder that Hugging Face `datasets` reads; relative to the
    config."""
    split: str = "train"
    """Split of a Hugging Face folder; a file has none."""
    filters: tuple[FilterConfig, ...] = ()
    """Rows must pass all of them."""
    epochs: Annotated[int, Field(ge=1)] | None = None
    """Most passes over the rows; the run ends there, though `versions` be more."""
    columns: tuple[str, ...] = ()
    """Columns that every row must have; named in the error when one is missing."""
    shuffle: bool = True
    """Shuffle each pass by the run's seed."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Use only the first rows that pass the filters."""


class EvaluationConfig(_Section):
    """Held-out queries, sampled at every k-th version and never trained on."""

    every: Annotated[int, Field(ge=0)] = 0
    """Versions from one evaluation to the next; the last version is always one. 0: never."""
    path: Path | None = None
    """File or folder of the queries; unset: the dataset's."""
    split: str | None = None
    """Split of a Hugging Face folder."""
    fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the dataset's rows that is held out, chosen by seed and content."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Use only the first rows."""
    greedy: bool = True
    """Draw one sample of each query from the most likely tokens."""
    samples: Annotated[int, Field(ge=0)] = 1
    """Samples of each query that are drawn as in training."""

    @model_validator(mode="after")
    def _has_queries(self) -> EvaluationConfig:
        if not self.every:
            return self
        if not self.greedy and not self.samples:
            raise ValueError("greedy = false and samples = 0: nothing would be sampled")
        other = self.path is not None or self.split is not None
        if other == (self.fraction is not None):
            raise ValueError(
                "set fraction, or path and split of the held-out queries: one of the two"
            )
        return self


class BatchConfig(_Section):
    """Size of a batch and what happens when parts of it fail."""

    groups: Annotated[int, Field(ge=1)]
    """Queries per batch (B)."""
    samples_per_group: Annotated[int, Field(ge=1)]
    """Samples per query (G)."""
    redundant_samples: Annotated[int, Field(ge=0)] = 0
    """Further samples per query: its group closes when G are done, and the slowest are cut. Short
    answers are then a little more likely to be trained on than long ones."""
    staleness: Annotated[int, Field(ge=0)] = 0
    """Versions that a token may be older than its trainer; only 0 is built."""
    on_sample_failure: Literal["refill", "drop_sample", "drop_group", "fail"] = "refill"
    """What a failed sample does to its group."""
    refill_max: Annotated[int, Field(ge=0)] = 2
    """Most samples added to one group in place of failed ones."""
    replace_max: Annotated[int, Field(ge=0)] = 4
    """Most groups added to one batch in place of dropped ones."""
    on_replace_exhausted: Literal["smaller", "fail"] = "smaller"
    """What happens when no further group may be added."""
    filter_zero_variance: bool = False
    """Drop groups whose samples all have the same reward."""

    @field_validator("staleness")
    @classmethod
    def _only_on_policy(cls, value: int) -> int:
        if value:
            raise ValueError("staleness above 0 is not built yet; use 0")
        return value


class ModelConfig(_Section):
    """Base model of a policy."""

    path: Path
    """Hugging Face folder with config.json and tokenizer.json; relative to the config."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Load the folder's weights, or draw them from the run's seed as config.json says."""


class SamplingConfig(_Section):
    """How a policy's agents draw tokens."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Softmax temperature; the trainer divides its logits by it too."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus; below 1 refused for trained policies unless `allow_truncated`."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Most likely tokens kept; above 0 refused for trained policies unless `allow_truncated`."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Cut tokens less likely than this share of the likeliest; refused like `top_k`."""
    allow_truncated: bool = False
    """Accept that log-probs and draws follow different distributions."""


class SimulatedConfig(_Section):
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


class VllmConfig(_Section):
    """Options of the engine "vllm"."""

    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Devices that share the model."""
    enforce_eager: bool = True
    """Skip graph compilation: starts in seconds; false computes faster on GPUs."""
    seeded: bool = True
    """Send each call's seed, so that a repeated attempt draws the same tokens."""
    args: tuple[str, ...] = ()
    """Further arguments of vLLM's OpenAI server; they win over ours."""


class ExternalConfig(_Section):
    """Where the server of the engine "external" is; it runs already and is not updated."""

    url: str
    """Base URL of its OpenAI-compatible API, such as "http://host:8000"."""
    model: str
    """Model to ask it for."""
    api_key_variable: str = ""
    """Environment variable of the engine hosts that holds the API key; empty means none."""


class PolicyRolloutConfig(_Section):
    """Inference instances of a policy."""

    engine: Literal["transformers", "vllm", "external", "simulated"] = "transformers"
    """Engine that serves it; "simulated" takes the time of a model and computes none."""
    vllm: VllmConfig = VllmConfig()
    """Options of engine "vllm"."""
    external: ExternalConfig | None = None
    """Where the server is; required with engine "external"."""
    simulated: SimulatedConfig | None = None
    """Latency model; required with engine "simulated"."""
    instances: Annotated[int, Field(ge=1)] = 1
    """Replicas at start."""
    max_concurrency: Annotated[int, Field(ge=1)] = 64
    """Most requests at once per instance."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Compute dtype."""
    max_context: Annotated[int, Field(ge=2)] | None = None
    """Longest prompt plus response in tokens; unset means the model's own limit."""

    kv_cache_bytes: Annotated[int, Field(ge=1 << 20)] = 2 << 30
    """Most bytes of an instance's key-value cache."""

    @model_validator(mode="after")
    def _options_of_the_engine(self) -> PolicyRolloutConfig:
        for section in ("simulated", "external"):
            if self.engine == section and getattr(self, section) is None:
                raise ValueError(f'rollout.engine = "{section}" needs a section rollout.{section}')
        return self


class PolicyTrainerConfig(_Section):
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


class PolicyConfig(_Section):
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
        if self.kind == "trained" and self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature = 0 (greedy) cannot be trained on; use a value above 0"
            )
        return self


class StructuredConfig(_Section):
    """Form that responses must have; exactly one key."""

    json_schema: str | None = None
    """JSON schema, as text, that the response follows."""
    regex: str | None = None
    """Regular expression that the response matches."""
    choices: tuple[str, ...] = ()
    """Texts, one of which the response is."""

    @model_validator(mode="after")
    def _one_form(self) -> StructuredConfig:
        if sum(map(bool, (self.json_schema, self.regex, self.choices))) != 1:
            raise ValueError("structured: set exactly one of json_schema, regex, choices")
        return self


class AgentConfig(_Section):
    """A role in the workflow."""

    policy: str
    """Policy that serves it."""
    prompt: str | None = None
    """Template whose {placeholders} the call's keyword arguments fill; unset with messages."""
    system: str | None = None
    """System message of chat calls."""
    chat: bool = False
    """Wrap the prompt as a user message in the model's chat template."""
    chat_options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further variables of the chat template, such as `enable_thinking`."""
    merge_turns: bool = False
    """Train calls whose prompts continue one another as one row; see docs/workflow.md."""
    max_tokens: Annotated[int, Field(ge=1)] = 256
    """Most tokens to draw per call."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, beyond the model's own end token."""
    stop: tuple[str, ...] = ()
    """Texts that end a response; needs engine "vllm" or "external"."""
    structured: StructuredConfig | None = None
    """Form that responses must have; needs engine "vllm" or "external"."""
    ignore_eos: bool = False
    """Do not stop at the model's end token."""
    timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Deadline of one call, attempts included."""
    max_attempts: Annotated[int, Field(ge=1)] = 3
    """Most attempts for failures of the request."""
    infra_attempts: Annotated[int, Field(ge=1)] = 20
    """Most attempts for failures of the infrastructure."""


class BalanceSection(_Section):
    """Moving inference instances between policies."""

    rule: Literal["drain_time", "queue_gap", "off"] = "drain_time"
    """Move when the longest time to drain a queue, or the rest of a batch, falls by more than the
    move costs; when queues differ by more than `queue_gap`; or never."""
    interval_s: Annotated[float, Field(gt=0)] = 0.1
    """Time between two looks at the queues."""
    queue_gap: Annotated[int, Field(ge=0)] = 5
    """Waiting calls by which two queues must differ, for the rule of that name."""
    gain_margin: Annotated[float, Field(ge=0)] = 0.5
    """Share of its cost that a move must gain beyond its cost, for `drain_time`."""
    residence_s: Annotated[float, Field(ge=0)] = 2.0
    """A policy that received an instance gives none away for so long."""
    confirm: Annotated[int, Field(ge=1)] = 2
    """Looks in a row that must agree on a move."""
    forecast: bool = True
    """After a batch move instances to where the next one is expected to need them."""

    def decisions(self) -> BalanceConfig:
        """Returns the numbers of the rule."""
        return BalanceConfig(
            rule=self.rule,
            queue_gap=self.queue_gap,
            gain_margin=self.gain_margin,
            residence_s=self.residence_s,
            confirm=self.confirm,
        )


class RolloutSection(_Section):
    """How queries are worked on in parallel."""

    max_concurrent_queries: Annotated[int, Field(ge=1)] | None = None
    """Most groups in progress at once; unset means all, as far as the workers have room."""
    max_concurrent_samples_per_query: Annotated[int, Field(ge=1)] | None = None
    """Most samples of one group in progress at once; unset means all of them."""
    balance: BalanceSection = BalanceSection()
    """Moving inference instances between policies."""


class TrainerPoolConfig(_Section):
    """Devices for training."""

    slots: Annotated[int, Field(ge=1)] = 1
    """Device slots that `flexmarl train` gives its local trainer."""
    min_residence_s: Annotated[float, Field(ge=0)] = 0.0
    """A bound policy that still has rows keeps its slots at least this long."""
    ledger_every_s: Annotated[float, Field(gt=0)] = 30.0
    """Longest time that computed gradients stay unsaved."""
    prefetch_from_s: Annotated[float, Field(ge=0)] = 0.2
    """State of the policy that gets slots next is loaded ahead, beside what they compute now, where
    binding it takes this long: a hint costs its calls whatever it loads."""


class PipelineConfig(_Section):
    """How rollout and training share a step."""

    overlap: bool = True
    """Train groups as they close; false: when the whole batch is there."""
    allocation: Literal["on_demand", "static"] = "on_demand"
    """Slots go where work is, or each trained policy keeps slots of its own for the whole run."""
    colocated: bool = False
    """Rollout and training take turns on the same devices: nothing is bound while samples run, and
    training starts when the whole batch is there."""


class TrackersConfig(_Section):
    """Where a run's numbers go beside `metrics.jsonl`."""

    tensorboard: bool = False
    """Write TensorBoard's event files into the run's folder."""
    wandb: bool = False
    """Log to Weights & Biases."""
    wandb_project: str = "flexmarl"
    """Project there."""
    wandb_mode: Literal["offline", "online"] = "offline"
    """Keep its files in the run's folder, or send them to its server."""


class CheckpointConfig(_Section):
    """Versions written out as Hugging Face folders."""

    every: Annotated[int, Field(ge=0)] = 0
    """Write each version that it divides, and the last one; 0 writes none."""
    keep: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints that are kept, those of earlier starts included."""
    folder: Path = Path("checkpoints")
    """Where they are written, on the Orchestrator's node, below the run's id; relative to the
    config."""


class RunConfig(_Section):
    """A run."""

    name: str
    """Name, the start of the run's id."""
    seed: int = 0
    """Root of all random draws."""
    versions: Annotated[int, Field(ge=1)]
    """Batches to train: the team ends at this version."""
    durability: Literal["fsync", "process"] = "process"
    """What an acknowledged write survives: power loss, or the death of every process."""
    store_shards: tuple[str, ...] = ()
    """Further MEG Stores, host:port each: the run's groups are spread over them and the cluster's
    own store, which is the home shard. Which stores they are is fixed for the run's life; a resumed
    run may be told where they are now."""
    vertex_events: bool = False
    """Every finished call is an event that can be watched; its write costs about twice as much."""
    workflow: WorkflowConfig
    """User code."""
    dataset: DatasetConfig
    """Queries."""
    batch: BatchConfig
    """Batch."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Advantages."""
    policies: dict[str, PolicyConfig]
    """Policies by name."""
    agents: dict[str, AgentConfig]
    """Agents by name."""
    rollout: RolloutSection = RolloutSection()
    """Rollout."""
    trainer: TrainerPoolConfig = TrainerPoolConfig()
    """Training devices."""
    checkpoints: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    pipeline: PipelineConfig = PipelineConfig()
    """How rollout and training share a step."""
    trackers: TrackersConfig = TrackersConfig()
    """Trackers."""

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        return check_name(value, what="name")

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if not self.agents:
            raise ValueError("agents: declare at least one agent")
        for name in self.policies:
            check_name(name, what="policy")
        for name, agent in self.agents.items():
            check_name(name, what="agent")
            if agent.policy not in self.policies:
                known = ", ".join(sorted(self.policies)) or "none"
                raise ValueError(
                    f"agents.{name}.policy: no policy {agent.policy!r}; declared policies: {known}"
                )
            self._check_text_rules(name, agent)
            if agent.prompt is not None and not agent.chat and (agent.system or agent.chat_options):
                key = "system" if agent.system else "chat_options"
                raise ValueError(
                    f"agents.{name}.{key}: its prompt is plain text and goes through no chat "
                    "template; set chat = true, or write the text into the prompt"
                )
        unused = set(self.policies) - {agent.policy for agent in self.agents.values()}
        if unused:
            raise ValueError(f"policies.{min(unused)}: no agent uses it; remove or use it")
        for name, policy in self.policies.items():
            if policy.kind == "trained" and policy.trainer.world_size > self.trainer.slots:
                raise ValueError(
                    f"policies.{name}.trainer.world_size = {policy.trainer.world_size} exceeds "
                    f"trainer.slots = {self.trainer.slots}"
                )
            most = policy.trainer.max_world_size
            if most is not None and most < policy.trainer.world_size:
                raise ValueError(
                    f"policies.{name}.trainer.max_world_size = {most} is below "
                    f"world_size = {policy.trainer.world_size}"
                )
        self._check_static_slots()
        return self

    def _check_static_slots(self) -> None:
        if self.pipeline.allocation != "static":
            return
        sizes = [self.policies[name].trainer.world_size for name in self.trained_policies()]
        if sum(sizes) > self.trainer.slots:
            raise ValueError(
                f'pipeline.allocation = "static" gives each trained policy slots of its own: '
                f"{' + '.join(map(str, sizes))} = {sum(sizes)} needed, trainer.slots = "
                f'{self.trainer.slots}; add slots or use "on_demand"'
            )

    def _check_text_rules(self, name: str, agent: AgentConfig) -> None:
        """Rules about a response's text need an engine that knows it, and bend the distribution."""
        policy = self.policies[agent.policy]
        for key in ("stop", "structured"):
            if getattr(agent, key) and policy.rollout.engine not in ("vllm", "external"):
                raise ValueError(
                    f'agents.{name}.{key}: engine "{policy.rollout.engine}" knows tokens only; '
                    'use engine "vllm" or "external", or stop_token_ids'
                )
        if agent.structured and policy.kind == "trained" and not policy.sampling.allow_truncated:
            raise ValueError(
                f"agents.{name}.structured cuts the distribution of a trained policy, so ratios "
                "would be wrong; remove it or set sampling.allow_truncated = true"
            )

    def relative_to(self, folder: Path) -> RunConfig:
        """Returns the config with absolute paths; relative ones are taken from `folder`."""

        def absolute(path: Path) -> Path:
            return path if path.is_absolute() else (folder / path).resolve()

        return self.model_copy(
            update={
                "workflow": self.workflow.model_copy(
                    update={"package": absolute(self.workflow.package)}
                ),
                "dataset": self.dataset.model_copy(update={"path": absolute(self.dataset.path)}),
                "checkpoints": self.checkpoints.model_copy(
                    update={"folder": absolute(self.checkpoints.folder)}
                ),
                "evaluation": self.evaluation.model_copy(
                    update={"path": self.evaluation.path and absolute(self.evaluation.path)}
                ),
                "policies": {
                    name: policy.model_copy(
                        update={
                            "model": policy.model.model_copy(
                                update={"path": absolute(policy.model.path)}
                            )
                        }
                    )
                    for name, policy in self.policies.items()
                },
            }
        )

    def trained_policies(self) -> list[str]:
        """Returns the names of the trained policies, sorted."""
        return sorted(name for name, policy in self.policies.items() if policy.kind == "trained")

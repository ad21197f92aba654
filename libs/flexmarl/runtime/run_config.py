"""The configuration of a run: what a user writes in TOML, checked once, stored with the run.

Services read the resolved form from the MEG Store, so all of them see the same values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from flexmarl.core.ids import check_name
from flexmarl.runtime.algorithm_config import AdvantageConfig
from flexmarl.runtime.config_section import Section
from flexmarl.runtime.data_config import BatchConfig, DatasetConfig, EvaluationConfig
from flexmarl.runtime.pipeline_config import PipelineConfig, RolloutSection, TrainerPoolConfig
from flexmarl.runtime.policy_config import PolicyConfig
from flexmarl.runtime.team_config import AgentConfig, WorkflowConfig


class TrackersConfig(Section):
    """Where a run's numbers go beside `metrics.jsonl`."""

    tensorboard: bool = False
    """Write TensorBoard's event files into the run's folder."""
    wandb: bool = False
    """Log to Weights & Biases."""
    wandb_project: str = "flexmarl"
    """Project there."""
    wandb_mode: Literal["offline", "online"] = "offline"
    """Keep its files in the run's folder, or send them to its server."""


class CheckpointConfig(Section):
    """Versions written out as Hugging Face folders."""

    every: Annotated[int, Field(ge=0)] = 0
    """Write each version that it divides, and the last one; 0 writes none."""
    keep: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints that are kept, those of earlier starts included."""
    folder: Path = Path("checkpoints")
    """Where they are written, on the Orchestrator's node, below the run's id; relative to the
    config."""


class RunConfig(Section):
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
        if agent.structured and agent.ignore_eos:
            raise ValueError(
                f"agents.{name}.ignore_eos: a response that has its form ends with the model's end "
                "token, or goes on without any form; remove it, or structured"
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

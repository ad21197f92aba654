"""From a run's stored configuration to what the core decides with."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from flexmarl.core.batch_rules import BatchRules
from flexmarl.core.closure import ClosureRules
from flexmarl.core.config_changes import config_changes
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.evaluation import EvaluationRules
from flexmarl.core.policy_training import PolicyRules
from flexmarl.core.run import RunRules
from flexmarl.core.training import TrainingRules
from flexmarl.runtime.run_config import RunConfig


def parse_config(config_json: bytes) -> RunConfig:
    """The run's configuration, as it was stored with it.

    Raises:
        DomainError: INVALID_ARGUMENT: another version of this software wrote it.
    """
    try:
        return RunConfig.model_validate_json(config_json)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise DomainError(
            ErrorReason.INVALID_ARGUMENT,
            f"the run's stored configuration: {key}: {problem['msg']}",
            {"key": key},
        ) from None


def check_changes(stored_json: bytes, new_json: bytes) -> None:
    """Whether a run may go on with another configuration.

    Raises:
        DomainError: INVALID_ARGUMENT: the first setting that may not change, and why.
    """
    stored, new = (parse_config(text).model_dump(mode="json") for text in (stored_json, new_json))
    for change in config_changes(stored, new):
        if change.refused:
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT,
                f"resume with {change}: {change.refused}; leave it, or train a new run",
                {"key": change.key},
            )


def rules_of(config: RunConfig, *, trainers: Sequence[str], num_held_out: int = 0) -> RunRules:
    """What the core needs of a configuration."""
    batch = config.batch
    return RunRules(
        num_versions=config.versions,
        batch=BatchRules(
            num_groups=batch.groups,
            samples_per_group=batch.samples_per_group,
            closure=ClosureRules(
                on_sample_failure=batch.on_sample_failure,
                refill_max=batch.refill_max,
                replace_max=batch.replace_max,
                on_replace_exhausted=batch.on_replace_exhausted,
                filter_zero_variance=batch.filter_zero_variance,
                redundant_samples=batch.redundant_samples,
            ),
            advantage=config.advantage.rule(),
        ),
        training=TrainingRules(
            policies={
                name: PolicyRules(
                    trained=policy.kind == "trained",
                    world_size=policy.trainer.world_size,
                    max_world_size=policy.trainer.max_world_size or policy.trainer.world_size,
                    micro_batch_rows=policy.trainer.micro_batch_rows,
                    micro_batch_tokens=policy.trainer.micro_batch_tokens,
                )
                for name, policy in config.policies.items()
            },
            min_residence_s=config.trainer.min_residence_s,
            ledger_every_s=config.trainer.ledger_every_s,
            prefetch_from_s=config.trainer.prefetch_from_s,
            overlaps=config.pipeline.overlap and not config.pipeline.colocated,
            static=config.pipeline.allocation == "static",
            colocated=config.pipeline.colocated,
        ),
        trainers=tuple(trainers),
        evaluation=EvaluationRules(
            every=config.evaluation.every if num_held_out else 0,
            num_queries=num_held_out,
            greedy=config.evaluation.greedy,
            num_sampled=config.evaluation.samples,
        ),
    )

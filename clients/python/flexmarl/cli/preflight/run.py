"""All checks of a run's configuration, cheap ones first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from flexmarl.cli.errors import CliError
from flexmarl.cli.preflight.capacity import check_capacity
from flexmarl.cli.preflight.dataset import check_dataset
from flexmarl.cli.preflight.models import check_models
from flexmarl.cli.preflight.prompts import check_prompts
from flexmarl.cli.preflight.workflow import check_workflow
from flexmarl.cli.progress.trackers import check_trackers
from flexmarl.runtime.config import load_config
from flexmarl.runtime.run_config import RunConfig

_CALLS_PER_SAMPLE: Final = 4
"""Of one agent; more calls than that are rare, so a batch that needs them is told of."""


def load_run_config(path: Path, overrides: Sequence[str]) -> RunConfig:
    """Reads a run's configuration; relative paths in it are taken from its folder.

    Raises:
        CliError: It cannot be read.
        ConfigError: It is wrong; one line that names the key.
    """
    if not path.is_file():
        raise CliError(f"no file {path}")
    config = load_config(RunConfig, path=path, overrides=overrides)
    return config.relative_to(path.resolve().parent)


def notes_of(config: RunConfig) -> list[str]:
    """Returns what a user should know of a run that is right as it is.

    What rules out that training overlaps with rollout is said where that is wanted.
    """
    if not config.pipeline.overlap or config.pipeline.colocated:
        return []
    advantage = config.advantage
    if advantage.rule().release_scope == "batch":
        return [
            f'advantage.estimator = "{advantage.estimator}" compares whole batches: nothing is '
            "trained while a batch still rolls out"
        ]
    return [note for name in config.trained_policies() for note in _micro_batch_notes(config, name)]


def _micro_batch_notes(config: RunConfig, policy: str) -> Iterator[str]:
    """Says of a policy whose micro-batches may never be full that it is trained at the end.

    How often a workflow calls an agent is not known before it runs: a few times is counted on.
    """
    batch, trainer = config.batch, config.policies[policy].trainer
    num_agents = sum(agent.policy == policy for agent in config.agents.values())
    num_rows = batch.groups * batch.samples_per_group * num_agents * _CALLS_PER_SAMPLE
    if trainer.micro_batch_rows > num_rows and trainer.micro_batch_tokens is None:
        factors = (
            f"{batch.groups} groups x {batch.samples_per_group} samples x {num_agents} agents x "
            f"{_CALLS_PER_SAMPLE} calls"
        )
        yield (
            f"policies.{policy}.trainer.micro_batch_rows = {trainer.micro_batch_rows} is more than "
            f"a batch is likely to give ({factors} = {num_rows} rows): then nothing of it is "
            "trained while the batch still rolls out"
        )


def check_run(config: RunConfig, *, max_engines: int = 0) -> None:
    """Looks at everything that a run needs from the outside.

    Raises:
        CliError: The first thing that is wrong.
    """
    check_prompts(config)
    check_capacity(config, max_engines=max_engines)
    check_models(config)
    check_dataset(config)
    check_trackers(config)
    check_workflow(config)

"""The user's workflow, reward and tools, imported from the run's unpacked package."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.rollout.prompting import Agent, build_agents
from flexmarl.rollout.worker.calls import CallForms
from flexmarl.rollout.worker.failures import user_place
from flexmarl.rollout.worker.long_prompts import LongPrompts
from flexmarl.runtime.run_config import RunConfig


@dataclass(frozen=True, slots=True)
class RewardCode:
    """What of the user's a reward process needs.

    Attributes:
        config: The run's config.
        folder: The unpacked package.
        reward: The reward function.
        estimator: The advantage estimator; None when it is none of the user's.
    """

    config: RunConfig
    folder: Path
    reward: Callable[..., Any]
    estimator: Callable[..., Any] | None


@dataclass(frozen=True, slots=True)
class UserCode:
    """Everything of the user's that a sample needs.

    Attributes:
        config: The run's config.
        folder: The unpacked package.
        workflow: The workflow function.
        reward: The reward function.
        tools: Tools by name.
        agents: Agents by name.
        forms: What their calls have in common.
        long_prompts: Makes tokens of their long prompts.
    """

    config: RunConfig
    folder: Path
    workflow: Callable[..., Any]
    reward: Callable[..., Any]
    tools: Mapping[str, Callable[..., Any]]
    agents: Mapping[str, Agent]
    forms: CallForms
    long_prompts: LongPrompts


def load(*, config_json: bytes, workflow_path: str, model_paths: Mapping[str, str]) -> UserCode:
    """Imports the user's functions and prepares the agents.

    Raises:
        DomainError: WORKFLOW_IMPORT_FAILED naming the module and the cause, MODEL_INVALID,
            INVALID_ARGUMENT.
    """
    config = RunConfig.model_validate_json(config_json)
    folder = _importable(workflow_path)
    section = config.workflow
    workflow = _function(section.entry, key="workflow.entry", folder=folder)
    if not inspect.iscoroutinefunction(workflow):
        raise _refused("workflow.entry", section.entry, "must be an async function of (ctx, query)")
    return UserCode(
        config=config,
        folder=folder,
        workflow=workflow,
        reward=_reward(config, folder),
        tools={
            name: _function(entry, key=f"workflow.tools.{name}", folder=folder)
            for name, entry in section.tools.items()
        },
        agents=build_agents(config, model_paths),
        forms=CallForms(),
        long_prompts=LongPrompts(),
    )


def load_reward(*, config_json: bytes, workflow_path: str) -> RewardCode:
    """Imports the user's reward function, and the advantage estimator if it is the user's.

    Raises:
        DomainError: WORKFLOW_IMPORT_FAILED naming the module and the cause.
    """
    config = RunConfig.model_validate_json(config_json)
    folder = _importable(workflow_path)
    estimator = None
    if config.advantage.rule().is_own:
        name = config.advantage.estimator
        estimator = _function(name, key="advantage.estimator", folder=folder)
    return RewardCode(
        config=config, folder=folder, reward=_reward(config, folder), estimator=estimator
    )


def _reward(config: RunConfig, folder: Path) -> Callable[..., Any]:
    section = config.workflow
    function = _function(section.reward, key="workflow.reward", folder=folder)
    try:
        inspect.signature(function).bind(None, **section.reward_args)
    except TypeError as error:
        problem = f"does not go with workflow.reward_args: {error}"
        raise _refused("workflow.reward", section.reward, problem) from None
    except ValueError:
        pass  # written in C without a signature: the first sample will tell
    # `partial` of an async function is still one to `iscoroutinefunction`.
    return partial(function, **section.reward_args) if section.reward_args else function


def _importable(workflow_path: str) -> Path:
    """Puts the unpacked package on the import path."""
    folder = Path(workflow_path)
    sys.dont_write_bytecode = True  # the unpacked package is shared and stays as it is
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return folder


def _function(entry: str, *, key: str, folder: Path) -> Callable[..., Any]:
    module_name, colon, attribute = entry.partition(":")
    if not colon or not module_name or not attribute:
        raise _refused(key, entry, 'must be written "module:function"')
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit too
        place = user_place(error, folder)
        where = f" ({place})" if place else ""
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise _refused(
            key, entry, f"module {module_name!r} cannot be imported: {cause}{where}"
        ) from None
    function = module
    for name in attribute.split("."):
        function = getattr(function, name, None)  # type: ignore[assignment]
    if not callable(function):
        raise _refused(key, entry, f"module {module_name!r} has no function {attribute!r}")
    return function


def _refused(key: str, entry: str, problem: str) -> DomainError:
    return DomainError(
        ErrorReason.WORKFLOW_IMPORT_FAILED,
        f"{key} = {entry!r}: {problem}",
        {"key": key, "entry": entry},
    )

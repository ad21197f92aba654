"""The team of a run: the user's code and the agents that it calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, field_validator, model_validator

from flexmarl.core.ids import check_name
from flexmarl.runtime.config_section import MOST, Count, Section

_GIVEN: Final = frozenset(("messages", "tools", "add_generation_prompt"))
"""Variables of a chat template that a call sets."""


class WorkflowConfig(Section):
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

    @field_validator("tools")
    @classmethod
    def _tools(cls, tools: dict[str, str]) -> dict[str, str]:
        for name in tools:
            check_name(name, what="tool")
        return tools

    @field_validator("reward_args")
    @classmethod
    def _reward_args(cls, args: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(args, allow_nan=False, default=str)
        except ValueError as error:
            raise ValueError(f"reward_args: a number that JSON has not: {error}") from None
        return args


class StructuredConfig(Section):
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
        if self.json_schema is not None and not isinstance(_json(self.json_schema), (dict, bool)):
            raise ValueError("structured.json_schema: a schema is an object or a boolean")
        return self


class AgentConfig(Section):
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
    """Further variables of the chat template, such as `enable_thinking`, or `date_string` where it
    writes a date: it is given no clock (`strftime_now`), and prompts are the same on every day."""
    merge_turns: bool = False
    """Train calls whose prompts continue one another as one row; see docs/workflow.md."""
    max_tokens: Count = 256
    """Most tokens to draw per call."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0, le=MOST)], ...] = ()
    """Tokens that end a response, beyond the model's own end token."""
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=4)] = ()
    """Texts that end a response, at most 4; needs engine "vllm" or "external"."""
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

    @field_validator("chat_options")
    @classmethod
    def _chat_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(_GIVEN & options.keys())
        if taken:
            raise ValueError(f"chat_options.{taken[0]}: every call sets it; remove it")
        return options


def _json(text: str) -> Any:  # noqa: ANN401 - of any type
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"structured.json_schema is not JSON: {error}") from None

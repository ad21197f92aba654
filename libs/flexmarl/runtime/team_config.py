"""The team of a run: the user's code and the agents that it calls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from flexmarl.runtime.config_section import Section


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

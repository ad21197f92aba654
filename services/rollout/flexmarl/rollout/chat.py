"""A model's chat template, rendered as Hugging Face renders it, in a sandbox.

The template comes from a foreign file: it runs in jinja2's immutable sandbox, and it is given no
clock, so that the same messages make the same prompt on every day (replay compares its hash).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from flexmarl.core.errors import DomainError, ErrorReason

_NO_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType({})


class ChatTemplate:
    """The chat template of a model folder, if it has one."""

    def __init__(self, folder: Path, tokenizer_config: Mapping[str, Any]) -> None:
        self._folder = folder
        self._special = {
            name: text
            for name, value in tokenizer_config.items()
            if name.endswith("_token") and (text := _token_text(value)) is not None
        }
        self._source = _find_source(folder, tokenizer_config)
        self._template: jinja2.Template | None = None

    @property
    def available(self) -> bool:
        """Whether the folder has a template."""
        return self._source is not None

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        agent: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] = _NO_OPTIONS,
    ) -> str:
        """Text of a conversation that the model is to continue.

        Args:
            messages: The conversation.
            agent: For messages.
            tools: JSON schemas of the tools that the model is offered.
            options: Further variables of the template, such as `enable_thinking`.

        Raises:
            DomainError: MODEL_INVALID, there is no template or it is broken; INVALID_ARGUMENT, it
                refuses the messages.
        """
        if self._source is None:
            raise DomainError(
                ErrorReason.MODEL_INVALID,
                f"agent {agent!r}: the model folder {self._folder} has no chat template",
                {"agent": agent, "path": str(self._folder)},
            )
        try:
            if self._template is None:
                self._template = _environment().from_string(self._source)
            offered = None if tools is None else list(tools)
            values = {**self._special, **options, "messages": messages, "tools": offered}
            return self._template.render(add_generation_prompt=True, **values)
        except jinja2.TemplateSyntaxError as error:
            raise DomainError(
                ErrorReason.MODEL_INVALID,
                f"agent {agent!r}: chat template of {self._folder}: {error}",
                {"agent": agent},
            ) from None
        except (jinja2.TemplateError, TypeError) as error:
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT,
                f"agent {agent!r}: the chat template refuses the messages: {error}",
                {"agent": agent},
            ) from None


def _environment() -> jinja2.Environment:
    # The settings of transformers' own renderer, or prompts would differ by white space.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:  # noqa: ANN401
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _find_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _token_text(value: Any) -> str | None:  # noqa: ANN401 - as the model's author wrote it
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None

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
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from flexmarl.core.errors import DomainError, ErrorReason

_DEFAULT: Final = "default"
_TOOL_USE: Final = "tool_use"
"""Of several templates, the one for calls that offer tools."""

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
        self._sources = _find_sources(folder, tokenizer_config)
        self._templates: dict[str, jinja2.Template] = {}

    @property
    def available(self) -> bool:
        """Whether the folder has a template."""
        return bool(self._sources)

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
        name = _DEFAULT if tools is None or _TOOL_USE not in self._sources else _TOOL_USE
        if name not in self._sources:
            raise DomainError(
                ErrorReason.MODEL_INVALID,
                f"agent {agent!r}: the model folder {self._folder} has no chat template",
                {"agent": agent, "path": str(self._folder)},
            )
        given = {
            "messages": messages,
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": True,
        }
        try:
            template = self._templates.get(name)
            if template is None:
                template = _environment().from_string(self._sources[name])
                self._templates[name] = template
            return template.render({**self._special, **options, **given})
        except jinja2.TemplateSyntaxError as error:
            raise DomainError(
                ErrorReason.MODEL_INVALID,
                f"agent {agent!r}: chat template of {self._folder}: {error}",
                {"agent": agent},
            ) from None
        except Exception as error:  # noqa: BLE001 - its author's code: it may index, divide, recurse
            what = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT,
                f"agent {agent!r}: the chat template refuses the messages: {what}{error}",
                {"agent": agent},
            ) from None


class _Generation(Extension):
    """`{% generation %}` marks what a model said, for others' masks; the text is what is in it."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> jinja2.Environment:
    # The settings of transformers' own renderer, or prompts would differ by white space.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(
    value: Any,  # noqa: ANN401
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _find_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a folder, by name.

    Raises:
        DomainError: MODEL_INVALID.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            found: Any = path.read_text(encoding="utf-8")
        except ValueError as error:
            raise DomainError(ErrorReason.MODEL_INVALID, f"{path}: {error}") from None
    else:
        found = config.get("chat_template")
    if isinstance(found, str):
        return {_DEFAULT: found}
    if not isinstance(found, list):
        return {}
    entries = [entry for entry in found if isinstance(entry, dict)]
    named = {entry.get("name"): entry.get("template") for entry in entries}
    sources = {name: named[name] for name in (_DEFAULT, _TOOL_USE) if name in named}
    return {name: source for name, source in sources.items() if isinstance(source, str)}


def _token_text(value: Any) -> str | None:  # noqa: ANN401 - as the model's author wrote it
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None

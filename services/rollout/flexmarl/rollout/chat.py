"""A model's chat template, rendered as Hugging Face renders it, in a sandbox.

The template comes from a foreign file: it runs in jinja2's immutable sandbox, and it is given no
clock (transformers' `strftime_now`): the same messages make the same prompt on every day, in a
replay (which compares its hash) and in another run of the same config. Templates that ask whether
there is one write a date of their own; `chat_options` set another, under the name that they take.
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


_TEXT: Final = "Hello."
_SIMPLEST: Final[Sequence[Sequence[Mapping[str, Any]]]] = tuple(
    ({"role": "user", "content": content},)
    for content in (_TEXT, [{"type": "text", "text": _TEXT}])
)
"""What a call may say, by who takes texts and who takes parts."""


class _RefusedError(jinja2.TemplateError):
    """A template's own word that it does not take the messages."""


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
        try:
            return self._fill(name, messages, tools=tools, options=options)
        except jinja2.TemplateSyntaxError as error:
            raise DomainError(
                ErrorReason.MODEL_INVALID,
                f"agent {agent!r}: chat template of {self._folder}: {error}",
                {"agent": agent},
            ) from None
        except Exception as error:  # noqa: BLE001 - its author's code: it may index, divide, recurse
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT,
                f"agent {agent!r}: the chat template refuses the messages: {_what(error)}",
                {"agent": agent},
            ) from None

    def fault(
        self, messages: list[dict[str, Any]] | None, *, options: Mapping[str, Any]
    ) -> str | None:
        """Why no call can be rendered, in words; None when some can.

        Args:
            messages: What a call says; None when that is not known. Then a template that refuses by
                its own words is not broken (it may want a role or parts that nobody can guess),
                only one in which something goes wrong whatever is said.
            options: Further variables of the template.
        """
        try:
            for name in self._sources:
                self._compiled(name)
        except Exception as error:  # noqa: BLE001 - its author's code
            return f"does not compile: {_what(error)}"
        if _DEFAULT not in self._sources:
            return None  # calls must offer tools; which ones is not known here
        first: Exception | None = None
        for talk in _SIMPLEST if messages is None else (messages,):
            try:
                self._fill(_DEFAULT, talk, tools=None, options=options)
            except Exception as error:  # noqa: BLE001 - its author's code
                if messages is None and isinstance(error, _RefusedError):
                    return None
                first = first or error
            else:
                return None
        assert first is not None, "there is at least one talk"
        return f"refuses even the simplest messages: {_what(first)}"

    def _fill(
        self,
        name: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        given = {
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": True,
        }
        return self._compiled(name).render({**self._special, **options, **given})

    def _compiled(self, name: str) -> jinja2.Template:
        template = self._templates.get(name)
        if template is None:
            template = self._templates[name] = _environment().from_string(self._sources[name])
        return template


def _what(error: Exception) -> str:
    """What a template raised: its own words, or what went wrong in it."""
    what = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
    return f"{what}{error}"


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
    raise _RefusedError(message)


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

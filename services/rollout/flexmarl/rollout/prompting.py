"""Prompts: templates and chat messages to tokens, tokens to text. No torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, Final, NamedTuple

from flexmarl.api.meg_store.v1.graph_pb2 import VertexPayload
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.row_limits import MAX_PROMPT_BYTES, may_exceed, too_large
from flexmarl.rollout.chat import ChatTemplate
from flexmarl.rollout.tokenizer_file import read_tokenizer
from flexmarl.rollout.turns import Conversation, SampledTurn, conversation
from flexmarl.rollout.workflow import Output
from flexmarl.runtime.run_config import RunConfig
from flexmarl.runtime.team_config import AgentConfig

LONG_CHARS: Final = 32_768
"""Prompts from this length on take more than about 10 ms to become tokens: too long to hold others
for (90 ms at 200,000 characters, measured with two tokenizers)."""

_MAX_CONTEXT_KEYS: Final = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length")


class Template:
    """A prompt with {placeholders}: plain names only, so that no template reaches into objects."""

    def __init__(self, text: str, *, agent: str) -> None:
        self._agent = agent
        self._parts: list[tuple[str, str | None]] = []
        try:
            parsed = list(Formatter().parse(text))
        except ValueError as error:
            raise _invalid(agent, f"prompt: {error}") from None
        for literal, name, spec, conversion in parsed:
            if name is not None and (not name.isidentifier() or spec or conversion):
                field = (
                    name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
                )
                raise _invalid(
                    agent,
                    f"prompt: {{{field}}} is not a plain name; write {{{{ and }}}} for braces",
                )
            self._parts.append((literal, name))
        self.names = frozenset(name for _, name in self._parts if name is not None)

    def render(self, args: Mapping[str, Any]) -> str:
        """Fills the placeholders.

        Raises:
            TypeError: An argument is missing, or no placeholder takes it.
        """
        if args.keys() != self.names:
            self._refuse(args)
        return "".join(
            literal if name is None else f"{literal}{args[name]}" for literal, name in self._parts
        )

    def _refuse(self, args: Mapping[str, Any]) -> None:
        missing = sorted(self.names - args.keys())
        unknown = sorted(args.keys() - self.names)
        problems = [f"{{{name}}} is missing" for name in missing]
        problems += [f"no placeholder takes {name!r}" for name in unknown]
        raise TypeError(f"agent {self._agent!r}: the prompt does not fit: {'; '.join(problems)}")


class ModelText:
    """Tokenizer, chat template and limits of one model folder.

    Attributes:
        folder: The folder.
        max_context: Longest prompt plus response; None when the folder does not say.
        eos_token_ids: Tokens that end a response.
    """

    def __init__(self, folder: Path, *, policy: str) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise DomainError(
                ErrorReason.MODEL_INVALID,
                f"policies.{policy}.model: {folder} has no tokenizer.json",
                {"policy": policy, "path": str(folder)},
            )
        try:
            self._tokenizer = read_tokenizer(path)
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            raise DomainError(
                ErrorReason.MODEL_INVALID,
                f"policies.{policy}.model: {path} cannot be read: {error}",
                {"policy": policy, "path": str(path)},
            ) from None
        self.folder = folder
        config = _read_json(folder / "config.json")
        generation = _read_json(folder / "generation_config.json")
        self.chat = ChatTemplate(folder, _read_json(folder / "tokenizer_config.json"))
        eos = generation.get("eos_token_id", config.get("eos_token_id"))
        self.eos_token_ids: tuple[int, ...] = _as_ids(eos)
        limits = [config[key] for key in _MAX_CONTEXT_KEYS if isinstance(config.get(key), int)]
        self.max_context: int | None = limits[0] if limits else None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; lone surrogates, which no tokenizer takes, become U+FFFD."""
        try:
            return self._encode(text, add_special_tokens)
        except (UnicodeEncodeError, TypeError):
            clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return self._encode(clean, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int]
        if len(text) < LONG_CHARS:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        else:  # of the library's ways the one that lets other threads run
            batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids = batch[0].ids
        return ids

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens, special ones left out."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


class Prompt(NamedTuple):
    """A call's prompt as text. Its tokens may be made in a thread: nothing of the user's is in it.

    Attributes:
        agent: Who is asked.
        said: The text, with the turns of the agent's model in it.
        is_chat: Whether a chat template has filled it; it has its special tokens then.
    """

    agent: Agent
    said: Conversation
    is_chat: bool

    @property
    def is_long(self) -> bool:
        """Whether making its tokens takes so long that it is not done beside others."""
        return len(self.said.text) >= LONG_CHARS

    def tokens(self) -> list[int]:
        """Its token ids.

        Raises:
            DomainError: PROMPT_TOO_LONG; INVALID_ARGUMENT, there are none; ROW_TOO_LARGE.
        """
        agent = self.agent
        if self.is_chat:
            tokens = self.said.tokens(codec=agent.model, end_tokens=agent.stop_token_ids)
        else:
            tokens = agent.model.encode(self.said.text, add_special_tokens=True)
        agent.check_length(len(tokens))
        check_prompt_fits(tokens, what=f"agent {agent.name!r}")
        return tokens


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent of the run, ready to render prompts.

    Attributes:
        name: Name.
        config: Its section of the run's config.
        model: Text side of its policy's model.
        template: Its prompt; None when it takes messages only.
        temperature: Sampling temperature of its policy.
        top_p: Nucleus of its policy.
        top_k: Top-k of its policy.
        min_p: Least share of the likeliest token, of its policy.
        stop_token_ids: Tokens that end its response.
        max_context: Longest prompt plus response of its policy; None when not known.
    """

    name: str
    config: AgentConfig
    model: ModelText
    template: Template | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop_token_ids: tuple[int, ...]
    max_context: int | None

    def prompt(
        self,
        args: Mapping[str, Any],
        messages: Iterable[Mapping[str, Any]] | None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        is_own: Callable[[Output], bool] = lambda _: False,
    ) -> Prompt:
        """The prompt of a call.

        Args:
            args: Values of the template's placeholders.
            messages: The conversation, instead.
            tools: JSON schemas of tools, for the chat template.
            is_own: Whether an output was sampled by this agent's model.

        Raises:
            TypeError: The arguments do not fit the template.
            DomainError: MODEL_INVALID, the model has no chat template; INVALID_ARGUMENT, it refuses
                the messages.
        """
        if messages is not None:
            if args:
                raise TypeError(
                    f"agent {self.name!r}: pass messages or the template's arguments, not both "
                    f"({', '.join(sorted(args))})"
                )
            return self._chat([dict(message) for message in messages], tools, is_own)
        if self.template is None:
            raise TypeError(f"agent {self.name!r} has no prompt in the config: pass messages=[...]")
        if self.config.chat:
            message = {"role": "user", "content": self.template.render(args)}
            return self._chat([message], tools, is_own)
        if tools is not None:
            raise TypeError(f"agent {self.name!r}: tools= need chat messages, or chat = true")
        return Prompt(self, Conversation(self.template.render(args)), is_chat=False)

    def _chat(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        is_own: Callable[[Output], bool],
    ) -> Prompt:
        if self.config.system is not None and (not messages or messages[0].get("role") != "system"):
            messages.insert(0, {"role": "system", "content": self.config.system})
        turns: list[SampledTurn] = []
        for place, message in enumerate(messages):
            content = message.get("content")
            if isinstance(content, (str, list, dict)) or content is None:
                continue
            message["content"] = text = str(content)
            sampled = isinstance(content, Output) and message.get("role") == "assistant"
            if sampled and content.tokens and is_own(content):
                turns.append(SampledTurn(place, text, content.tokens))
        said = conversation(
            messages,
            turns,
            render=lambda said: self.model.chat.render(
                said, agent=self.name, tools=tools, options=self.config.chat_options
            ),
        )
        return Prompt(self, said, is_chat=True)

    def check_length(self, num_tokens: int) -> None:
        """Refuses a prompt that its policy's context does not hold.

        Raises:
            DomainError: PROMPT_TOO_LONG; INVALID_ARGUMENT, there are no tokens.
        """
        limit, wanted = self.max_context, self.config.max_tokens
        if num_tokens == 0:
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT,
                f"agent {self.name!r}: the prompt has no tokens",
                {"agent": self.name},
            )
        if limit is not None and num_tokens + wanted > limit:
            raise DomainError(
                ErrorReason.PROMPT_TOO_LONG,
                f"agent {self.name!r}: prompt of {num_tokens} tokens + max_tokens = {wanted} "
                f"exceed the context of {limit} tokens of policy {self.config.policy!r}",
                {
                    "agent": self.name,
                    "prompt_tokens": str(num_tokens),
                    "max_tokens": str(wanted),
                    "max_context": str(limit),
                },
            )


def check_prompt_fits(prompt: list[int], *, what: str) -> None:
    """Refuses a prompt that no row takes.

    Raises:
        DomainError: ROW_TOO_LARGE.
    """
    if not may_exceed(num_prompt_tokens=len(prompt)):
        return
    size_bytes = VertexPayload(prompt_tokens=prompt).ByteSize()
    if size_bytes > MAX_PROMPT_BYTES:
        raise too_large(
            f"{what}: its prompt of {len(prompt)} tokens",
            size_bytes=size_bytes,
            max_bytes=MAX_PROMPT_BYTES,
            remedy="shorten it",
        )


def build_agents(config: RunConfig, model_paths: Mapping[str, str]) -> dict[str, Agent]:
    """Agents of a run, by name.

    Args:
        config: The run's config.
        model_paths: Unpacked model folder of each policy.

    Raises:
        DomainError: MODEL_INVALID, INVALID_ARGUMENT; names the policy or agent.
    """
    by_folder: dict[str, ModelText] = {}
    agents: dict[str, Agent] = {}
    for name, agent in config.agents.items():
        policy = config.policies[agent.policy]
        folder = model_paths[agent.policy]
        if folder not in by_folder:
            by_folder[folder] = ModelText(Path(folder), policy=agent.policy)
        model = by_folder[folder]
        if agent.chat and not model.chat.available:
            raise DomainError(
                ErrorReason.MODEL_INVALID,
                f"agents.{name}.chat: the model of policy {agent.policy!r} ({folder}) has no chat "
                "template; set chat = false or use an instruction-tuned model",
                {"agent": name, "policy": agent.policy},
            )
        _check_chat(name, agent, model)
        eos = () if agent.ignore_eos else model.eos_token_ids
        limits = [n for n in (model.max_context, policy.rollout.max_context) if n is not None]
        agents[name] = Agent(
            name=name,
            config=agent,
            model=model,
            template=None if agent.prompt is None else Template(agent.prompt, agent=name),
            temperature=policy.sampling.temperature,
            top_p=policy.sampling.top_p,
            top_k=policy.sampling.top_k,
            min_p=policy.sampling.min_p,
            stop_token_ids=tuple(dict.fromkeys((*eos, *agent.stop_token_ids))),
            max_context=min(limits) if limits else None,
        )
    return agents


def _check_chat(name: str, agent: AgentConfig, model: ModelText) -> None:
    """Refuses an agent that needs its model's chat template, where no call could be rendered by it.

    An agent whose prompt is plain text may be called with messages, too; that is found out then.

    Raises:
        DomainError: MODEL_INVALID.
    """
    if not model.chat.available or (agent.prompt is not None and not agent.chat):
        return
    said: list[dict[str, Any]] | None = None
    if agent.prompt is not None:
        said = [{"role": "user", "content": "Hello."}]
        if agent.system is not None:
            said.insert(0, {"role": "system", "content": agent.system})
    fault = model.chat.fault(said, options=agent.chat_options)
    if fault is None:
        return
    raise DomainError(
        ErrorReason.MODEL_INVALID,
        f"policies.{agent.policy}.model: the chat template of {model.folder} {fault}; "
        f"agent {name!r} needs it",
        {"policy": agent.policy, "agent": name, "path": str(model.folder)},
    )


def _invalid(agent: str, problem: str) -> DomainError:
    return DomainError(ErrorReason.INVALID_ARGUMENT, f"agents.{agent}.{problem}", {"agent": agent})


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a model folder's file; nothing when there is no such file.

    Raises:
        DomainError: MODEL_INVALID, the file is there and is not a JSON object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DomainError(ErrorReason.MODEL_INVALID, f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise DomainError(ErrorReason.MODEL_INVALID, f"{path}: not a JSON object")
    return data


def _as_ids(value: Any) -> tuple[int, ...]:  # noqa: ANN401 - as the model's author wrote it
    if isinstance(value, int):
        return (value,)
    if isinstance(value, list):
        return tuple(item for item in value if isinstance(item, int))
    return ()

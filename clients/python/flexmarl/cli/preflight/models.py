"""Are the base models folders that engines and trainers can load?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from flexmarl.cli.errors import CliError
from flexmarl.runtime.policy_config import PolicyConfig
from flexmarl.runtime.run_config import RunConfig

_WEIGHTS: Final = ("*.safetensors", "pytorch_model*.bin")


def check_models(config: RunConfig) -> None:
    """Looks at the folder of every policy.

    Raises:
        CliError: A folder is missing, is no Hugging Face model folder, has no tokenizer or no
            weights, has tokens that its model does not know, leaves no room for an agent's
            response, or has no chat template for an agent that chats.
    """
    for name, policy in config.policies.items():
        _check_model(f"policies.{name}.model.path", policy)
    for name, agent in config.agents.items():
        policy = config.policies[agent.policy]
        limits = (policy.rollout.max_context, _context_of(policy.model.path))
        limit = min((n for n in limits if n is not None), default=None)
        if limit is not None and agent.max_tokens >= limit:
            raise CliError(
                f"agents.{name}.max_tokens = {agent.max_tokens} leaves no room for a prompt: "
                f"policy {agent.policy!r} takes {limit} tokens in all"
            )
        if agent.chat and not _has_chat_template(policy.model.path):
            raise CliError(
                f"agents.{name}.chat: the model of policy {agent.policy!r} ({policy.model.path}) "
                "has no chat template; set chat = false or use an instruction-tuned model"
            )


def _check_model(key: str, policy: PolicyConfig) -> None:
    folder = policy.model.path
    if not folder.is_dir():
        raise CliError(f"{key}: no folder {folder}")
    for file, what in (("config.json", "model"), ("tokenizer.json", "tokenizer")):
        if not (folder / file).is_file():
            raise CliError(
                f"{key}: {folder} has no {file}; give a Hugging Face folder with its {what}"
            )
    config = _config_of(folder, key)
    tokenizer = _read_json(folder / "tokenizer.json", key).get("model")
    if not isinstance(tokenizer, dict):
        raise CliError(f"{key}: {folder}/tokenizer.json has no model; give a fast tokenizer's file")
    # Tokens that were added by name may be beyond: some models have one for padding that is not
    # used. Those of ordinary text would fail the first prompt that they come in.
    num_tokens, vocab_size = _num_tokens(tokenizer), _vocab_size(config)
    if vocab_size is not None and num_tokens > vocab_size:
        raise CliError(
            f"{key}: {folder}/tokenizer.json has {num_tokens} tokens, and config.json a vocabulary "
            f"of {vocab_size}; give the tokenizer that the model was made with"
        )
    needs_weights = policy.model.init == "pretrained" and policy.rollout.engine != "external"
    if needs_weights and not any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        raise CliError(
            f"{key}: {folder} has no weights (*.safetensors); add them, or set "
            'model.init = "random" to start from drawn ones'
        )


def _num_tokens(tokenizer: dict[str, Any]) -> int:
    """One more than the largest token of ordinary text."""
    vocab = tokenizer.get("vocab")
    if isinstance(vocab, dict):
        return 1 + max((token for token in vocab.values() if isinstance(token, int)), default=-1)
    return len(vocab) if isinstance(vocab, list) else 0


def _vocab_size(config: dict[str, Any]) -> int | None:
    text = config.get("text_config")
    size = {**config, **(text if isinstance(text, dict) else {})}.get("vocab_size")
    return size if isinstance(size, int) else None


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    path = folder / "tokenizer_config.json"
    return path.is_file() and bool(_read_json(path, "model.path").get("chat_template"))


def _config_of(folder: Path, key: str) -> dict[str, Any]:
    path = folder / "config.json"
    config = _read_json(path, key)
    if not isinstance(config.get("model_type"), str):
        raise CliError(f"{key}: {path} names no model_type; give a Hugging Face config")
    return config


def _read_json(path: Path, key: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise CliError(f"{key}: {path}: not JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def _context_of(folder: Path) -> int | None:
    limit = _config_of(folder, "model.path").get("max_position_embeddings")
    return limit if isinstance(limit, int) else None

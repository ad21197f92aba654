"""Texts of stored tokens: the store keeps what the engine saw, and that is numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TokenTexts:
    """Decodes tokens of policies.

    Without the `tokenizers` package, or for a policy without a folder, tokens are shown as numbers.

    Args:
        models: Model folder of each policy.
    """

    def __init__(self, models: Mapping[str, Path]) -> None:
        self._models = models
        self._tokenizers: dict[str, Tokenizer | None] = {}

    def __call__(self, policy: str, tokens: Sequence[int]) -> str:
        """Text of tokens, special ones included."""
        if policy not in self._tokenizers:
            self._tokenizers[policy] = self._load(policy)
        tokenizer = self._tokenizers[policy]
        if tokenizer is None:
            return " ".join(str(token) for token in tokens)
        text: str = tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def _load(self, policy: str) -> Tokenizer | None:
        folder = self._models.get(policy)
        if folder is None or not (folder / "tokenizer.json").is_file():
            return None
        try:
            from tokenizers import Tokenizer

            return Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception:  # noqa: BLE001 - the library raises bare Exception for a bad file
            return None

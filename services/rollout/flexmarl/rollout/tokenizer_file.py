"""A model folder's tokenizer, as it makes tokens of whole texts."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer.json.

    The file may say that texts are cut at a length or filled up to one: what somebody's training
    left there. No prompt is, here as in transformers.

    Raises:
        Exception: It cannot be read; the library has no narrower type.
    """
    tokenizer: Tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer

"""Writes the quickstart's queries and its model folder; both are committed.

Usage: python examples/quickstart/make_files.py [FOLDER]
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

SYMBOLS = ("0", "1", "2", "3", ">", ".")
"""The vocabulary: four digits, the mark that ends a prompt, and the pad-and-end symbol."""

END_ID = SYMBOLS.index(".")

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(SYMBOLS),
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    # Short texts from six symbols: positions a few steps apart must look different.
    "rope_parameters": {"rope_type": "default", "rope_theta": 10.0},
    # Three times the usual: with 0.02 the policies hardly learn in 60 updates.
    "initializer_range": 0.06,
    "bos_token_id": None,
    "eos_token_id": END_ID,
    "pad_token_id": END_ID,
    "dtype": "float32",
}

TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    # The end symbol is an ordinary one: decoding shows it, and the workflow cuts there.
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {
        "type": "Split",
        "pattern": {"Regex": "."},
        "behavior": "Isolated",
        "invert": False,
    },
    "post_processor": None,
    "decoder": {"type": "Fuse"},
    "model": {
        "type": "WordLevel",
        "vocab": {symbol: index for index, symbol in enumerate(SYMBOLS)},
        "unk_token": ".",
    },
}

TOKENIZER_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": CONFIG["max_position_embeddings"],
    "clean_up_tokenization_spaces": False,
}


def queries() -> list[str]:
    """All sequences of two low and two high digits: 96 of them."""
    return [
        "".join(digits)
        for digits in itertools.product("0123", repeat=4)
        if sum(d in "01" for d in digits) == 2
    ]


def main() -> None:
    """Entry point."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    rows = "".join(json.dumps({"digits": digits}) + "\n" for digits in queries())
    (folder / "queries.jsonl").write_text(rows, encoding="utf-8")
    model = folder / "model"
    model.mkdir(exist_ok=True)
    for name, content in (
        ("config.json", CONFIG),
        ("tokenizer.json", TOKENIZER),
        ("tokenizer_config.json", TOKENIZER_CONFIG),
    ):
        (model / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

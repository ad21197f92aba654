"""A run's files that pass every check; tests break one thing each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CONFIG = """
name = "team"
versions = 2

[workflow]
package = "package"
entry = "flow:team"
reward = "flow:reward"

[dataset]
path = "queries.jsonl"
columns = ["digits"]

[batch]
groups = 2
samples_per_group = 2

[agents.solver]
policy = "solver"
prompt = "{digits}>"
max_tokens = 4

[policies.solver]
model = { path = "model", init = "random" }
"""

FLOW = """
async def team(ctx, query):
    return await ctx.call("solver", digits=query["digits"])


def reward(sample):
    return 1.0
"""

TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": {"type": "Fuse"},
    "model": {"type": "WordLevel", "vocab": {"0": 0, "1": 1, ">": 2}, "unk_token": ">"},
}


class RunFiles:
    """The folder of a run that is fine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "config.toml"
        self.flow = folder / "package" / "flow.py"
        self.dataset = folder / "queries.jsonl"
        self.model = folder / "model"
        self.flow.parent.mkdir(parents=True)
        self.model.mkdir()
        self.config.write_text(CONFIG)
        self.flow.write_text(FLOW)
        self.dataset.write_text("".join(json.dumps({"digits": str(n)}) + "\n" for n in range(4)))
        (self.model / "config.json").write_text(
            json.dumps({"model_type": "llama", "max_position_embeddings": 64})
        )
        (self.model / "tokenizer.json").write_text(json.dumps(TOKENIZER))

    def edit(self, old: str, new: str) -> None:
        """Change the config's text."""
        text = self.config.read_text()
        assert old in text
        self.config.write_text(text.replace(old, new))


@pytest.fixture
def run_files(tmp_path: Path) -> RunFiles:
    return RunFiles(tmp_path / "run")

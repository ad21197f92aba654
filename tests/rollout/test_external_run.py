"""A run whose critic is a server that runs already: asked by token ids, never updated."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rollout.engines.completion_server import CompletionServer

FLEXMARL = str(Path(sys.executable).with_name("flexmarl"))
QUICKSTART = Path(__file__).parents[2] / "examples/quickstart"

TEAM = """
async def team(ctx, query):
    answer = await ctx.call("writer", digits=query["digits"])
    opinion = await ctx.call("critic", digits=query["digits"], after=answer)
    return len(answer.tokens) + len(opinion.tokens)

def reward(sample):
    return float(sum(sample.calls[0].tokens) % 7)
"""
CONFIG = """
name = "external"
versions = 2
workflow = {{ package = "{folder}/team", entry = "team:team", reward = "team:reward" }}
dataset = {{ path = "{quickstart}/queries.jsonl" }}
batch = {{ groups = 4, samples_per_group = 4 }}
advantage = {{ scope = "group" }}
agents.writer = {{ policy = "writer", prompt = "{{digits}}>", max_tokens = 4 }}
agents.critic = {{ policy = "critic", prompt = "{{digits}}", max_tokens = 3 }}
policies.writer = {{ model = {{ path = "{quickstart}/model", init = "random" }} }}

[policies.critic]
kind = "frozen"
model = {{ path = "{folder}/tokens" }}
rollout = {{ engine = "external", external = {{ url = "{url}", model = "judge-32b" }} }}
"""


@pytest.mark.real
@pytest.mark.timeout(180)
def test_a_run_asks_a_server_that_runs_already(tmp_path):
    shape = json.loads((QUICKSTART / "model/config.json").read_text())
    server = CompletionServer(own_weights=True, vocab_size=shape["vocab_size"])
    (tmp_path / "team").mkdir()
    (tmp_path / "team/team.py").write_text(TEAM)
    # A config and a tokenizer: all that is needed here of a model that is served elsewhere.
    (tmp_path / "tokens").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(QUICKSTART / "model" / name, tmp_path / "tokens" / name)
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(folder=tmp_path, quickstart=QUICKSTART, url=server.base))
    data = tmp_path / "data"
    try:
        run = subprocess.run(
            [FLEXMARL, "train", str(config), "--out", str(tmp_path / "out"),
             "--data-dir", str(data)],
            capture_output=True, text=True, check=False, timeout=150,
        )  # fmt: skip
    finally:
        server.close()
        subprocess.run(
            [FLEXMARL, "down", "--purge", "--data-dir", str(data)], check=True, timeout=60
        )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    (metrics,) = (tmp_path / "out").rglob("metrics.jsonl")
    assert len([json.loads(line) for line in metrics.read_text().splitlines()]) == 2
    assert len(server.bodies) == 2 * 16
    for body in server.bodies:
        assert (body["model"], body["max_tokens"]) == ("judge-32b", 3)
        assert body["return_token_ids"]
        assert all(isinstance(token, int) for token in body["prompt"])

"""The quickstart's team trained by a plain loop in one process: the floor under `make demo`.

Same task, policies, rewards and loss; nothing between the agents but a function call. It tells a
recipe that does not learn from services that lose something on the way.

Usage: python -m benchmarks.quickstart_reference [--versions 60] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import random
import time
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from examples.quickstart import team as quicksort
from flexmarl.runtime.policy_config import PolicyConfig
from flexmarl.runtime.run_config import RunConfig

FOLDER = Path("examples/quickstart")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One call: what its policy read and wrote, and what it was worth."""

    prompt: list[int]
    response: list[int]
    site: tuple[int, int]
    reward: float


@dataclass(slots=True, kw_only=True)
class Learner:
    """One policy with its optimizer, as the config says."""

    config: PolicyConfig
    model: LlamaForCausalLM
    optimizer: torch.optim.AdamW
    num_updates: int = 0

    @classmethod
    def create(cls, config: PolicyConfig) -> Learner:
        """A policy with random weights."""
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(config.model.path))
        options = config.optimizer
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
        )
        return cls(config=config, model=model, optimizer=optimizer)

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[list[int]], num_tokens: int, draw: torch.Generator
    ) -> list[list[int]]:
        """Draws `num_tokens` symbols after each prompt, at temperature 1."""
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, prompt in enumerate(prompts):
            by_length[len(prompt)].append(index)
        answers: list[list[int]] = [[] for _ in prompts]
        for length, indices in by_length.items():
            ids = torch.tensor([prompts[i] for i in indices])
            for _ in range(num_tokens):
                weights = self.model(input_ids=ids).logits[:, -1].softmax(-1)
                ids = torch.cat([ids, torch.multinomial(weights, 1, generator=draw)], dim=1)
            for index, row in zip(indices, ids[:, length:].tolist(), strict=True):
                answers[index] = row
        return answers

    def update(self, rows: Sequence[Row], advantages: Sequence[float]) -> None:
        """One step on all rows: token mean of advantage x log-prob, and the entropy bonus."""
        width = max(len(row.prompt) + len(row.response) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros(len(rows), width - 1)
        for i, row in enumerate(rows):
            ids[i, : len(row.prompt) + len(row.response)] = torch.tensor(row.prompt + row.response)
            mask[i, len(row.prompt) - 1 : len(row.prompt) + len(row.response) - 1] = 1
        logp = self.model(input_ids=ids[:, :-1]).logits.log_softmax(-1)
        chosen = logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        gain = torch.tensor(advantages)[:, None] * chosen
        bonus = self.config.loss.entropy_at(self.num_updates) * entropy
        loss: Tensor = -((gain + bonus) * mask).sum() / mask.sum()
        rate = self.config.optimizer.rate().at(self.num_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.max_grad_norm)
        self.optimizer.step()
        self.num_updates += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of an agent while a batch is sampled."""

    agent: str
    sample: int
    site: int
    inputs: dict[str, str]
    prompt: list[int]
    answer: list[int]
    text: str


class Loop:
    """The whole run: samples a batch with all agents, then steps each policy once."""

    def __init__(self, config: RunConfig, *, seed: int) -> None:
        torch.manual_seed(seed)
        self.config = config
        self.seed = seed
        self.learners = {n: Learner.create(p) for n, p in sorted(config.policies.items())}
        self.tokenizer = AutoTokenizer.from_pretrained(FOLDER / "model")
        self.draw = torch.Generator().manual_seed(seed)

    def run(self, versions: int) -> list[float]:
        """Trains `versions` batches; returns the mean team reward of each."""
        queries = [json.loads(line)["digits"] for line in self.config.dataset.path.open()]
        order = random.Random(self.seed)
        curve: list[float] = []
        pending: list[str] = []
        for _ in range(versions):
            if len(pending) < self.config.batch.groups:
                pending = order.sample(queries, len(queries))
            batch, pending = (
                pending[: self.config.batch.groups],
                pending[self.config.batch.groups :],
            )
            curve.append(self.step(batch))
        return curve

    def step(self, queries: list[str]) -> float:
        """One batch: four rounds of calls, rewards, three updates."""
        size = self.config.batch.samples_per_group
        samples = [query for query in queries for _ in range(size)]
        calls = self.sample(samples)
        merged = [call.text for call in calls if call.agent == "merger"]
        team = [
            quicksort.share(quicksort.digits_of(text), quicksort.sorted_digits(query))
            for text, query in zip(merged, samples, strict=True)
        ]
        rows: dict[str, list[Row]] = defaultdict(list)
        for call in calls:
            local = quicksort.local_reward(call.agent, call.inputs, call.text)
            rows[self.config.agents[call.agent].policy].append(
                Row(
                    prompt=call.prompt,
                    response=call.answer,
                    site=(call.sample // size, call.site),
                    reward=quicksort.blend(local, team[call.sample]),
                )
            )
        for policy, learner in self.learners.items():
            learner.update(rows[policy], advantages(rows[policy]))
        return sum(team) / len(team)

    def sample(self, digits: list[str]) -> list[Call]:
        """The workflow over all samples at once, site by site."""
        splits = self.ask("splitter", 0, [{"digits": d} for d in digits])
        halves = [quicksort.pieces(call.text) for call in splits]
        left = self.ask("sorter", 1, [{"digits": low} for low, _ in halves])
        right = self.ask("sorter", 2, [{"digits": high} for _, high in halves])
        sides = [
            {"left": quicksort.digits_of(a.text), "right": quicksort.digits_of(b.text)}
            for a, b in zip(left, right, strict=True)
        ]
        return [*splits, *left, *right, *self.ask("merger", 3, sides)]

    def ask(self, agent: str, site: int, inputs: list[dict[str, str]]) -> list[Call]:
        """One call per sample."""
        settings = self.config.agents[agent]
        assert settings.prompt is not None
        prompts = [
            self.tokenizer.encode(settings.prompt.format(**given), add_special_tokens=False)
            for given in inputs
        ]
        answers = self.learners[settings.policy].sample(prompts, settings.max_tokens, self.draw)
        return [
            Call(
                agent=agent,
                sample=sample,
                site=site,
                inputs=inputs[sample],
                prompt=prompts[sample],
                answer=answer,
                text=str(self.tokenizer.decode(answer)),
            )
            for sample, answer in enumerate(answers)
        ]


def advantages(rows: Sequence[Row]) -> list[float]:
    """Reward minus the mean over the same call of the same query."""
    by_site: dict[tuple[int, int], list[float]] = defaultdict(list)
    for row in rows:
        by_site[row.site].append(row.reward)
    means = {site: sum(values) / len(values) for site, values in by_site.items()}
    return [row.reward - means[row.site] for row in rows]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    values = tomllib.loads((FOLDER / "config.toml").read_text(encoding="utf-8"))
    config = RunConfig.model_validate(values).relative_to(FOLDER)
    start = time.monotonic()
    curve = Loop(config, seed=args.seed).run(args.versions)
    for version in range(0, args.versions, 10):
        print(f"version {version:3d}  team reward {curve[version]:.3f}")
    last = curve[-5:]
    print(
        f"last {len(last)} versions: {sum(last) / len(last):.3f}; {time.monotonic() - start:.1f} s"
    )


if __name__ == "__main__":
    main()

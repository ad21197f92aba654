"""Rows of a micro-batch, from packed bytes to the tensors of one pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.core.passes import Pass, Tile
from flexmarl.trainer.rank.attention import PackedRows
from flexmarl.trainer.rank.losses.total import LossInputs
from flexmarl.trainer.rank.model import PassInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of a micro-batch as flat columns; `starts` index tokens, `response_starts` log-probs.

    `sampled` and `token_advantages` are per response token, like log-probs; None: all of them, and
    each has its row's advantage.
    """

    tokens: np.ndarray
    prompt_lengths: np.ndarray
    response_lengths: np.ndarray
    advantages: np.ndarray
    temperatures: np.ndarray
    logprobs: np.ndarray
    starts: np.ndarray
    response_starts: np.ndarray
    sampled: np.ndarray | None = None
    token_advantages: np.ndarray | None = None

    @classmethod
    def parse(cls, message: rank_pb2.RankGradients) -> Rows:
        """Reads the columns of a command.

        Raises:
            ValueError: Columns do not fit each other.
        """
        tokens = np.frombuffer(message.tokens, dtype="<i4")
        prompts = np.frombuffer(message.prompt_lengths, dtype="<i4")
        responses = np.frombuffer(message.response_lengths, dtype="<i4")
        logprobs = np.frombuffer(message.logprobs, dtype="<f8")
        advantages = np.frombuffer(message.advantages, dtype="<f8")
        temperatures = np.frombuffer(message.temperatures, dtype="<f8")
        lengths = prompts + responses
        rows = {len(prompts), len(responses), len(advantages), len(temperatures)}
        if len(rows) != 1 or lengths.sum() != len(tokens) or responses.sum() != len(logprobs):
            raise ValueError("columns of the micro-batch do not fit each other")
        sampled = np.frombuffer(message.sampled, dtype=np.bool_) if message.sampled else None
        by_token = np.frombuffer(message.token_advantages, dtype="<f8")
        if len(message.sampled) not in (0, len(logprobs)) or len(by_token) != len(message.sampled):
            raise ValueError("columns of the merged rows do not fit the others")
        return cls(
            tokens=tokens,
            prompt_lengths=prompts,
            response_lengths=responses,
            advantages=advantages,
            temperatures=temperatures,
            logprobs=logprobs,
            starts=_starts(lengths),
            response_starts=_starts(responses),
            sampled=sampled,
            token_advantages=None if sampled is None else by_token,
        )

    @property
    def lengths(self) -> list[int]:
        """Tokens per row."""
        return [int(value) for value in self.prompt_lengths + self.response_lengths]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassColumns:
    """One pass: what the model reads, and per scored token what the loss reads [scored].

    Attributes:
        inputs: What the model reads.
        row_ends: Where each row's scored tokens end.
        behaviour: Log-probability that the engine stored.
        advantage: Advantage of its row.
        row: Number of its row in the pass.
        row_tokens: Sampled tokens of its row.
        mask: False where nothing is trained on.
        num_rows: Rows.
        num_tokens: Tokens that go through the model; none is padding.
    """

    inputs: PassInputs
    row_ends: tuple[int, ...]
    behaviour: torch.Tensor
    advantage: torch.Tensor
    row: torch.Tensor
    row_tokens: torch.Tensor
    mask: torch.Tensor
    num_rows: int
    num_tokens: int

    def loss_inputs(
        self,
        tile: Tile,
        *,
        current: torch.Tensor,
        entropy: torch.Tensor,
        reference: torch.Tensor | None,
    ) -> LossInputs:
        """Returns what a loss reads of some rows, as if there were no others.

        Args:
            tile: The rows.
            current: Log-probabilities of their tokens under the weights being trained.
            entropy: Entropies of the same.
            reference: Log-probabilities of all the pass's tokens under the reference.
        """
        part = slice(tile.start, tile.end)
        return LossInputs(
            current=current,
            entropy=entropy,
            behaviour=self.behaviour[part],
            reference=None if reference is None else reference[part],
            advantage=self.advantage[part],
            row=self.row[part] - tile.first_row,
            row_tokens=self.row_tokens[part],
            mask=self.mask[part],
            num_rows=tile.num_rows,
        )


def make_pass(rows: Rows, chosen: Pass, *, device: torch.device) -> PassColumns:
    """Builds the tensors of one pass.

    A pass without sampled tokens scores one token with its mask off, so that it runs the same
    collectives as every other pass.
    """
    picked = [row for row in chosen if rows.response_lengths[row]]
    if not picked:
        return _empty_pass(device)
    index = np.asarray(picked)
    prompts, responses = rows.prompt_lengths[index], rows.response_lengths[index]
    # The state before a sampled token predicts it; that of the last one predicts nothing.
    lengths = prompts + responses - 1
    tokens = rows.tokens[_ranges(rows.starts[index], lengths)].astype(np.int64)
    row_of = np.repeat(np.arange(len(picked)), responses)
    scored = _ranges(_starts(lengths) + prompts - 1, responses)
    targets = rows.tokens[_ranges(rows.starts[index] + prompts, responses)].astype(np.int64)
    source = _ranges(rows.response_starts[index], responses)
    row_tokens = responses
    if rows.sampled is not None:  # what stands between the turns of a merged row is not scored
        kept = rows.sampled[source]
        row_of, scored, source = row_of[kept], scored[kept], source[kept]
        targets = targets[kept]
        row_tokens = np.bincount(row_of, minlength=len(picked))
    advantages = rows.advantages[index][row_of]
    if rows.token_advantages is not None:
        advantages = rows.token_advantages[source]

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return PassColumns(
        inputs=PassInputs(
            tokens=tensor(tokens[None]),
            positions=tensor(_ranges(np.zeros(len(picked), dtype=np.int64), lengths)[None]),
            rows=_lay(lengths, device),
            scored=tensor(scored),
            targets=tensor(targets),
            temperatures=tensor(rows.temperatures[index][row_of]),
        ),
        row_ends=tuple(np.cumsum(row_tokens, dtype=np.int64).tolist()),
        behaviour=tensor(rows.logprobs[source]),
        advantage=tensor(advantages),
        row=tensor(row_of),
        row_tokens=tensor(row_tokens[row_of].astype(np.int64)),
        mask=torch.ones(len(row_of), dtype=torch.bool, device=device),
        num_rows=len(picked),
        num_tokens=len(tokens),
    )


def _lay(lengths: np.ndarray, device: torch.device) -> PackedRows:
    count, width = len(lengths), int(lengths.max())
    places = None
    if int(lengths.min()) < width:
        places = torch.from_numpy(_ranges(np.arange(count) * width, lengths)).to(device)
    return PackedRows(count=count, width=width, places=places)


def _empty_pass(device: torch.device) -> PassColumns:
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    value = torch.zeros(1, dtype=torch.float64, device=device)
    pair = torch.arange(2, device=device)[None]
    return PassColumns(
        inputs=PassInputs(
            tokens=torch.zeros_like(pair),
            positions=pair,
            rows=PackedRows(count=1, width=2, places=None),
            scored=zero,
            targets=zero,
            temperatures=torch.ones(1, dtype=torch.float64, device=device),
        ),
        row_ends=(1,),
        behaviour=value,
        advantage=value,
        row=zero,
        row_tokens=torch.ones_like(zero),
        mask=torch.zeros(1, dtype=torch.bool, device=device),
        num_rows=1,
        num_tokens=2,
    )


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)[:-1]])


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenates range(start, start + length) of every row."""
    total = int(lengths.sum())
    before = np.repeat(np.cumsum(lengths, dtype=np.int64) - lengths, lengths)
    indexes: np.ndarray = np.repeat(starts, lengths) + np.arange(total) - before
    return indexes

"""What bound weights answer to the probe prompt."""

from __future__ import annotations

import numpy as np
import torch

from flexmarl.core.weights_probe import probe_prompt
from flexmarl.trainer.rank.model import ScoringModel
from flexmarl.trainer.rank.packing import Rows, make_pass


def probe_logprobs(model: ScoringModel, *, device: torch.device) -> list[float]:
    """Log-probability of each token but the first, in one pass that all ranks make alike."""
    vocab_size = model.lm.config.get_text_config().vocab_size
    tokens = np.array(probe_prompt(vocab_size), dtype=np.int32)
    one, rest = np.ones(1, dtype=np.int32), len(tokens) - 1
    rows = Rows(
        tokens=tokens,
        prompt_lengths=one,
        response_lengths=one * rest,
        advantages=np.zeros(1),
        temperatures=np.ones(1),
        logprobs=np.zeros(rest),
        starts=0 * one,
        response_starts=0 * one,
    )
    inputs = make_pass(rows, (0,), device=device).inputs
    # What is gathered is of before the update, and what this pass gathers of before the next.
    model.forget_gathered()
    chosen, _ = model.score(inputs)
    model.forget_gathered()
    return [float(logprob) for logprob in chosen]

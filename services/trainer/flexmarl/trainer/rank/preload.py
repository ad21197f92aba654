"""Imported once per trainer, by the process that rank workers are forked from.

Libraries load much of themselves at first use; what a first training step would load (seconds, and
again in every worker) is loaded here. Imports only: threads and device contexts do not survive a
fork.
"""

from __future__ import annotations

from torch import _dynamo
from torch.distributed import fsdp, tensor
from torch.testing._internal.distributed import fake_pg
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from flexmarl.trainer.rank import main

__all__ = [
    "AutoConfig",
    "AutoModelForCausalLM",
    "_dynamo",
    "fake_pg",
    "fsdp",
    "main",
    "modeling_llama",
    "tensor",
]

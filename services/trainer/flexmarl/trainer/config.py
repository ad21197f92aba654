"""Configuration of a trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from flexmarl.core.ids import check_name
from flexmarl.runtime.config import ServiceConfig


class TrainerConfig(ServiceConfig):
    """One trainer: the devices of a node and a warm worker for each."""

    data_dir: Path = Path("var/trainer")
    """Record of children, cache of unpacked models, spans."""
    slots: tuple[str, ...] = ("slot0",)
    """Names of the device slots; each has a worker."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Kind of device; with cuda, slot n is device n."""
    interface: str = "lo"
    """Network interface of process groups and of their rendezvous."""
    rendezvous_host: str = "127.0.0.1"
    """Address of that interface that workers meet at."""
    threads_per_rank: Annotated[int, Field(ge=0)] = 1
    """Compute threads of each worker; 0 means the node's cores divided by the slots. More than one
    pays for large models on cores that nobody else uses: threads of a small one mostly wait for
    each other, for ever longer when the cores are shared."""
    max_resident_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    """Most bytes of weights and moments that a worker keeps for bindings to come."""
    warm_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Longest start of a worker."""
    command_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Longest work of a rank on one command; a rank that takes longer is ended."""
    collective_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Longest wait of a rank for the others."""
    store_patience_s: Annotated[float, Field(gt=0)] = 60.0
    """How long calls of the MEG Store are repeated while it is unavailable."""
    max_queued_per_policy: Annotated[int, Field(ge=1)] = 16
    """Most operations of one policy that wait; further ones are refused with QUEUE_FULL."""
    max_operations: Annotated[int, Field(ge=16)] = 1024
    """Most operations remembered; the oldest ended ones are forgotten first."""

    @property
    def compute_threads(self) -> int:
        """Compute threads of each worker."""
        return self.threads_per_rank or max(1, len(os.sched_getaffinity(0)) // len(self.slots))

    @field_validator("slots")
    @classmethod
    def _named_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or len(set(value)) < len(value):
            raise ValueError("name at least one slot, each once")
        for name in value:
            check_name(name, what="slot")
        return value

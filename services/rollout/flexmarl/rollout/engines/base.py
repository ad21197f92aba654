"""What every engine is, seen from the loop that drives it in its own process.

An engine is synchronous and single-threaded: the loop hands it commands between steps, so nothing
here is guarded by locks. This module imports neither torch nor any engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from flexmarl.api.rollout.v1alpha1.engine_pb2 import (
    EngineLoad,
    EngineLoaded,
    EngineReady,
    GenerateRequest,
    GenerateResult,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine process is started with; crosses the process border as JSON.

    Attributes:
        engine: Name in the registry.
        instance_id: Instance that it is.
        model_path: Folder of the base model.
        dtype: Compute dtype: "float32", "bfloat16" or "float64".
        max_context: Longest prompt plus response, tokens; 0: the model's own limit.
        max_concurrency: Most sequences in one step.
        threads: Compute threads.
        kv_cache_bytes: Bound of the key-value cache; one sequence is always admitted.
        device: Torch device.
    """

    engine: str
    instance_id: str
    model_path: str
    dtype: str
    max_context: int
    max_concurrency: int
    threads: int = 1
    kv_cache_bytes: int = 2 << 30
    device: str = "cpu"


class Engine(Protocol):
    """One engine.

    I11: it draws no token before `load` has taken over weights of a named version, checked by
    content, and nothing computed under old weights is used under new ones.
    """

    def ready(self) -> EngineReady:
        """Describe the built model."""
        ...

    @property
    def busy(self) -> bool:
        """Whether `step` has work to do."""
        ...

    def submit(self, requests: Iterable[GenerateRequest]) -> None:
        """Accept requests; refusals come out of the next `step` as results."""
        ...

    def abort(self, attempt_ids: Sequence[str]) -> None:
        """End attempts with what they have; unknown ones are ignored."""
        ...

    def load(self, load: EngineLoad) -> EngineLoaded:
        """Take weights over; on failure the old ones are kept and served on."""
        ...

    def step(self) -> list[GenerateResult]:
        """Advance every sequence by a token; returns the attempts that ended."""
        ...

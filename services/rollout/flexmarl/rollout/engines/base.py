"""What every engine is, seen from the loop that drives it in its own process.

An engine is synchronous and single-threaded: the loop hands it commands between steps, so nothing
here is guarded by locks. This module imports neither torch nor any engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from flexmarl.api.rollout.v1.engine_pb2 import (
    EngineLoad,
    EngineLoaded,
    EngineOptions,
    EngineReady,
    GenerateRequest,
    GenerateResult,
)

DEFAULT_KV_CACHE_BYTES: Final = 2 << 30
"""Bound of the key-value cache of an instance whose policy names none."""


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
        options: Serialized `EngineOptions` in hexadecimal: what only some engines know.
        vllm_python: Command of an interpreter that has vLLM, as a shell splits it.
    """

    engine: str
    instance_id: str
    model_path: str
    dtype: str
    max_context: int
    max_concurrency: int
    threads: int = 1
    kv_cache_bytes: int = DEFAULT_KV_CACHE_BYTES
    device: str = "cpu"
    options: str = ""
    vllm_python: str = ""

    def parsed_options(self) -> EngineOptions:
        """Options that only some engines know."""
        return EngineOptions.FromString(bytes.fromhex(self.options))


class EngineBrokenError(Exception):
    """The engine holds nothing that may be served: its process must end, and start anew."""


class Engine(Protocol):
    """One engine.

    I11: it draws no token before `load` has taken over weights of a named version, checked by
    content, and nothing computed under old weights is used under new ones.

    An engine that works in threads of its own calls `wake`, which its factory was given, whenever
    `step` has something to hand over.
    """

    def ready(self) -> EngineReady:
        """Describe the built model."""
        ...

    @property
    def due_in_s(self) -> float | None:
        """Seconds until `step` has work to do; 0: now; None: not before a command or a wake."""
        ...

    def submit(self, requests: Iterable[GenerateRequest]) -> None:
        """Accept requests; refusals come out of the next `step` as results."""
        ...

    def abort(self, attempt_ids: Sequence[str]) -> None:
        """End attempts with what they have; unknown ones are ignored."""
        ...

    def load(self, load: EngineLoad) -> EngineLoaded:
        """Take weights over; on failure the old ones are kept and served on.

        Raises:
            EngineBrokenError: Neither the old nor the new ones are whole.
        """
        ...

    def step(self) -> list[GenerateResult]:
        """Do what is due, such as a token of every sequence; returns the attempts that ended."""
        ...

    def check(self) -> None:
        """Return when whatever makes the tokens is found able to; its host waits so long for that.

        Raises:
            EngineBrokenError: It is not.
        """
        ...

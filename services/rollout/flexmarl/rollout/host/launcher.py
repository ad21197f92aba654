"""Starts engine processes: forked from one that has imported what engines need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from flexmarl.api.rollout.v1.engine_pb2 import EngineOptions
from flexmarl.core.engine_host_events import InstanceWanted
from flexmarl.rollout.engines.base import DEFAULT_KV_CACHE_BYTES, EngineSettings
from flexmarl.rollout.engines.registry import check_engine
from flexmarl.runtime.children import ChildProcess, Children

TARGET = "flexmarl.rollout.engines.child:main"
"""What an engine process runs."""


class Launcher:
    """Owner of the engine processes.

    Args:
        record: File that names the living ones, for the next start of the host.
        threads: Compute threads of each.
        preload: Modules that they find imported.
        vllm_python: Command of an interpreter that has vLLM; empty: none.
    """

    def __init__(
        self, *, record: Path, threads: int, preload: Sequence[str], vllm_python: str = ""
    ) -> None:
        self._threads = threads
        self._vllm_python = vllm_python
        # OpenMP reads the variable when torch is imported, which the preloading process does.
        self._env = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self._children = Children(preload=preload, record=record, preload_env=self._env)

    async def prepare(self) -> None:
        """Begin to import, so that the first engine does not wait for it."""
        await self._children.start_preloading()

    async def start(self, wanted: InstanceWanted, folder: Path) -> ChildProcess:
        """Start an engine on a model folder.

        Raises:
            DomainError: NOT_BUILT for an unknown engine, CHILD_DIED, DEADLINE_EXCEEDED.
        """
        options = EngineOptions.FromString(wanted.options)
        settings = EngineSettings(
            engine=check_engine(wanted.engine),
            instance_id=wanted.instance_id,
            model_path=str(folder),
            dtype=wanted.dtype,
            max_context=wanted.max_context,
            max_concurrency=max(wanted.max_concurrency, 1),
            threads=self._threads,
            kv_cache_bytes=options.kv_cache_bytes or DEFAULT_KV_CACHE_BYTES,
            options=wanted.options.hex(),
            vllm_python=self._vllm_python,
        )
        return await self._children.spawn_preloaded(
            TARGET, asdict(settings), name=f"engine/{wanted.instance_id}", env=self._env
        )

    async def close(self) -> None:
        """End all of them; they hold nothing that is not elsewhere."""
        await self._children.close(grace_s=1.0)

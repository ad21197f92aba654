"""Configuration of a Rollout process: the dispatcher of a cluster, or the engine host of a node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from flexmarl.runtime.config import ServiceConfig
from flexmarl.runtime.config_section import Section

Role = Literal["dispatcher", "engine-host"]


class UserCodeConfig(Section):
    """What each worker and each reward process may take, and as whom it runs.

    The kernel keeps these; `workflow.worker_memory_mib` and the run's timeouts, which tell users
    what was too much, are within them. 0 bounds nothing.
    """

    address_space_mib: Annotated[int, Field(ge=0)] = 0
    """Most address space; beyond it allocations fail. Libraries map far more than they use."""
    cpu_s: Annotated[int, Field(ge=0)] = 0
    """Most processor time of one process's life; then it is killed and another takes its place."""
    open_files: Annotated[int, Field(ge=0)] = 0
    """Most open files, sockets included."""
    user: str = ""
    """User to run as, for a service that root starts; empty: the service's own."""


class RolloutConfig(ServiceConfig):
    """One Rollout process; which one it is, `role` says."""

    role: Role = "dispatcher"
    """The dispatcher of the cluster, or the engine host of a node."""
    data_dir: Path = Path("var/rollout")
    """Record of children, cache of unpacked bundles and models, spans."""
    dispatcher: str = "127.0.0.1:7002"
    """Engine host: host:port of the dispatcher it registers with."""
    host_id: str = "host0"
    """Engine host: its name, unique in the cluster."""
    max_engines: Annotated[int, Field(ge=0)] = 0
    """Engine host: most instances it runs; 0 means as many as asked for."""
    engine_threads: Annotated[int, Field(ge=1)] = 1
    """Engine host: compute threads of each engine process."""
    vllm_python: str = ""
    """Engine host: interpreter that has vLLM, or a container command that runs one."""
    engine_silence_s: Annotated[float, Field(gt=0)] = 60.0
    """Engine host: how long an engine with requests may leave a question for a sign of life without
    an answer before it is ended and started again. It answers between two steps."""
    host_grace_s: Annotated[float, Field(ge=0)] = 5.0
    """Dispatcher: how long a lost engine host may take to come back before its attempts fail."""
    store_patience_s: Annotated[float, Field(gt=0)] = 60.0
    """How long calls of a run's home store are repeated while it is unavailable."""
    shard_patience_s: Annotated[float, Field(gt=0)] = 900.0
    """The same for its other shards; longer than the orchestrator's, who decides over a loss."""
    worker_restarts: Annotated[int, Field(ge=0)] = 3
    """Dispatcher: how often one sample may crash its worker before the sample fails."""
    user_code: UserCodeConfig = UserCodeConfig()
    """Dispatcher: confines the processes that run workflows, tools and rewards."""
    engine: str | None = None
    """Dispatcher: replaces the engine that policies name; for measurements and tests."""

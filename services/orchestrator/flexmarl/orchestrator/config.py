"""Configuration of the Orchestrator."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from flexmarl.runtime.config import ServiceConfig


class OrchestratorConfig(ServiceConfig):
    """Configuration of an Orchestrator process."""

    data_dir: Path = Path("orchestrator")
    """Folder of the list of runs that this process drives; all else is in the MEG Store."""
    rollout: str = "127.0.0.1:7002"
    """Address of the Rollout dispatcher."""
    trainers: tuple[str, ...] = ("127.0.0.1:7004",)
    """Addresses of the Trainers."""
    store_patience_s: float = Field(default=60.0, gt=0)
    """How long a store that does not answer is waited for; then the run fails, resumable."""
    shard_patience_s: float = Field(default=600.0, gt=0)
    """The same for a store shard that is not the run's home: the run goes on when it is back."""
    service_patience_s: float = Field(default=60.0, gt=0)
    """How long a dispatcher or trainer that does not answer is waited for."""
    confirm_term_s: float = Field(default=5.0, gt=0)
    """Time between two checks that no other orchestrator has taken a run over."""
    operation_timeout_s: float = Field(default=1800.0, gt=0)
    """Longest operation of a trainer; then its binding is given up and made again."""
    status_interval_ms: int = Field(default=500, ge=50)
    """Time between two states of the dispatcher and the trainers."""

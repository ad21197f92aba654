"""Configuration of the MEG Store."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

from pydantic import Field

from flexmarl.runtime.config import ServiceConfig
from flexmarl.runtime.config_section import Section

_GIB = 1 << 30


class StoreConfig(Section):
    """What this shard is, and its bounds."""

    shard: str = Field(default="s0", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")
    """Name of this shard in the runs' shard lists."""
    data_dir: Path = Path("store")
    """Folder of the database and of the disk tier."""
    shm_dir: Path | None = None
    """Folder of the memory tier, in a tmpfs; unset: /dev/shm/flexmarl-<hash of data_dir>."""
    durability: Literal["fsync", "process"] = "fsync"
    """`fsync`: an acknowledged write survives power loss; `process`: it survives every process."""
    memory_tier_bytes: int = Field(default=8 * _GIB, ge=0)
    """Bound of the memory tier, pages kept for reuse included."""
    reuse_pool_bytes: int = Field(default=4 * _GIB, ge=0)
    """Bound of freed segments whose touched pages are kept for the next ones."""
    retain_versions: int = Field(default=2, ge=1)
    """Newest manifests whose segments are kept."""
    state_to_disk_every: int = Field(default=1, ge=0)
    """Committed versions whose number this divides are copied from memory to disk; 0: none."""
    max_queued_bytes: int = Field(default=64 << 20, ge=1)
    """Writes queued beyond this are refused with QUEUE_FULL."""
    min_free_bytes: int = Field(default=256 << 20, ge=0)
    """Mutations are refused with DISK_FULL while the disk of `data_dir` has less room than this."""
    max_events: int = Field(default=1_000_000, ge=1024)
    """Newest events kept per run."""
    max_requests: int = Field(default=100_000, ge=1)
    """Newest request ids kept per run."""
    orphan_ttl_s: float = Field(default=3600.0, gt=0)
    """Age at which objects and segments that nothing refers to are removed."""
    lease_max_s: float = Field(default=6 * 3600.0, gt=0)
    """Age at which the lease of a reader that never closed it is forgotten."""
    sweep_every_s: float = Field(default=60.0, gt=0)
    """Pause between two sweeps."""
    sign_of_life_s: float = Field(default=2.0, gt=0, le=5)
    """A watch without events says this often that it lives."""

    @property
    def memory_dir(self) -> Path:
        """Folder of the memory tier."""
        if self.shm_dir is not None:
            return self.shm_dir
        digest = hashlib.sha256(str(self.data_dir.resolve()).encode()).hexdigest()[:12]
        return Path("/dev/shm") / f"flexmarl-{digest}"  # noqa: S108 - a tmpfs, mode 0700


class MegStoreConfig(ServiceConfig):
    """Configuration of a MEG Store process."""

    store: StoreConfig = StoreConfig()
    """The shard."""

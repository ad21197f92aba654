"""How long each method may take by default, and which streams live without a limit.

One table for both ends: the client takes its defaults from it, the server refuses calls without a
deadline except to the streams named here. Methods that are not named have `DEFAULT_DEADLINE_S`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_STORE: Final = "/flexmarl.api.meg_store.v1.MegStoreService/"
_ORCHESTRATOR: Final = "/flexmarl.api.orchestrator.v1.OrchestratorService/"
_ROLLOUT: Final = "/flexmarl.api.rollout.v1.RolloutService/"
_TRAINER: Final = "/flexmarl.api.trainer.v1.TrainerService/"

LONG_LIVED: Final = frozenset(
    (
        _STORE + "Watch",
        _ORCHESTRATOR + "WatchProgress",
        _ROLLOUT + "WatchStatus",
        _ROLLOUT + "ConnectEngineHost",
        _TRAINER + "WatchStatus",
        _TRAINER + "LendSlots",
    )
)
"""Streams that may be called without a deadline; keep-alive finds their dead peers."""

DEADLINES_S: Final[Mapping[str, float | None]] = MappingProxyType(
    {
        **dict.fromkeys(LONG_LIVED),
        # Objects of gigabytes pass through these in chunks.
        _STORE + "PutObject": 600.0,
        _STORE + "GetObject": 600.0,
        _STORE + "AllocateSegment": 600.0,
        _STORE + "ReadSegment": 600.0,
        _STORE + "FetchSegment": 600.0,
        # Waits for the checksums of what it names.
        _STORE + "Commit": 600.0,
        # Many rows in one answer, or an fsync behind a busy disk.
        _STORE + "GetVertices": 30.0,
        _STORE + "SealSegment": 60.0,
        _STORE + "DeleteRun": 60.0,
        # Reads that go over a whole run.
        _STORE + "ListVertices": 60.0,
        _STORE + "DescribeAgents": 120.0,
        # Copies segments of gigabytes.
        _STORE + "CreateSnapshot": 600.0,
        # The run is read from its store, which may be starting.
        _ORCHESTRATOR + "SubmitRun": 60.0,
        _ORCHESTRATOR + "ResumeRun": 60.0,
        _ORCHESTRATOR + "StopRun": 60.0,
        # One DeleteRun of each store shard.
        _ORCHESTRATOR + "DeleteRun": 180.0,
        # Bundles are unpacked, workers and engines are started.
        _ROLLOUT + "OpenRun": 120.0,
        _ROLLOUT + "CloseRun": 30.0,
        _TRAINER + "OpenRun": 120.0,
        _TRAINER + "CloseRun": 30.0,
        # Waits by design, and answers what it knows at its deadline.
        _TRAINER + "WaitOperation": 10.0,
    }
)
"""Default deadline by full method name; None: none, for the long-lived streams only."""

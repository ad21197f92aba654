"""Watching a run to its end, across restarts of the orchestrator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.orchestrator.v1 import orchestrator_pb2
from flexmarl.cli.errors import EXIT_FAILED, CliError
from flexmarl.client.errors import (
    CancelledCallError,
    DeadlineError,
    FlexMarlError,
    NotFoundError,
    UnavailableError,
)
from flexmarl.client.orchestrator import OrchestratorClient

PATIENCE_S: Final = 120.0
"""Longest silence of the orchestrator: a restarted one imports, reads the store, and answers."""

_PAUSE_S: Final = 0.2
_INTERVAL_MS: Final = 500
_ENDED: Final = frozenset(
    {
        common_pb2.RUN_STATUS_FINISHED,
        common_pb2.RUN_STATUS_FAILED,
        common_pb2.RUN_STATUS_STOPPED,
    }
)


async def follow_run(
    orchestrator: OrchestratorClient,
    run_id: str,
    *,
    home_shard: common_pb2.ShardAddress,
    on_message: Callable[[orchestrator_pb2.WatchProgressResponse], None],
    patience_s: float = PATIENCE_S,
) -> orchestrator_pb2.RunProgress:
    """Hand on every message until the run ends; returns its last state.

    Waits for messages, which come twice a second while the orchestrator lives. When the stream
    breaks it is opened again from the first version not seen; a new orchestrator that does not know
    the run is told to resume it.

    Raises:
        CliError: No message for `patience_s`.
    """
    from_version = 0
    heard_s = time.monotonic()
    while True:
        try:
            async for message in orchestrator.watch_progress(
                run_id, from_version=from_version, interval_ms=_INTERVAL_MS
            ):
                heard_s = time.monotonic()
                on_message(message)
                from_version = max([from_version, *(r.version + 1 for r in message.reports)])
                if message.progress.status in _ENDED:
                    return message.progress
        except NotFoundError:
            await _resume_quietly(orchestrator, run_id, home_shard)
        except (UnavailableError, CancelledCallError, DeadlineError) as error:
            if time.monotonic() - heard_s > patience_s:
                raise CliError(
                    f"the orchestrator has not answered for {patience_s:g} s ({error.message}); "
                    f"the run is stored, go on with: flexmarl resume {run_id}",
                    exit_code=EXIT_FAILED,
                ) from None
        await asyncio.sleep(_PAUSE_S)


async def _resume_quietly(
    orchestrator: OrchestratorClient, run_id: str, home_shard: common_pb2.ShardAddress
) -> None:
    try:
        await orchestrator.resume_run(run_id, home_shard=home_shard)
    except FlexMarlError as error:
        # It may be resuming it by itself at this moment, or not be ready: the next watch tells.
        if not isinstance(error, UnavailableError) and error.reason.family.name == "INVALID":
            raise

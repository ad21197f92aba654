"""Long-lived streams of a driver: the store's events, and the state of the other services."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.client.errors import FlexMarlError, NotFoundError
from flexmarl.core.errors import ErrorReason
from flexmarl.core.run_events import FatalReported, SampleChanged, StopRequested
from flexmarl.core.training_rows import RunFailure
from flexmarl.orchestrator.context import RunContext
from flexmarl.orchestrator.convert import sample_fact
from flexmarl.orchestrator.inbox import Inbox

_KINDS: Final = (pb.EVENT_KIND_SAMPLE, pb.EVENT_KIND_RUN)


async def watch_store(context: RunContext, inbox: Inbox) -> None:
    """Brings news of samples; resumes by itself (`RunStore.watch`).

    Waits for the store; freed by the driver, which cancels it at the end of the run.
    """
    first_batch = 0 if context.manifest is None else context.manifest.version
    async for response in context.store.watch(context.run_id, kinds=_KINDS):
        for event in response.events:
            if event.kind == pb.EVENT_KIND_SAMPLE:
                if event.sample.batch >= first_batch:
                    await inbox.put(SampleChanged(sample_fact(event.sample)))
            elif lost := set(event.run.lost_shards) & set(context.store.shards):
                inbox.push(FatalReported(_lost(min(lost))))
            elif event.run.status == common_pb2.RUN_STATUS_STOPPED:
                # Somebody stopped it without this orchestrator. Old news of an earlier stop come
                # from before the present term: the store's present state decides.
                run = await context.store.get_run(context.run_id)
                if run.status == common_pb2.RUN_STATUS_STOPPED:
                    inbox.push(StopRequested(finish_batch=False))


def _lost(shard: str) -> RunFailure:
    return RunFailure(
        reason=ErrorReason.SHARD_LOST.value,
        message=f"store shard {shard!r} was given up",
        metadata={"shard": shard},
    )


async def watch_status(
    statuses: AsyncGenerator[Any, None],
    *,
    incarnation: str,
    on_status: Callable[[Any], None],
    on_lost: Callable[[str], None],
    inbox: Inbox,
    who: str,
) -> None:
    """Follows a service until it is found to have been started anew.

    Waits for its states; freed by another incarnation, by a service that does not know the run, or
    by the driver. A service that stays away longer than its client's patience ends the run, also
    when nothing else waits for it.
    """
    try:
        async with aclosing(statuses):
            async for status in statuses:
                if status.incarnation != incarnation:
                    on_lost(f"{who} was started anew")
                    return
                on_status(status)
    except NotFoundError:
        on_lost(f"{who} does not know the run")
    except FlexMarlError as error:
        inbox.push(
            FatalReported(RunFailure(reason="UNAVAILABLE", message=f"{who}: {error.message}"))
        )

"""Composition root of the Orchestrator."""

from __future__ import annotations

import asyncio
from functools import partial

from flexmarl.api.orchestrator.v1alpha1.orchestrator_pb2_grpc import (
    add_OrchestratorServiceServicer_to_server,
)
from flexmarl.client.channel import connect
from flexmarl.orchestrator.config import OrchestratorConfig
from flexmarl.orchestrator.rollout_effects import WITHOUT_DEADLINE as ROLLOUT_STREAMS
from flexmarl.orchestrator.runs import Runs
from flexmarl.orchestrator.servicer import SERVICE, WATCH_METHOD, Servicer
from flexmarl.orchestrator.trainer_effects import WITHOUT_DEADLINE as TRAINER_STREAMS
from flexmarl.runtime.aio import Background
from flexmarl.runtime.server import GrpcServer
from flexmarl.runtime.spans import SpanRecorder


async def serve(config: OrchestratorConfig) -> None:
    """Serve until a signal; runs of the last process are taken up at once.

    Raises:
        DomainError: PORT_IN_USE.
    """
    config.data_dir.mkdir(parents=True, exist_ok=True)
    spans = SpanRecorder(service="orchestrator")
    rollout = connect(config.rollout, deadlines_s=dict.fromkeys(ROLLOUT_STREAMS))
    streams: dict[str, float | None] = dict.fromkeys(TRAINER_STREAMS)
    trainers = [connect(address, deadlines_s=streams) for address in config.trainers]
    background = Background(lambda name, error: server.request_stop(f"{name} failed", error))
    runs = Runs(config, background, rollout=rollout, trainers=trainers, spans=spans)
    server = GrpcServer(
        config.server,
        name="orchestrator",
        add_to_server=[partial(add_OrchestratorServiceServicer_to_server, Servicer(runs))],
        services=[SERVICE],
        long_lived=[WATCH_METHOD],
    )
    await server.start()
    # Runs stay RUNNING in the store and go on at the next start.
    server.on_drain(runs.close)
    server.on_drain(background.close)
    background.start("spans", _flush_spans(spans, config))
    background.start("runs of the last process", runs.take_up())
    server.set_ready(True)
    try:
        await server.serve_until_signal()
    finally:
        await server.stop()
        await background.close()
        for channel in (rollout, *trainers):
            await channel.close()
        await asyncio.to_thread(spans.flush, config.data_dir / "spans")


async def _flush_spans(spans: SpanRecorder, config: OrchestratorConfig) -> None:
    """Waits `flush_spans_s` between two writes; freed by the owner's close."""
    while True:
        await asyncio.sleep(config.flush_spans_s)
        await asyncio.to_thread(spans.flush, config.data_dir / "spans")

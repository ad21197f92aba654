"""Composition root of the Orchestrator."""

from __future__ import annotations

import asyncio
from functools import partial

from flexmarl.api.orchestrator.v1.orchestrator_pb2_grpc import (
    add_OrchestratorServiceServicer_to_server,
)
from flexmarl.client.rollout import RolloutClient
from flexmarl.client.trainer import TrainerClient
from flexmarl.orchestrator.config import OrchestratorConfig
from flexmarl.orchestrator.metrics import METRICS, readings
from flexmarl.orchestrator.runs import Runs
from flexmarl.orchestrator.servicer import SERVICE, Servicer
from flexmarl.runtime.aio import Background
from flexmarl.runtime.preconditions import require_folder
from flexmarl.runtime.server import GrpcServer
from flexmarl.runtime.spans import SpanRecorder


async def serve(config: OrchestratorConfig) -> None:
    """Serve until a signal; runs of the last process are taken up at once.

    Raises:
        ConfigError: This host has no place for its data.
        DomainError: PORT_IN_USE.
    """
    require_folder(config.data_dir, key="data_dir")
    spans, span_dir = SpanRecorder(service="orchestrator"), config.data_dir / "spans"
    patience_s = config.service_patience_s
    rollout = RolloutClient.connect(config.rollout, patience_s=patience_s)
    trainers = [
        TrainerClient.connect(address, patience_s=patience_s) for address in config.trainers
    ]
    background = Background(lambda name, error: server.request_stop(f"{name} failed", error))
    runs = Runs(config, background, rollout=rollout, trainers=trainers, spans=spans)
    server = GrpcServer(
        config.server,
        name="orchestrator",
        add_to_server=[partial(add_OrchestratorServiceServicer_to_server, Servicer(runs))],
        services=[SERVICE],
    )
    server.add_metrics(METRICS, lambda: readings(runs.newest(), runs.totals))
    await server.start()
    # Runs stay RUNNING in the store and go on at the next start.
    server.on_drain(runs.close)
    server.on_drain(background.close)
    background.start("spans", spans.keep_flushing(span_dir))
    background.start("runs of the last process", runs.take_up())
    server.set_ready(True)
    try:
        await server.serve_until_signal()
    finally:
        await server.stop()
        await background.close()
        for client in (rollout, *trainers):
            await client.close()
        await asyncio.to_thread(spans.flush, span_dir)

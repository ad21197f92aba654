"""Composition root of the trainer."""

from __future__ import annotations

import asyncio
import os
from functools import partial

from flexmarl.api.trainer.v1.trainer_pb2_grpc import add_TrainerServiceServicer_to_server
from flexmarl.runtime.aio import Background
from flexmarl.runtime.children import Children, end_leftovers
from flexmarl.runtime.logging import get_logger
from flexmarl.runtime.preconditions import require_folder, require_module
from flexmarl.runtime.server import GrpcServer
from flexmarl.runtime.spans import SpanRecorder
from flexmarl.trainer.config import TrainerConfig
from flexmarl.trainer.metrics import METRICS, readings
from flexmarl.trainer.operations import Operations
from flexmarl.trainer.pool import PRELOAD
from flexmarl.trainer.servicer import SERVICE, Servicer
from flexmarl.trainer.trainer import Trainer

_log = get_logger(__name__)


async def serve(config: TrainerConfig) -> None:
    """Serves until a signal. Health is NOT_SERVING until every slot's worker is warm.

    Raises:
        ConfigError: This host has no place for its data, or this installation no torch.
        DomainError: PORT_IN_USE; NOT_READY when a worker does not become warm.
    """
    require_module("torch", service="trainer")
    require_folder(config.data_dir, key="data_dir")
    record = config.data_dir / "children.json"
    end_leftovers(record)
    servicer = Servicer()
    server = GrpcServer(
        config.server,
        name="trainer",
        add_to_server=[partial(add_TrainerServiceServicer_to_server, servicer)],
        services=[SERVICE],
    )
    await server.start()
    spans, span_dir = SpanRecorder(service="trainer"), config.data_dir / "spans"
    threads = str(config.compute_threads)
    try:
        async with (
            Children(
                preload=PRELOAD,
                record=record,
                preload_env={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)},
            ) as children,
            Background(lambda name, error: server.request_stop(f"{name} failed", error)) as tasks,
        ):
            operations = Operations(tasks, max_kept=config.max_operations)
            trainer = Trainer(config, children, tasks, operations=operations, spans=spans)
            tasks.start("spans", spans.keep_flushing(span_dir))
            servicer.open(trainer, operations)
            server.add_metrics(
                METRICS,
                lambda: readings(
                    trainer.status(),
                    trainer.totals,
                    starts=trainer.starts(),
                    failures=operations.failures,
                ),
            )
            server.on_drain(servicer.drain)
            tasks.start("readiness", _report_ready(trainer, server))
            try:
                await server.serve_until_signal()
            finally:
                await server.stop()
                await trainer.close()
    finally:
        await server.stop()
        await asyncio.to_thread(spans.flush, span_dir)


async def _report_ready(trainer: Trainer, server: GrpcServer) -> None:
    await trainer.wait_ready()
    server.set_ready(True)

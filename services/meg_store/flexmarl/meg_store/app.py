"""Composition root of the MEG Store."""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial

from flexmarl.meg_store.allocator import keep_freed_memory
from flexmarl.meg_store.config import MegStoreConfig
from flexmarl.meg_store.metrics import METRICS, readings
from flexmarl.meg_store.rocks_backend import RocksBackend
from flexmarl.meg_store.servicer import SERVICE, Servicer, add_to_server
from flexmarl.meg_store.shard import Shard
from flexmarl.runtime.aio import Background
from flexmarl.runtime.logging import get_logger
from flexmarl.runtime.preconditions import require_folder
from flexmarl.runtime.server import GrpcServer, write_json_atomically

_log = get_logger(__name__)

# The writer thread must get the interpreter soon after its flush: with Python's 5 ms a busy event
# loop would add that much to every acknowledgement.
_SWITCH_INTERVAL_S = 0.0005


async def serve(config: MegStoreConfig) -> None:
    """Serve until a signal. Health is NOT_SERVING until the database is open.

    Raises:
        ConfigError: This host has no place for its data, on disk or in memory.
        DomainError: STORE_LOCKED, PORT_IN_USE.
    """
    require_folder(config.store.data_dir, key="store.data_dir")
    require_folder(config.store.memory_dir, key="store.shm_dir", mode=0o700)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    keep_freed_memory()
    servicer = Servicer()
    server = GrpcServer(
        config.server,
        name="meg_store",
        add_to_server=[partial(add_to_server, servicer)],
        services=[SERVICE],
    )
    await server.start()
    try:
        # Payload files are synced at once: where nothing else is, that would be all that costs.
        backend = await asyncio.to_thread(
            RocksBackend,
            config.store.data_dir / "db",
            payloads_apart=config.store.durability == "fsync",
        )
    except BaseException:
        await server.stop()
        raise
    if backend.torn_log:
        _log.warning("log_torn", meaning="what follows is lost", detail=backend.torn_log)
    # Whoever removes this shard's data must find what lies outside of its folder, too.
    write_json_atomically(
        config.store.data_dir / "memory_tier.json",
        {"folder": str(config.store.memory_dir), "data_dir": str(config.store.data_dir.resolve())},
    )
    background = Background(lambda name, error: server.request_stop(f"{name} failed", error))
    shard = Shard(backend, config.store, on_fatal=_die, start=background.start)
    await shard.recover()
    server.add_metrics(METRICS, partial(readings, shard, server.stats, service=SERVICE))
    servicer.open(shard)
    if config.store.durability == "process":
        _log.warning(
            "durability_process",
            meaning="acknowledged writes survive the death of every process, not of the host",
        )

    async def end_waits() -> None:
        shard.database.events.close()
        shard.database.hold.close()

    server.on_drain(end_waits)
    server.set_ready(True)
    try:
        await server.serve_until_signal()
    finally:
        await server.stop()
        await background.close()
        await shard.close()


def _die(error: BaseException) -> None:
    # The rows of the failed group are visible already, but not durable: nothing may be served from
    # here any more. The next start recovers to the last whole write.
    _log.critical("write_failed", exc_info=error)
    sys.stderr.flush()
    os._exit(1)

"""Composition root of an engine host."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random

from flexmarl.api.rollout.v1.engine_pb2 import (
    ConnectEngineHostRequest,
    ConnectEngineHostResponse,
    HostHello,
)
from flexmarl.client.run_store import RunStore
from flexmarl.core.engine_host import EngineHost
from flexmarl.core.engine_host_events import EngineHostConfig
from flexmarl.rollout.config import RolloutConfig
from flexmarl.rollout.engines.registry import PRELOAD
from flexmarl.rollout.host.attempts import AttemptBook
from flexmarl.rollout.host.dispatcher_link import DispatcherLink
from flexmarl.rollout.host.driver import InstanceDriver
from flexmarl.rollout.host.launcher import Launcher
from flexmarl.rollout.host.metrics import METRICS, readings
from flexmarl.rollout.host.outbox import Outbox
from flexmarl.rollout.host.store_access import Connect, StoreAccess
from flexmarl.runtime.aio import Background
from flexmarl.runtime.children import end_leftovers
from flexmarl.runtime.logging import get_logger
from flexmarl.runtime.metrics import Reading
from flexmarl.runtime.preconditions import require_folder, require_module
from flexmarl.runtime.server import GrpcServer

HEALTH_NAME = "flexmarl.rollout.EngineHost"
"""Name of the host in health checks: SERVING while the dispatcher is connected."""

MAX_ATTEMPTS = 16_384
"""Attempts in progress and results not yet stored, together (I13)."""

DRAIN_S = 5.0
"""Longest that a stopping host waits for attempts in progress."""

_log = get_logger(__name__)


async def run(config: RolloutConfig) -> None:
    """Run an engine host until a signal; the entry point of `--role engine-host`.

    Raises:
        ConfigError: This host has no place for its data, or this installation no torch.
        DomainError: PORT_IN_USE.
    """
    require_module("torch", service="rollout")
    await run_host(
        config,
        connect_store=partial(RunStore.over, patience_s=config.store_patience_s),
        preload=PRELOAD,
    )


async def run_host(
    config: RolloutConfig, *, connect_store: Connect, preload: Sequence[str]
) -> None:
    """Run an engine host until a signal.

    Args:
        config: Of the process.
        connect_store: Makes a client of a run's store shards.
        preload: Modules that engine processes find imported.
    """
    data_dir = require_folder(config.data_dir / config.host_id, key="data_dir")
    record = data_dir / "children.json"
    for name in await asyncio.to_thread(end_leftovers, record):
        _log.warning("leftover_ended", child=name)
    server = GrpcServer(config.server, name="engine_host", add_to_server=[], services=[HEALTH_NAME])
    launcher = Launcher(
        record=record,
        threads=config.engine_threads,
        preload=preload,
        vllm_python=config.vllm_python,
    )
    background = Background(lambda name, error: server.request_stop(f"{name} failed", error))
    store = StoreAccess(
        connect_store, cache_dir=data_dir / "models", holder=f"engine-host/{config.host_id}"
    )
    host = Host(
        config, launcher=launcher, background=background, store=store, set_ready=server.set_ready
    )
    server.add_metrics(METRICS, host.readings)
    await server.start()
    server.on_drain(host.drain)
    try:
        await launcher.prepare()
        host.start()
        await server.serve_until_signal()
    finally:
        await server.stop()
        host.close()
        await background.close()
        await launcher.close()
        await store.close()


class Host:
    """The parts of a host, connected.

    Args:
        config: Of the process.
        launcher: Starts engine processes.
        background: Owns tasks.
        store: Models and weights.
        set_ready: Told whether the dispatcher is connected.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        launcher: Launcher,
        background: Background,
        store: StoreAccess,
        set_ready: Callable[[bool], None],
    ) -> None:
        self._config = config
        self._incarnation = uuid.uuid4().hex
        self._background = background
        self._set_ready = set_ready
        self._connected = False
        self._book = AttemptBook(max_attempts=MAX_ATTEMPTS)
        self._outbox = Outbox()
        self._driver = InstanceDriver(
            host_id=config.host_id,
            core=EngineHost(EngineHostConfig()),
            book=self._book,
            outbox=self._outbox,
            store=store,
            launcher=launcher,
            background=background,
        )
        self._link = DispatcherLink(
            config.dispatcher,
            introduce=self._introduce,
            outgoing=self._outbox.take,
            on_message=self._on_message,
            on_connected=self._on_connected,
            rng=Random(),  # noqa: S311 - jitter
        )

    def start(self) -> None:
        """Dial the dispatcher, and look after deadlines."""
        self._background.start("dispatcher link", self._link.run())
        self._background.start("attempt deadlines", self._driver.router.sweep())
        silence = self._driver.watch_silence(self._config.engine_silence_s)
        self._background.start("engine silence", silence)

    def readings(self) -> Iterable[Reading]:
        """Its metrics now."""
        return readings(self._book, self._driver.statuses(), connected=self._connected)

    def close(self) -> None:
        """Act no more."""
        self._driver.close()

    async def drain(self) -> None:
        """Let attempts in progress end and their results go, while anybody takes them."""
        self._driver.router.refuse_new()
        try:
            async with asyncio.timeout(DRAIN_S):
                while self._connected and len(self._book):  # noqa: ASYNC110 - it stops anyway
                    await asyncio.sleep(0.02)
        except TimeoutError:
            _log.warning("drained_not_wholly", attempts=len(self._book))

    def _introduce(self) -> ConnectEngineHostRequest:
        self._outbox.reset(self._book.unacknowledged())
        held = self._book.held()
        return ConnectEngineHostRequest(
            hello=HostHello(
                host_id=self._config.host_id,
                incarnation=self._incarnation,
                max_instances=self._config.max_engines,
                instances=self._driver.statuses(),
                attempt_ids=held.keys(),
                held=held.values(),
                run_id=self._driver.run_id,
            )
        )

    async def _on_message(self, message: ConnectEngineHostResponse) -> None:
        # Room first; then what there shall be; then what uses it.
        if message.stored:
            self._book.acknowledge(message.stored)
        if message.HasField("plan"):
            await self._driver.plan(message.plan)
        for load in message.loads:
            self._driver.load(load)
        if message.requests:
            self._driver.router.route(message.requests)
        if message.aborts:
            self._driver.router.abort(message.aborts)

    def _on_connected(self, connected: bool) -> None:
        self._connected = connected
        self._set_ready(connected)

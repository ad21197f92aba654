"""The dispatcher's process: the only place that builds its concrete classes."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from flexmarl.api.rollout.v1.rollout_pb2_grpc import add_RolloutServiceServicer_to_server
from flexmarl.rollout.config import RolloutConfig
from flexmarl.rollout.dispatcher.hosts import Hosts
from flexmarl.rollout.dispatcher.metrics import METRICS, readings
from flexmarl.rollout.dispatcher.opener import RunOpener
from flexmarl.rollout.dispatcher.rewards import REWARD_MODULE
from flexmarl.rollout.dispatcher.rollout import Rollout
from flexmarl.rollout.dispatcher.service import SERVICE, RolloutServicer
from flexmarl.rollout.dispatcher.workers import WORKER_MODULE
from flexmarl.rollout.worker.confine import check_confinement
from flexmarl.runtime.aio import Background
from flexmarl.runtime.children import Children, end_leftovers
from flexmarl.runtime.preconditions import require_folder
from flexmarl.runtime.server import GrpcServer

RECORD: Final = "children-dispatcher.json"


async def run(config: RolloutConfig) -> None:
    """Serves until a signal.

    Raises:
        ConfigError: User code cannot run as it shall, or this host has no place for its data.
        DomainError: PORT_IN_USE.
    """
    check_confinement(config.user_code)
    require_folder(config.data_dir, key="data_dir")
    record = config.data_dir / RECORD
    await asyncio.to_thread(end_leftovers, record)
    hosts = Hosts(grace_s=config.host_grace_s)

    def stop(name: str, error: BaseException) -> None:
        server.request_stop(f"{name} failed", error)

    async with (
        Children(preload=(WORKER_MODULE, REWARD_MODULE), record=record) as children,
        Background(stop) as background,
    ):
        opener = RunOpener(config, hosts=hosts, children=children, background=background)
        rollout = Rollout(opener.open)
        servicer = RolloutServicer(rollout, hosts)
        server = GrpcServer(
            config.server,
            name="rollout",
            add_to_server=[partial(add_RolloutServiceServicer_to_server, servicer)],
            services=[SERVICE],
        )

        server.add_metrics(METRICS, lambda: readings(rollout.run))

        async def drain() -> None:
            servicer.stop()
            await rollout.close()

        server.on_drain(drain)
        await server.start()
        await children.start_preloading()
        server.set_ready(True)
        await server.serve_until_signal()

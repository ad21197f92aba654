"""A local cluster: the services as top-level children of this process, dying with it (I15).

start:  all services at once, since most of their start is importing; each knows the addresses
        of the others, and calls to one that does not listen yet are repeated
run:    a service that dies is started again on its address; one that keeps dying ends the
        cluster (`failed`)
stop:   the orchestrator first and the store last, so that what is in flight can be written

`kill` ends all of it at once; so does the death of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import IO, Final

from flexmarl.cli.cluster.folder import ClusterFolder, process_start_s, read_json
from flexmarl.cli.cluster.plan import (
    DISPATCHER,
    ENGINE_HOST,
    ORCHESTRATOR,
    SERVICES,
    STORE,
    TRAINER,
    ClusterSettings,
    plan_services,
)
from flexmarl.cli.cluster.service import SupervisedService, log_tail
from flexmarl.cli.errors import EXIT_FAILED, CliError
from flexmarl.cli.preflight.ports import PortClaims
from flexmarl.runtime.children import Children, end_leftovers
from flexmarl.runtime.server import write_json_atomically

START_TIMEOUT_S: Final = 180.0
"""Longest start of a cluster: importing torch twice on two busy cores takes most of it."""

_STOP_ORDER: Final = ((ORCHESTRATOR,), (TRAINER, ENGINE_HOST, DISPATCHER), (STORE,))
_STOP_GRACE_S: Final = 10.0


class LocalCluster:
    """Runs the services; one per folder.

    Args:
        folder: Where they live.
        settings: What they are started with.
        tell: Takes lines for a person.
        names: Services to run.
        background: Runs until it is told to stop, for whoever comes.
    """

    def __init__(
        self,
        folder: ClusterFolder,
        settings: ClusterSettings,
        *,
        tell: Callable[[str], None],
        names: Sequence[str] = SERVICES,
        background: bool = False,
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._tell = tell
        self._names = names
        self._background = background
        self._services: dict[str, SupervisedService] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._children: Children | None = None
        self._claims = PortClaims()
        self._lock: IO[str] | None = None
        self._started_s = 0.0

    def address(self, name: str) -> str:
        """host:port of a service, fixed for the cluster's life."""
        return self._services[name].spec.address

    async def start(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start all services and wait until they serve.

        Raises:
            CliError: The folder is in use, a port is, a service refuses to start, or one is not
                ready in time: then with its name and the end of its log.
        """
        self._lock = self._folder.lock()
        try:
            await self._start_services()
            await self._wait_ready(timeout_s)
        except BaseException:
            await self.stop()
            raise

    async def failed(self) -> None:
        """Wait for a service that cannot be kept running; ends when all were stopped.

        Raises:
            CliError: The service's.
        """
        # Not `gather`: who gives up waiting must not end the services.
        done, _ = await asyncio.wait(self._tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def stop(self) -> None:
        """Stop all services in order; safe to call twice."""
        for names in _STOP_ORDER:
            running = [self._services[name] for name in names if name in self._services]
            await asyncio.gather(*(service.stop(grace_s=_STOP_GRACE_S) for service in running))
        for task in self._tasks.values():
            # A failed service has said why already, and a waiting restart is of no use any more.
            task.cancel()
            with contextlib.suppress(CliError, asyncio.CancelledError):
                await task
        if self._children is not None:
            await self._children.close()
            self._children = None
        self._claims.close()
        if self._lock is not None:
            self._folder.cluster_file.unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    def kill(self) -> None:
        """End all services now; their own children follow by their links."""
        for service in self._services.values():
            service.kill()

    async def _start_services(self) -> None:
        folder = self._folder
        await asyncio.to_thread(end_leftovers, folder.children_file)
        folder.logs.mkdir(parents=True, exist_ok=True)
        specs = plan_services(folder, self._settings, claims=self._claims, names=self._names)
        write_json_atomically(folder.settings_file, self._settings.to_json())
        ports = {spec.name: int(spec.address.rpartition(":")[2]) for spec in specs}
        last_ports = read_json(folder.ports_file) or {}
        write_json_atomically(folder.ports_file, {**last_ports, **ports})
        self._started_s = process_start_s(os.getpid()) or 0.0
        self._children = Children(record=folder.children_file)
        for spec in specs:
            spec.config_file.parent.mkdir(parents=True, exist_ok=True)
            spec.config_file.write_text(spec.config, encoding="utf-8")
            self._services[spec.name] = SupervisedService(
                spec, children=self._children, tell=self._tell, changed=self._write_cluster_file
            )
        for name, service in self._services.items():
            self._tasks[name] = asyncio.create_task(service.run(), name=f"service {name}")

    async def _wait_ready(self, timeout_s: float) -> None:
        end = asyncio.get_running_loop().time() + timeout_s
        for name, service in self._services.items():
            ready = asyncio.create_task(service.wait_ready(), name=f"wait for {name}")
            left_s = max(end - asyncio.get_running_loop().time(), 0.0)
            # Any service that fails ends the start, not only the one whose turn it is.
            done, _ = await asyncio.wait(
                [ready, *self._tasks.values()],
                timeout=left_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            ready.cancel()
            for task in done:
                if task is not ready:
                    task.result()
            if ready not in done:
                raise self._not_ready(service, timeout_s)

    def _not_ready(self, service: SupervisedService, timeout_s: float) -> CliError:
        log = service.spec.log_file
        return CliError(
            f"{service.spec.name} was not ready within {timeout_s:g} s; see {log}",
            exit_code=EXIT_FAILED,
            detail=log_tail(log),
        )

    def _write_cluster_file(self) -> None:
        if self._lock is None:
            return
        write_json_atomically(
            self._folder.cluster_file,
            {
                "pid": os.getpid(),
                "started_s": self._started_s,
                "background": self._background,
                "services": {name: item.describe() for name, item in self._services.items()},
            },
        )

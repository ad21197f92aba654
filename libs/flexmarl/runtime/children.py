"""Owner of a service's child processes (I15: no child outlives its parent).

In the child, `flexmarl.runtime.child_link` gives the other end of the link: `ChildLink` for code
that computes, `AsyncChildLink` for code with an event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flexmarl.runtime.child_process import ChildProcess, start_python_module
from flexmarl.runtime.child_record import ChildRecord, end_leftovers
from flexmarl.runtime.logging import get_logger
from flexmarl.runtime.preloader import Preloader

__all__ = ["ChildProcess", "Children", "end_leftovers"]

_log = get_logger(__name__)


class Children:
    """Starts children two ways, records them, and ends them all.

    A service calls `end_leftovers(record)` at start, before it binds ports or devices, and makes
    one `Children` for its lifetime.

    Args:
        preload: Modules that `spawn_preloaded` children find imported, such as `torch`.
        record: File that names the living children; None: no record.
        preload_env: Environment of the preloading process and so of its children, such as
            `{"OMP_NUM_THREADS": "1"}`, which libraries read when they are imported.
    """

    def __init__(
        self,
        *,
        preload: Sequence[str] = (),
        record: Path | None = None,
        preload_env: Mapping[str, str] | None = None,
    ) -> None:
        self._record = None if record is None else ChildRecord(record)
        self._alive: dict[int, ChildProcess] = {}
        self._preloader = Preloader(modules=preload, on_start=self._adopt, env=preload_env)
        self._closed = False

    async def start_preloading(self) -> None:
        """Begin to import the preloaded modules now rather than at the first child."""
        await self._preloader.start()

    async def spawn_exec(
        self,
        module: str,
        args: Sequence[str] = (),
        *,
        name: str,
        env: Mapping[str, str] | None = None,
        log_file: Path | None = None,
    ) -> ChildProcess:
        """Start `python -m module args` in a fresh interpreter.

        Args:
            module: Module to run as `__main__`.
            args: Its arguments.
            name: Shown in logs and in the record.
            env: On top of this process's environment.
            log_file: Takes stdout and stderr; None: they are this process's.
        """
        self._check_open()
        child = await start_python_module(module, args, name=name, env=env or {}, log_file=log_file)
        self._adopt(child)
        return child

    async def spawn_preloaded(
        self,
        target: str,
        args: Any = None,  # noqa: ANN401 - any JSON value
        *,
        name: str,
        env: Mapping[str, str] | None = None,
        log_file: Path | None = None,
    ) -> ChildProcess:
        """Fork a child, with the preloaded modules imported, that runs a function.

        Args:
            target: `module:function`; called with `args`, may return the exit code.
            args: JSON-able argument.
            name: Shown in logs and in the record.
            env: Set in the child before the function runs.
            log_file: Takes stdout and stderr; None: they are this process's.

        Raises:
            DomainError: CHILD_DIED, DEADLINE_EXCEEDED.
        """
        self._check_open()
        child = await self._preloader.spawn(
            target, args, name=name, env=env or {}, log_file=log_file
        )
        self._adopt(child)
        return child

    async def close(self, *, grace_s: float = 5.0) -> None:
        """End all children: SIGTERM, SIGKILL after `grace_s`."""
        self._closed = True
        zygote_pids = self._preloader.pids
        children = [child for pid, child in self._alive.items() if pid not in zygote_pids]
        await asyncio.gather(*(child.stop(grace_s=grace_s) for child in children))
        await self._preloader.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("a child was started after close")

    def _adopt(self, child: ChildProcess) -> None:
        self._alive[child.pid] = child
        if self._record is not None:
            self._record.add(pid=child.pid, name=child.name)
        _log.info("child_started", child=child.name, pid=child.pid)
        child.on_exit(self._ended)

    def _ended(self, child: ChildProcess) -> None:
        self._alive.pop(child.pid, None)
        if self._record is not None:
            self._record.remove(child.pid)
        _log.info("child_ended", child=child.name, pid=child.pid, exit_code=child.exit_code)

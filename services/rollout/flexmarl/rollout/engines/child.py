"""The process of one engine: frames in, steps, frames out.

Two threads. The reader waits for frames of the host (freed by a frame, or by the end of the link,
which also ends the process, I15) and queues the parsed commands. The main thread takes commands
between steps, and waits for one (or for a wake of the engine's own threads) while the engine has
nothing to do. The queue is bounded by what the host may have in flight; a full one stops the reader
and so the host.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from dataclasses import fields
from functools import partial
from typing import Any, Final

from flexmarl.api.rollout.v1.engine_pb2 import (
    EngineCommand,
    EngineEvent,
    EngineReady,
    Pong,
    ResultBatch,
)
from flexmarl.core.errors import DomainError
from flexmarl.rollout.engines.base import Engine, EngineBrokenError, EngineSettings
from flexmarl.rollout.engines.registry import build_engine
from flexmarl.rollout.engines.results import failure_of
from flexmarl.runtime.child_link import ChildLink

EXIT_MODEL_REFUSED: Final = 3
"""Exit code of an engine whose model cannot be built; its `EngineReady` said why."""

EXIT_BROKEN: Final = 5
"""Exit code of an engine that holds nothing that may be served."""

_MAX_QUEUED_COMMANDS: Final = 4096

_WAKE: Final = EngineCommand()
"""No command: the engine has something to do."""

_Commands = queue.Queue[EngineCommand | None]


def main(args: dict[str, Any]) -> int:
    """Run an engine until its host goes away.

    Args:
        args: Fields of `EngineSettings`.
    """
    settings = EngineSettings(**{field.name: args[field.name] for field in fields(EngineSettings)})
    link = ChildLink.from_environment()
    commands: _Commands = queue.Queue(_MAX_QUEUED_COMMANDS)
    try:
        engine = build_engine(settings, wake=partial(_wake, commands))
    except DomainError as error:
        ready = EngineReady(failure=failure_of(error))
        link.send(EngineEvent(ready=ready).SerializeToString())
        sys.stderr.write(f"engine {settings.instance_id}: {error}\n")
        return EXIT_MODEL_REFUSED
    link.send(EngineEvent(ready=engine.ready()).SerializeToString())
    try:
        return _run(engine, link, commands)
    except EngineBrokenError as error:
        sys.stderr.write(f"engine {settings.instance_id}: {error}\n")
        sys.stderr.flush()
        os._exit(EXIT_BROKEN)  # at once: threads of the engine may wait for what will not come


def _run(engine: Engine, link: ChildLink, commands: _Commands) -> int:
    threading.Thread(target=_read, args=(link, commands), name="reader", daemon=True).start()
    _serve(engine, link, commands)
    return 0


def _read(link: ChildLink, commands: _Commands) -> None:
    while (frame := link.recv()) is not None:
        commands.put(EngineCommand.FromString(frame))
    commands.put(None)


def _wake(commands: _Commands) -> None:
    with contextlib.suppress(queue.Full):  # then the engine is not asleep
        commands.put_nowait(_WAKE)


def _serve(engine: Engine, link: ChildLink, commands: _Commands) -> None:
    while True:
        due_in_s = engine.due_in_s
        if due_in_s is None or due_in_s > 0:
            with contextlib.suppress(queue.Empty):
                if not _handle(commands.get(timeout=due_in_s), engine, link):
                    return
        # What came meanwhile joins before the step. Only this thread takes from the queue.
        while not commands.empty():
            if not _handle(commands.get_nowait(), engine, link):
                return
        if results := engine.step():
            event = EngineEvent(results=ResultBatch(results=results))
            link.send(event.SerializeToString())


def _handle(command: EngineCommand | None, engine: Engine, link: ChildLink) -> bool:
    """Carry a command out; False at the end of the link."""
    if command is None:
        return False
    kind = command.WhichOneof("command")
    if kind == "generate":
        engine.submit(command.generate.requests)
    elif kind == "abort":
        engine.abort(command.abort.attempt_ids)
    elif kind == "ping":
        engine.check()
        link.send(EngineEvent(pong=Pong()).SerializeToString())
    elif kind == "load":
        link.send(EngineEvent(loaded=engine.load(command.load)).SerializeToString())
    return True

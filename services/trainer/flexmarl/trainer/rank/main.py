"""Entry points of the trainer's child processes: rank workers and the rendezvous."""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.client.mappings import KeptMappings
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.child_link import ChildLink
from flexmarl.runtime.logging import get_logger
from flexmarl.trainer.rank.bound_state import BoundStates
from flexmarl.trainer.rank.failures import told_apart
from flexmarl.trainer.rank.groups import Groups, join_numbering
from flexmarl.trainer.rank.handover import Keeper
from flexmarl.trainer.rank.memory import DeviceMemory
from flexmarl.trainer.rank.modules import Modules
from flexmarl.trainer.rank.prefetch import Prefetcher
from flexmarl.trainer.rank.reference import References
from flexmarl.trainer.rank.segments import SegmentFiles
from flexmarl.trainer.rank.state_files import StateFiles
from flexmarl.trainer.rank.transfers import transfers_of
from flexmarl.trainer.rank.warm import warm
from flexmarl.trainer.rank.worker import RankWorker

Execute = Callable[[rank_pb2.RankCommand, rank_pb2.RankReply], None]
"""Carries a command out and fills the reply."""

_log = get_logger(__name__)


def run_rank(args: dict[str, Any]) -> int:
    """Runs a rank worker: warms up, says so, then answers commands until the service is gone.

    Args:
        args: position, device, interface, threads, timeout_s, arena_bytes, max_arena_bytes,
            max_modules, max_reference_bytes, verify, warm.
    """
    link = ChildLink.from_environment()
    started = time.perf_counter()
    device = torch.device(args["device"])
    torch.set_num_threads(args["threads"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    join_numbering(args["position"], interface=args["interface"])
    memory = DeviceMemory(
        size_bytes=args["arena_bytes"], max_bytes=args["max_arena_bytes"], device=device
    )
    if args["warm"]:
        warm(position=args["position"], device=device, memory=memory, timeout_s=args["timeout_s"])
    worker, beside = _make_worker(args, memory, device)
    gc.collect()
    gc.freeze()  # imported modules are never garbage: later collections skip them
    ready = rank_pb2.RankReady(seconds=time.perf_counter() - started)
    link.send(rank_pb2.RankReply(ready=ready).SerializeToString())
    commands: queue.SimpleQueue[rank_pb2.RankCommand | None] = queue.SimpleQueue()
    threading.Thread(
        target=_receive, args=(link, commands, beside), name="commands", daemon=True
    ).start()
    # Waits for the service's next command; its end, however it comes, ends this process.
    while (command := commands.get()) is not None:
        link.send(_answer(partial(_execute, worker), command).SerializeToString())
    return 0


def run_rendezvous(args: dict[str, Any]) -> int:
    """Serves the one store that process groups of this trainer meet in.

    It is a process of its own, so that no rank's death takes it along.

    Args:
        args: timeout_s.
    """
    link = ChildLink.from_environment()
    link.send(rank_pb2.RankReply(ready=rank_pb2.RankReady()).SerializeToString())
    store: TCPStore | None = None
    while (frame := link.recv()) is not None:
        command = rank_pb2.RankCommand.FromString(frame)
        if store is None:
            store = TCPStore(
                command.serve_store.host,
                0,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=args["timeout_s"]),
            )
        delete_ended(store, command.serve_store.ended)
        reply = rank_pb2.RankReply(
            command_id=command.command_id,
            store_served=rank_pb2.RankStoreServed(port=store.port),
        )
        link.send(reply.SerializeToString())
    return 0


def delete_ended(store: TCPStore, prefixes: Sequence[str]) -> None:
    """Deletes what groups and handovers that have ended left in the store."""
    if prefixes:
        for key in store.list_keys():
            if key.lstrip("/").startswith(tuple(f"{prefix}/" for prefix in prefixes)):
                store.delete_key(key)


def _make_worker(
    args: dict[str, Any], memory: DeviceMemory, device: torch.device
) -> tuple[RankWorker, dict[str, Execute]]:
    """Makes what answers commands: the worker, and by kind those that do not wait for it."""
    groups = Groups(position=args["position"], device=device, timeout_s=args["timeout_s"])
    modules = Modules(groups, max_modules=args["max_modules"], device=device)
    segments, verify = SegmentFiles(KeptMappings()), args["verify"]
    files = StateFiles(segments, transfers_of(device), verify=verify)
    # Its own transfers: it works beside, and staging buffers are for one at a time.
    prefetcher = Prefetcher(memory, StateFiles(segments, transfers_of(device), verify=verify))
    keeper = Keeper(memory, prefetcher.loading, device=device, verify=verify)
    worker = RankWorker(
        modules=modules,
        memory=memory,
        files=files,
        states=BoundStates(
            modules=modules,
            memory=memory,
            files=files,
            prefetcher=prefetcher,
            device=device,
            verify=verify,
        ),
        references=References(max_bytes=args["max_reference_bytes"]),
        device=device,
    )
    return worker, {"prefetch": partial(_prefetch, prefetcher), "give": partial(_give, keeper)}


def _receive(
    link: ChildLink,
    commands: queue.SimpleQueue[rank_pb2.RankCommand | None],
    beside: Mapping[str, Execute],
) -> None:
    """Hands commands to the computing thread, which the service bounds; some are for this one."""
    while (frame := link.recv()) is not None:
        command = rank_pb2.RankCommand.FromString(frame)
        execute = beside.get(command.WhichOneof("command") or "")
        if execute is None:
            commands.put(command)
        else:
            link.send(_answer(execute, command).SerializeToString())
    commands.put(None)


def _answer(execute: Execute, command: rank_pb2.RankCommand) -> rank_pb2.RankReply:
    reply = rank_pb2.RankReply(command_id=command.command_id)
    try:
        execute(command, reply)
    except Exception as error:  # noqa: BLE001 - the edge of the process: the service decides
        kind = command.WhichOneof("command")
        known = told_apart(error)
        if known is not error:
            _log.exception("rank_command_failed", command=kind)
        if known is None:
            known = DomainError(ErrorReason.INTERNAL, f"{kind} failed in a rank; see its log")
        reply.failure.CopyFrom(
            common_pb2.Failure(
                reason=known.reason, message=known.message, metadata=dict(known.metadata)
            )
        )
    return reply


def _prefetch(
    prefetcher: Prefetcher, command: rank_pb2.RankCommand, reply: rank_pb2.RankReply
) -> None:
    reply.prefetched.CopyFrom(prefetcher.load(command.prefetch))


def _give(keeper: Keeper, command: rank_pb2.RankCommand, reply: rank_pb2.RankReply) -> None:
    reply.giving.CopyFrom(keeper.offer(command.give))


def _execute(worker: RankWorker, command: rank_pb2.RankCommand, reply: rank_pb2.RankReply) -> None:
    match command.WhichOneof("command"):
        case "gradients":
            reply.added.CopyFrom(worker.add(command.gradients))
        case "apply":
            reply.written.CopyFrom(worker.apply(command.apply))
        case "bind":
            reply.bound.CopyFrom(worker.bind(command.bind))
        case "export":
            reply.written.CopyFrom(worker.export(command.export))
        case "unbind":
            reply.unbound.CopyFrom(worker.unbind())
        case "forget":
            worker.forget(command.forget)
            reply.forgotten.SetInParent()
        case kind:
            raise ValueError(f"unknown command {kind}")

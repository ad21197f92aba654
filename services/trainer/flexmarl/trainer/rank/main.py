"""Entry points of the trainer's child processes: rank workers and the rendezvous."""

from __future__ import annotations

import gc
import time
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from flexmarl.api.common.v1alpha1 import common_pb2
from flexmarl.api.trainer.v1alpha1 import rank_pb2
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.child_link import ChildLink
from flexmarl.runtime.logging import get_logger
from flexmarl.trainer.rank.groups import join_numbering
from flexmarl.trainer.rank.warm import warm
from flexmarl.trainer.rank.worker import RankWorker

_log = get_logger(__name__)


def run_rank(args: dict[str, Any]) -> int:
    """Runs a rank worker: warms up, says so, then answers commands until the service is gone.

    Args:
        args: position, device, interface, threads, timeout_s, max_resident_bytes.
    """
    link = ChildLink.from_environment()
    started = time.perf_counter()
    device = torch.device(args["device"])
    torch.set_num_threads(args["threads"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    join_numbering(args["position"], interface=args["interface"])
    warm(position=args["position"], device=device, timeout_s=args["timeout_s"])
    worker = RankWorker(
        position=args["position"],
        device=device,
        timeout_s=args["timeout_s"],
        max_resident_bytes=args["max_resident_bytes"],
    )
    gc.collect()
    gc.freeze()  # imported modules are never garbage: later collections skip them
    ready = rank_pb2.RankReady(seconds=time.perf_counter() - started)
    link.send(rank_pb2.RankReply(ready=ready).SerializeToString())
    # Waits for the service's next command; its end, however it comes, ends this process.
    while (frame := link.recv()) is not None:
        link.send(_answer(worker, frame).SerializeToString())
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
        reply = rank_pb2.RankReply(
            command_id=command.command_id,
            store_served=rank_pb2.RankStoreServed(port=store.port),
        )
        link.send(reply.SerializeToString())
    return 0


def _answer(worker: RankWorker, frame: bytes) -> rank_pb2.RankReply:
    command = rank_pb2.RankCommand.FromString(frame)
    reply = rank_pb2.RankReply(command_id=command.command_id)
    try:
        _execute(worker, command, reply)
    except DomainError as error:
        reply.failure.CopyFrom(
            common_pb2.Failure(
                reason=error.reason, message=error.message, metadata=dict(error.metadata)
            )
        )
    except Exception:  # noqa: BLE001 - the edge of the process: the service decides what it means
        kind = command.WhichOneof("command")
        _log.exception("rank_command_failed", command=kind)
        reply.failure.CopyFrom(
            common_pb2.Failure(
                reason=ErrorReason.INTERNAL, message=f"{kind} failed in a rank; see its log"
            )
        )
    return reply


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
            worker.unbind()
            reply.unbound.SetInParent()
        case kind:
            raise ValueError(f"unknown command {kind}")

"""Two hosts try to make a process group: `flexmarl doctor --meet` runs it on both.

Rank 0 keeps the TCPStore, as a trainer does; both join a group over the named interface and reduce
one number: with gloo, or with NCCL on the first GPU of each host. Prints how long it took, as JSON;
on failure one line to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Make a process group with another host.")
    parser.add_argument("--address", required=True, help="host:port of rank 0")
    parser.add_argument("--rank", type=int, choices=(0, 1), required=True)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--interface", required=True)
    parser.add_argument("--timeout", type=float, default=30.0)
    args = parser.parse_args(argv)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = args.interface
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        seconds = _meet(args.address, args.rank, backend=args.backend, timeout_s=args.timeout)
    except (RuntimeError, ValueError, OSError) as error:  # torch's own are RuntimeErrors
        sys.stderr.write(f"{str(error).strip().splitlines()[0][:200]}\n")
        return 1
    sys.stdout.write(json.dumps({"seconds": seconds}) + "\n")
    return 0


def _meet(address: str, rank: int, *, backend: str, timeout_s: float) -> float:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    if backend == "nccl" and not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU on this host")
    device = torch.device("cuda:0" if backend == "nccl" else "cpu")
    host, _, port = address.rpartition(":")
    began = time.monotonic()
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(
        host, int(port), world_size=2, is_master=rank == 0, timeout=timeout, wait_for_workers=True
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timeout)
    number = torch.tensor([rank + 1.0], device=device)
    dist.all_reduce(number)
    total = number.item()  # waits for the device
    seconds = time.monotonic() - began
    dist.destroy_process_group()
    if total != 3.0:
        raise RuntimeError(f"the sum of ranks is {total:g} and should be 3")
    return seconds


if __name__ == "__main__":
    sys.exit(main())

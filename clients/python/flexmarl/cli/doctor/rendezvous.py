"""Whether two hosts can make a process group: each runs this at the same time, with its rank."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Final

from flexmarl.core.doctor import Finding, judge_rendezvous

_MODULE: Final = "flexmarl.trainer.rendezvous_check"
_IMPORT_S: Final = 60.0
"""Longest time to import torch, beside the wait for the other host."""


def meet(address: str, *, rank: int, backend: str, interface: str, timeout_s: float) -> Finding:
    """Meet the other rank and reduce a number with it, in a process of its own.

    Args:
        address: host:port of rank 0, which listens there.
        rank: 0 or 1.
        backend: "gloo", or "nccl" with the first GPU of each host.
        interface: Network interface to use, such as `eth0`.
        timeout_s: Longest wait for the other host.
    """
    if find_spec("flexmarl.trainer") is None or find_spec("torch") is None:
        why = "this installation has no trainer (pip install 'flexmarl[trainer]')"
        return judge_rendezvous(address, backend=backend, seconds=0.0, failure=why)
    command = [sys.executable, "-m", _MODULE, "--address", address, "--rank", str(rank)]
    command += ["--backend", backend, "--interface", interface, "--timeout", str(timeout_s)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s + _IMPORT_S, check=False
        )
    except subprocess.TimeoutExpired:
        why = "the other host did not answer"
        return judge_rendezvous(address, backend=backend, seconds=timeout_s, failure=why)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()
        why = said[-1] if said else f"exit code {done.returncode}"
        return judge_rendezvous(address, backend=backend, seconds=0.0, failure=why)
    seconds = float(json.loads(lines[-1])["seconds"])
    return judge_rendezvous(address, backend=backend, seconds=seconds, failure="")

"""The allocator keeps what large calls free: pages are not cleared again for each of them."""

from __future__ import annotations

import subprocess
import sys

_PROBE = """
import resource
from flexmarl.meg_store.allocator import keep_freed_memory

def calls():
    [b"x" * (2 << 20) for _ in range(16)]

keep_freed_memory()
calls()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    calls()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
_PAGES = (32 << 20) // 4096


def test_freed_memory_is_used_again_without_the_kernel():
    run = subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, check=True, timeout=30
    )
    assert int(run.stdout) < _PAGES  # ten times as many where it is given back after each

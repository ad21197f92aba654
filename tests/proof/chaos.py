"""Short runs, each with a process or two killed at random: `python -m proof.chaos --runs 100`.

Every run must leave what the undisturbed one left: the same tokens, weights equal to 1e-9, no row
lost or doubled, no process without a parent, no slot held. Ends with one line of counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from integration.cluster_harness import eventually
from proof.facts import Facts, differences
from proof.proof_cluster import VICTIMS, ProofCluster

from flexmarl.cli.cluster.restarts import MAX_RESTARTS, WINDOW_S

TOLERANCE = 1e-9
TWO_KILLS_SHARE = 0.3
GONE_S = 15.0
"""Longest time for the children of a killed process to end."""
NOTICED_S = 5.0
"""How much later than here the cluster may count a death."""


@dataclass
class Counts:
    """Sums over the runs."""

    runs: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    finished: int = 0
    consumed: int = 0
    void: int = 0
    lost: int = 0
    doubled: int = 0
    other_tokens: int = 0
    weights: float = 0.0
    orphans: int = 0
    held_slots: int = 0

    @property
    def good(self) -> bool:
        """Whether nothing of what must not happen happened."""
        bad = self.lost + self.doubled + self.other_tokens + self.orphans + self.held_slots
        adds_up = self.finished == self.consumed + self.void
        return not bad and adds_up and self.weights <= TOLERANCE

    def line(self) -> str:
        """All of it in one line."""
        kills = ", ".join(f"{name} {count}" for name, count in sorted(self.kills.items()))
        return (
            f"{self.runs} runs, {sum(self.kills.values())} kills ({kills}): "
            f"{self.finished} rows finished = {self.consumed} consumed + {self.void} void, "
            f"{self.lost} lost, {self.doubled} doubled, {self.other_tokens} calls with other "
            f"tokens, weights equal to {self.weights:.1e}, {self.orphans} orphans, "
            f"{self.held_slots} slots held"
        )


@dataclass
class Chaos:
    """Disturbs runs on a cluster."""

    cluster: ProofCluster
    seed: int
    overrides: tuple[str, ...] = ()
    counts: Counts = field(default_factory=Counts)
    _deaths: list[tuple[float, str]] = field(default_factory=list)

    async def go(self, num_runs: int) -> Counts:
        """Runs an undisturbed one, and then so many disturbed ones."""
        quiet, quiet_s = await self.cluster.run(f"quiet-{self.seed}-{os.getpid()}", *self.overrides)
        print(f"undisturbed: {quiet_s:.1f} s, {len(quiet.tokens)} calls", flush=True)
        for number in range(num_runs):
            rng = Random(f"{self.seed}/{number}")
            await self._one(number, quiet, quiet_s, rng)
        return self.counts

    async def _one(self, number: int, quiet: Facts, quiet_s: float, rng: Random) -> None:
        run_id = f"chaos-{self.seed}-{number}-{os.getpid()}"
        num_kills = 1 + (rng.random() < TWO_KILLS_SHARE)
        moments = sorted(rng.random() * quiet_s for _ in range(num_kills))
        killed: list[str] = []
        facts, took_s = await self.cluster.run(
            run_id, *self.overrides, beside=self._kill_at(moments, rng, killed)
        )
        orphans = await self._orphans()
        slots = await self.cluster.held_slots()
        tokens, weights = differences(quiet, facts)
        counts = self.counts
        counts.runs += 1
        counts.kills.update(name.partition("@")[0] for name in killed)
        counts.finished += facts.finished
        counts.consumed += facts.consumed
        counts.void += facts.void
        counts.lost += facts.lost
        counts.doubled += facts.doubled
        counts.other_tokens += tokens
        counts.weights = max(counts.weights, weights)
        counts.orphans += len(orphans)
        counts.held_slots += len(slots)
        what = " ".join(killed) or "nobody"
        verdict = "" if counts.good else "  <-- NOT WHOLE"
        print(f"{number:3d}  {took_s:5.1f} s  {what}  {weights:.0e}{verdict}", flush=True)
        for line in (*orphans, *slots):
            print(f"     left over: {line}", flush=True)

    async def _kill_at(self, moments: list[float], rng: Random, killed: list[str]) -> None:
        begun_s = time.monotonic()
        for moment in moments:
            await asyncio.sleep(max(begun_s + moment - time.monotonic(), 0.0))
            kind = await self._kill(rng)
            killed.append(f"{kind}@{moment:.1f}s")

    async def _kill(self, rng: Random) -> str:
        """Kills a living process; at the very start and end of a run some kinds have none."""
        while True:
            kind = rng.choice(sorted(VICTIMS))
            pids = [] if self._is_worn(kind) else self.cluster.victims(kind)
            if pids:
                self.cluster.note_processes()
                with contextlib.suppress(ProcessLookupError):  # it ended by itself meanwhile
                    os.kill(rng.choice(pids), signal.SIGKILL)
                    self._deaths.append((time.monotonic(), kind))
                    return kind
            await asyncio.sleep(0.01)

    def _is_worn(self, kind: str) -> bool:
        """Whether one more death would be one too many: the cluster gives up a crash loop."""
        since = time.monotonic() - WINDOW_S - NOTICED_S
        return sum(died > since for died, other in self._deaths if other == kind) >= MAX_RESTARTS

    async def _orphans(self) -> list[str]:
        with contextlib.suppress(AssertionError):
            await eventually(
                lambda: not self.cluster.orphans(), what="the last child", timeout_s=GONE_S
            )
        return self.cluster.orphans()


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m proof.chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="flexmarl-chaos-"))
    cluster = ProofCluster(folder / "cluster")
    chaos = Chaos(cluster, chosen.seed, tuple(chosen.set))
    cluster.up()
    try:
        asyncio.run(chaos.go(chosen.runs))
    finally:
        cluster.down()
        left = cluster.survivors()
        chaos.counts.orphans += len(left)
        shutil.rmtree(folder, ignore_errors=True)
    print(chaos.counts.line())
    return 0 if chaos.counts.good else 1


if __name__ == "__main__":
    sys.exit(main())

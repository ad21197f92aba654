"""Says whether the newest run below runs/ learnt, by its metrics.jsonl.

Usage: python scripts/check_metrics.py [RUN_FOLDER] --first-below 0.3 --last-above 0.9
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

LAST = 5
"""Versions at the end that are averaged: single ones go up and down."""


def newest_run(runs: Path) -> Path:
    """The run folder whose metrics were written last.

    Raises:
        SystemExit: There is none.
    """
    found = sorted(runs.glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    if not found:
        sys.exit(f"{runs}: no run with a metrics.jsonl")
    return found[-1].parent


def problems(
    rewards: list[float], *, versions: int | None, first_below: float, last_above: float
) -> list[str]:
    """What is wrong with a run's rewards; empty when it learnt."""
    if not rewards:
        return ["no version was trained"]
    last = sum(rewards[-LAST:]) / len(rewards[-LAST:])
    found = []
    if versions is not None and len(rewards) != versions:
        found.append(f"{len(rewards)} versions instead of {versions}")
    if not all(math.isfinite(reward) for reward in rewards):
        found.append("a reward is not finite")
    if not rewards[0] < first_below:
        found.append(f"version 0 has {rewards[0]:.3f}, not below {first_below}")
    if not last > last_above:
        found.append(f"the last {LAST} versions have {last:.3f}, not above {last_above}")
    return found


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--versions", type=int)
    parser.add_argument("--first-below", type=float, default=math.inf)
    parser.add_argument("--last-above", type=float, default=-math.inf)
    args = parser.parse_args()
    run = args.run or newest_run(Path("runs"))
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rewards = [float(json.loads(line)["team_reward"]) for line in lines]
    found = problems(
        rewards,
        versions=args.versions,
        first_below=args.first_below,
        last_above=args.last_above,
    )
    if found:
        sys.exit(f"{run}: " + "; ".join(found))
    tail = rewards[-LAST:]
    print(f"{run}: version 0 {rewards[0]:.3f}, last {len(tail)} {sum(tail) / len(tail):.3f}")


if __name__ == "__main__":
    main()

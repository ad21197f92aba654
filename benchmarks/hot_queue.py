"""What moving instances gains when one queue is hot: real services, engines that only take time.

Three policies with four instances each, one request per instance at a time; of all calls the first
policy gets 76 %, the others 12 % each. Without moves the first policy's four instances are the
bottleneck; with them at best all twelve work all the time, 2.28 times as fast.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.report import Report
from benchmarks.rollout import cluster
from benchmarks.teams import Team, TeamRun, copy_model
from flexmarl.client.rollout import RolloutClient
from flexmarl.client.store import StoreClient

SHARES: Final = {"a": 19, "b": 3, "c": 3}
"""Calls per sample: 76, 12 and 12 of a hundred."""
NUM_SAMPLES: Final = 96
CALL_S: Final = 0.05
"""Time of a call: much longer than all that is around it, so that only queues are compared."""
INSTANCES: Final = 4
TOKENS: Final = 10

TEAM = f"""
import random

SHARES = {SHARES!r}

async def team(ctx, query):
    agents = [name for name, count in SHARES.items() for _ in range(count)]
    random.Random(query["n"]).shuffle(agents)
    last = None
    for agent in agents:
        last = await ctx.call(agent, text="0123", after=last)

def reward(sample):
    return 1.0
"""


def run(report: Report) -> None:
    """Measures `rollout.hot_queue_speedup`."""
    still_s, moved_s, moves = asyncio.run(_measure())
    calls, instances = sum(SHARES.values()), INSTANCES * len(SHARES)
    limit = (SHARES["a"] / INSTANCES) / (calls / instances)
    report.figure(
        "rollout.hot_queue_speedup",
        still_s / moved_s,
        "ratio",
        against=f"no moves; limit {limit:.2f}",
        ratio=still_s / moved_s / limit,
        bound=">= 1.8",
    )
    ideal_s = NUM_SAMPLES * calls * CALL_S / instances
    report.note(
        f"rollout.hot_queue_speedup: {still_s:.1f} s without moves, {moved_s:.1f} s with {moves} "
        f"moves; {instances} instances without a pause would take {ideal_s:.1f} s"
    )


async def _measure() -> tuple[float, float, int]:
    with tempfile.TemporaryDirectory(prefix="flexmarl-bench-") as scratch:
        folder = Path(scratch)
        model = copy_model(folder / "model", max_context=64)
        async with cluster(folder) as (store, rollout, _):
            still_s, _ = await _run(store, rollout, _team("still", {"rule": "off"}), folder, model)
            moving = _team("moving", {"residence_s": 0.5})
            moved_s, moves = await _run(store, rollout, moving, folder, model)
    return still_s, moved_s, moves


async def _run(
    store: StoreClient, rollout: RolloutClient, team: Team, folder: Path, model: Path
) -> tuple[float, int]:
    run = TeamRun(store, rollout, team.config(folder, model=model))
    await run.open()
    took_s, status = await run.batch([{"n": n} for n in range(NUM_SAMPLES)])
    await run.close()
    return took_s, int(dict(status.counters).get("moves", 0))


def _team(name: str, balance: Mapping[str, Any]) -> Team:
    latency = {
        "prefill_tokens_per_s": 1e9, "decode_tokens_per_s": TOKENS / CALL_S,
        "load_s": 0.0, "move_s": 0.1,
    }  # fmt: skip
    serving = {
        "engine": "simulated", "simulated": latency, "instances": INSTANCES, "max_concurrency": 1,
    }  # fmt: skip
    return Team(
        name=name,
        source=TEAM,
        agents={p: {"policy": p, "prompt": "{text}>", "max_tokens": TOKENS} for p in SHARES},
        policies={p: {"rollout": serving} for p in SHARES},
        workflow={},
        rollout={"balance": balance},
    )

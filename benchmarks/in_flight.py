"""Ten thousand samples in flight: memory of each process, and how fast a call reaches its engine.

Prompts of 1 KiB, no two samples' alike, of about 200 tokens as language models have them; engines
that only take time: each call holds its place for so long that about 1,500 end per second. What a
call waits is what lies between its readiness and its row, less what its engine took: the way there
and back.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Final

import psutil

from benchmarks.report import Report
from benchmarks.rollout import cluster
from benchmarks.teams import Team, TeamRun, copy_model
from flexmarl.client.store import StoreClient

IN_FLIGHT: Final = 10_000
RATE: Final = 1500
HOLD_S: Final = IN_FLIGHT / RATE
VOCABULARY: Final = 1000
PROMPT_WORDS: Final = 205
"""Words of four letters and a space each: 1 KiB."""
CALLS: Final = 3
_TOKENS: Final = 4
_MIB: Final = 1 << 20

TEAM = f"""
import asyncio

WORDS = [f"w{{n:03}}" for n in range({VOCABULARY})] * 2

async def team(ctx, query):
    await asyncio.sleep(query["after_s"])  # arrivals are spread as ends are
    last = None
    for n in range({CALLS}):
        first = (query["n"] + 7 * n) % {VOCABULARY}
        text = " ".join(WORDS[first : first + {PROMPT_WORDS}])
        last = await ctx.call("agent", text=text, after=last)

def reward(sample):
    return 1.0
"""


def run(report: Report) -> None:
    """Measures `rollout.inflight_rss_mib` and `rollout.inflight_dispatch_p99_ms`."""
    rss_mib, waits_ms, rate = asyncio.run(_measure())
    most = max(rss_mib, key=lambda name: rss_mib[name])
    size = f"{IN_FLIGHT:,} samples in flight"
    report.figure(
        "rollout.inflight_rss_mib", rss_mib[most], "MiB", against=f"{size}; {most}", bound="<= 256"
    )
    p99 = waits_ms[int(0.99 * len(waits_ms))]
    report.figure("rollout.inflight_dispatch_p99_ms", p99, "ms", against=size, bound="<= 20")
    shares = ", ".join(f"{name} {mib:.0f}" for name, mib in rss_mib.items())
    median = waits_ms[len(waits_ms) // 2]
    report.note(
        f"rollout.inflight: {rate:.0f} vertices/s, median wait {median:.1f} ms; MiB: {shares}"
    )


async def _measure() -> tuple[dict[str, float], list[float], float]:
    latency = {
        "prefill_tokens_per_s": 1e9, "decode_tokens_per_s": _TOKENS / HOLD_S,
    }  # fmt: skip
    serving = {"engine": "simulated", "simulated": latency, "max_concurrency": IN_FLIGHT}
    team = Team(
        name="inflight",
        source=TEAM,
        agents={"agent": {"policy": "p", "prompt": "{text}", "max_tokens": _TOKENS}},
        policies={"p": {"rollout": serving}},
        workflow={"max_samples_per_worker": IN_FLIGHT},
        rollout={},
    )
    with tempfile.TemporaryDirectory(prefix="flexmarl-bench-") as scratch:
        folder = Path(scratch)
        model = _write_words(copy_model(folder / "model", max_context=2048))
        async with cluster(folder) as (store, rollout, pids):
            run = TeamRun(store, rollout, team.config(folder, model=model))
            await run.open()
            batch = asyncio.create_task(
                run.batch([{"n": n, "after_s": n / RATE} for n in range(IN_FLIGHT)])
            )
            rss_mib: dict[str, float] = {}
            while not batch.done():
                await asyncio.sleep(0.5)
                for name, mib in _rss_mib(pids).items():
                    rss_mib[name] = max(rss_mib.get(name, 0.0), mib)
            took_s, _ = await batch
            waits_ms = await _waits_ms(store)
            await run.close()
    return rss_mib, sorted(waits_ms), IN_FLIGHT * CALLS / took_s


def _write_words(model: Path) -> Path:
    """Makes words the model's tokens; the quickstart's are letters, which no language model has."""
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel", "unk_token": "w000",
            "vocab": {f"w{n:03}": n for n in range(VOCABULARY)},
        },
    }  # fmt: skip
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((model / "config.json").read_text())
    config["vocab_size"] = VOCABULARY
    (model / "config.json").write_text(json.dumps(config))
    return model


async def _waits_ms(store: StoreClient) -> list[float]:
    """From readiness to row, less the engine's time, of some calls of every tenth sample."""
    waits: list[float] = []
    samples = await store.list_samples("inflight", batch=0)
    for sample in samples[:: max(len(samples) // 500, 1)]:
        graph = await store.get_sample_graph("inflight", sample.sample_id)
        for vertex in graph.vertices:
            meta = vertex.meta
            waits.append((meta.finished_unix_ns - meta.ready_unix_ns) / 1e6 - HOLD_S * 1e3)
    return waits


def _rss_mib(pids: dict[str, int]) -> dict[str, float]:
    """Memory of each process that is a process of its own: what it does not share."""
    found: dict[str, float] = {}
    for name, pid in pids.items():
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            label = name if process.pid == pid else f"{name} child"
            try:
                used = process.memory_full_info().uss / _MIB
            except psutil.NoSuchProcess:
                continue
            found[label] = max(found.get(label, 0.0), used)
    return found

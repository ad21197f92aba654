"""Ten thousand samples in flight: memory of each process, and how fast a call reaches its engine.

Prompts of 1 KiB, no two samples' alike, of about 200 tokens as language models have them; engines
that only take time: each call holds its place for so long that as many end per second as are asked
for. What a call waits is what lies between its readiness and its row, less what its engine took:
the way there and back. Where fewer than asked for are served, calls wait for each other; a lower
rate beside it tells the way from the queue.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.report import Report
from benchmarks.rollout import cluster
from benchmarks.teams import Team, TeamRun, copy_model
from flexmarl.client.store import StoreClient

IN_FLIGHT: Final = 10_000
RATES: Final = (1500, 400)
"""Calls per second that end, as far as they can be served: what is asked for, and a calm pace."""
VOCABULARY: Final = 1000
PROMPT_WORDS: Final = 205
"""Words of four letters and a space each: 1 KiB."""
CALLS: Final = 3
_TOKENS: Final = 4
_LOOK_S: Final = 1.0
_STEADY: Final = (0.2, 0.8)
"""Shares of the calls between which the rate is read: before it rises, afterwards it falls."""
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


@dataclass(slots=True)
class Measured:
    """One measurement.

    Attributes:
        rss_mib: Largest memory by process.
        waits_ms: What calls waited, sorted.
        rate: Calls per second while most samples are in flight.
    """

    rss_mib: dict[str, float]
    waits_ms: list[float]
    rate: float

    def wait_ms(self, share: float) -> float:
        """What this share of the calls waited at most."""
        return self.waits_ms[int(share * len(self.waits_ms))]


def run(report: Report) -> None:
    """Measures `rollout.inflight_rss_mib` and `rollout.inflight_dispatch_p99_ms`."""
    size = f"{IN_FLIGHT:,} samples in flight"
    for rate in RATES:
        measured = asyncio.run(_measure(rate))
        asked = rate == RATES[0]
        name = "rollout.inflight_dispatch_p99_ms" + ("" if asked else f"_{rate}")
        against = f"{size}, {rate:,} calls/s offered"
        if asked:
            most = max(measured.rss_mib, key=lambda process: measured.rss_mib[process])
            report.figure(
                "rollout.inflight_rss_mib", measured.rss_mib[most], "MiB",
                against=f"{size}; {most}", bound="<= 256",
            )  # fmt: skip
            report.figure(
                "rollout.inflight_vertices_per_s", measured.rate, "1/s", against=against,
                bound=f"~ {rate:,}",
            )  # fmt: skip
        report.figure(name, measured.wait_ms(0.99), "ms", against=against, bound="<= 20")
        shares = ", ".join(f"{process} {mib:.0f}" for process, mib in measured.rss_mib.items())
        report.note(
            f"rollout.inflight, {rate:,}/s offered: {measured.rate:.0f} vertices/s, median wait "
            f"{measured.wait_ms(0.5):.1f} ms; MiB: {shares}"
        )


async def _measure(rate: int) -> Measured:
    hold_s = IN_FLIGHT / rate
    latency = {
        "prefill_tokens_per_s": 1e9, "decode_tokens_per_s": _TOKENS / hold_s,
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
            queries = [{"n": n, "after_s": n / rate} for n in range(IN_FLIGHT)]
            batch = asyncio.create_task(run.batch(queries))
            rss_mib: dict[str, float] = {}
            ended: list[tuple[float, float]] = []
            while not batch.done():
                await asyncio.sleep(_LOOK_S)
                counters = (await run.status()).counters
                ended.append((time.perf_counter(), counters.get("vertices", 0.0)))
                for name, mib in _rss_mib(pids).items():
                    rss_mib[name] = max(rss_mib.get(name, 0.0), mib)
            await batch
            waits_ms = await _waits_ms(store, hold_s)
            await run.close()
    return Measured(rss_mib, sorted(waits_ms), _steady_rate(ended))


def _steady_rate(ended: list[tuple[float, float]]) -> float:
    """Calls per second, of a count that was read from time to time."""
    low, high = (share * IN_FLIGHT * CALLS for share in _STEADY)
    steady = [look for look in ended if low <= look[1] <= high]
    (began, first), (until, last) = steady[0], steady[-1]
    return (last - first) / (until - began)


def _write_words(model: Path) -> Path:
    """Makes words the model's tokens; the quickstart's are letters, which no language model has."""
    tokenizer: dict[str, Any] = {
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


async def _waits_ms(store: StoreClient, hold_s: float) -> list[float]:
    """From readiness to row, less the engine's time, of the calls of some samples."""
    waits: list[float] = []
    samples = await store.list_samples("inflight", batch=0)
    for sample in samples[:: max(len(samples) // 500, 1)]:
        graph = await store.get_sample_graph("inflight", sample.sample_id)
        for vertex in graph.vertices:
            meta = vertex.meta
            waits.append((meta.finished_unix_ns - meta.ready_unix_ns) / 1e6 - hold_s * 1e3)
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

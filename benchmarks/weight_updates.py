"""How long new weights take from their announcement to verified service on all instances.

The real path: sealed segments in the store's memory tier, announced to the dispatcher, fetched by
the engine host, checked by content in each engine and copied into its model. Two instances of a
135M model in bfloat16; with vLLM in an interpreter of its own (`make vllm`) also on vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import deserialize

from benchmarks.report import Report
from benchmarks.rollout import cluster, open_run
from flexmarl.api.meg_store.v1.graph_pb2 import Manifest, PolicyManifest
from flexmarl.api.rollout.v1.engine_pb2 import INSTANCE_STATE_SERVING
from flexmarl.client.buffers import BufferSpec
from flexmarl.client.rollout import RolloutClient
from flexmarl.client.store import StoreClient

RUN = "bench"
ROOT = Path(__file__).parents[1]
MODEL = ROOT / "models/cache/smollm2-135m-instruct"
VLLM_PYTHON = ROOT / ".venv-vllm/bin/python"
INSTANCES = 2
UPDATES = 6


def run(report: Report) -> None:
    """Measures the embedded engine, and vLLM where it is installed."""
    if not (MODEL / "model.safetensors").exists():
        report.note(f"weights.update_s: not measured, no model in {MODEL} (`make gsm8k` makes it)")
        return
    weights = _read(MODEL / "model.safetensors")
    report.note(_floors(weights))
    _measure(report, "weights.update_s", weights, engine="transformers", bound="<= 1.0")
    if VLLM_PYTHON.exists():
        _measure(report, "weights.update_vllm_s", weights, engine="vllm", bound="<= 1.0")
    else:
        report.note("weights.update_vllm_s: not measured, `make vllm` installs vLLM")


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights as they lie in its file."""

    specs: list[BufferSpec]
    data: list[bytes]

    @property
    def size_bytes(self) -> int:
        """Of all of them."""
        return sum(map(len, self.data))


def _read(path: Path) -> Weights:
    read: Any = deserialize  # safetensors is untyped
    found: list[tuple[str, dict[str, Any]]] = read(path.read_bytes())
    found.sort(key=lambda item: item[0])
    specs = [BufferSpec(name, entry["dtype"], tuple(entry["shape"])) for name, entry in found]
    return Weights(specs, [bytes(entry["data"]) for _, entry in found])


def _measure(report: Report, name: str, weights: Weights, *, engine: str, bound: str) -> None:
    report.progress(f"{name}: {INSTANCES} instances of engine {engine}")
    times = asyncio.run(_updates(weights, engine))
    report.figure(name, statistics.median(times), "s", bound=bound)
    each = ", ".join(f"{seconds:.2f}" for seconds in times)
    report.note(f"{name}: {weights.size_bytes / 2**20:.0f} MiB; each of {len(times)}: {each}")


async def _updates(weights: Weights, engine: str) -> list[float]:
    """Seconds of each update after the first."""
    with tempfile.TemporaryDirectory(prefix="flexmarl-bench-") as scratch:
        folder = Path(scratch)
        host = [f"vllm_python={VLLM_PYTHON}"] if engine == "vllm" else []
        async with _opened(folder, engine, host) as (store, rollout):
            times = []
            for version in range(UPDATES + 1):
                manifest = await _publish(store, weights, version)
                started = time.perf_counter()
                await rollout.activate_version(RUN, manifest, term=1)
                await _served(rollout, manifest.policies["p"].weights_hash)
                times.append(time.perf_counter() - started)
    return times[1:]  # the first waits for the engines to start


@contextlib.asynccontextmanager
async def _opened(
    folder: Path, engine: str, host: list[str]
) -> AsyncIterator[tuple[StoreClient, RolloutClient]]:
    async with cluster(folder, host=host) as (store, rollout, _):
        policy = {
            "model": {"path": str(MODEL)},
            "rollout": {
                "engine": engine, "instances": INSTANCES, "dtype": "bfloat16",
                "max_context": 512, "max_concurrency": 4, "kv_cache_bytes": 64 << 20,
            },
        }  # fmt: skip
        await open_run(store, rollout, folder, policy=policy)
        yield store, rollout


async def _publish(store: StoreClient, weights: Weights, version: int) -> Manifest:
    writer = await store.allocate_segment(RUN, f"{RUN}.p.v{version}", weights.specs)
    for spec, data in zip(weights.specs, weights.data, strict=True):
        writer.buffers[spec.name].data[:] = data
    # Another content each time: the last bits of one parameter.
    writer.buffers[weights.specs[0].name].data[0] ^= version
    content = writer.content_hash()
    ref = await writer.seal(checksum=content)
    policies = {"p": PolicyManifest(weights=ref, weights_hash=content)}
    return Manifest(version=version, policies=policies)


async def _served(rollout: RolloutClient, weights_hash: str) -> None:
    async with asyncio.timeout(180):
        while True:
            status = await rollout.get_status(RUN)
            if status.HasField("fatal"):
                raise RuntimeError(status.fatal.message)
            serving = [
                instance
                for instance in status.instances
                if instance.state == INSTANCE_STATE_SERVING
                and instance.weights_hash == weights_hash
            ]
            if len(serving) == INSTANCES:
                return
            await asyncio.sleep(0.005)


def _floors(weights: Weights) -> str:
    """What hashing and copying the bytes cost here, on one core."""
    whole = b"".join(weights.data)
    started = time.perf_counter()
    hashlib.sha256(whole).digest()
    hashed = time.perf_counter()
    bytearray(whole)
    copied = time.perf_counter()
    return (
        f"weights.*: floor of the same bytes on one of {os.cpu_count()} cores: "
        f"sha256 {hashed - started:.2f} s, copy into fresh memory {copied - hashed:.2f} s"
    )

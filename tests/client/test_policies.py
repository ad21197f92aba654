"""Which version of a policy can be exported, and what is said of those that cannot."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from meg_store.store_harness import RUN, a_run, serving

from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.client.buffers import Buffer, BufferSpec
from flexmarl.client.bundle import folder_hash
from flexmarl.client.policies import export_policy
from flexmarl.core.errors import DomainError


async def commit_versions(store, shard, count: int) -> None:
    """Versions of one policy, each on disk before the next one comes."""
    term = await store.acquire_term(RUN, "orchestrator", holder="test")
    for version in range(count):
        key = f"w{version}"
        data = Buffer(BufferSpec("w", "F32", (16,)), memoryview(bytes([version]) * 64))
        weights = await store.set(RUN, key, [data])
        policies = {"p": graph.PolicyManifest(weights=weights, state_version=version)}
        manifest = graph.Manifest(version=version, term=term, policies=policies)
        await store.commit(RUN, manifest, expected_version=version - 1 if version else None)
        while not shard.segments.is_on_disk([key]):  # noqa: ASYNC110 - the copy has no event
            await asyncio.sleep(0.01)


async def test_lost_weights_name_the_version_that_is_whole(tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "one"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    model = graph.ModelRef(path=str(base), content_hash=folder_hash(base))

    async def export(store, version: int | None) -> int:
        out = tmp_path / f"out-{version}"
        shutil.rmtree(out, ignore_errors=True)
        cache = tmp_path / "cache"
        return await export_policy(store, RUN, "p", out=out, cache_dir=cache, version=version)

    async with serving(folder, state_to_disk_every=1, retain_versions=2) as (store, shard):
        await store.create_run(a_run(models={"p": model}))
        await commit_versions(store, shard, 3)
        assert await export(store, None) == 2
        with pytest.raises(DomainError, match=r"version 0\b.* not kept"):
            await export(store, 0)
        copies = [Path(shard.segments.find(key).view.disk_path) for key in ("w2", "w1")]
    copies[0].unlink()  # version 2 had not come that far when the host was lost
    async with serving(folder) as (store, _):
        with pytest.raises(DomainError, match=r"version 2 are lost: .* whole is 1: ask for that"):
            await export(store, None)
        assert await export(store, 1) == 1
    copies[1].unlink()
    async with serving(folder) as (store, _):
        with pytest.raises(DomainError, match=r"no version is whole: .* train the run anew"):
            await export(store, 1)

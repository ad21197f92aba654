"""Committed weights of a policy, from the store into a Hugging Face folder."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from contextlib import AsyncExitStack
from pathlib import Path

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.client.adapter import LoraShape, adapter_of
from flexmarl.client.buffers import Buffer
from flexmarl.client.bundle import materialise
from flexmarl.client.errors import NotFoundError
from flexmarl.client.export import write_hf_folder
from flexmarl.client.segments import SegmentReader
from flexmarl.client.store import StoreClient
from flexmarl.client.tensor_files import TensorBytes
from flexmarl.core.errors import DomainError, ErrorReason


async def export_policy(
    store: StoreClient,
    run_id: str,
    policy: str,
    *,
    out: Path,
    cache_dir: Path,
    version: int | None = None,
    replace: bool = False,
) -> int:
    """Write a policy's weights at a version as a folder that `AutoModelForCausalLM` loads.

    Those of a policy with `lora` are merged; its adapter lies beside them, in `adapter`, as `peft`
    loads it over the base model.

    Args:
        store: Store on this node: the weights segment is read from where it is mapped.
        run_id: Run.
        policy: Policy.
        out: Folder to make; it appears whole or not at all.
        cache_dir: Where the base model is unpacked when it is not at its path.
        version: Version; None: the newest.
        replace: Take the place of a folder that is there already.

    Returns:
        The version.

    Raises:
        DomainError: NOT_FOUND naming the version or policy; ALREADY_EXISTS; MODEL_INVALID.
    """
    run = await store.get_run(run_id)
    manifest = await store.get_manifest(run_id, version=version)
    entry = _entry(manifest, run_id, policy, version)
    assert manifest is not None, "there is an entry of it"
    base = await materialise(store, run.models[policy], cache_dir)
    metadata = {
        "run": run_id,
        "policy": policy,
        "version": str(manifest.version),
        "weights_hash": entry.weights_hash,
    }
    lora = _lora_of(run, policy)
    async with AsyncExitStack() as opened:

        async def read(key: str) -> Collection[Buffer]:
            segment = await _open(store, run_id, policy, manifest.version, key)
            return (await opened.enter_async_context(segment)).buffers.values()

        weights = await read(entry.weights.key)
        adapter = None
        if lora is not None:
            state = await read(entry.master.key)
            adapter = adapter_of(state, shape=lora, base_model=run.models[policy].path)
        await asyncio.to_thread(
            write_hf_folder,
            [
                TensorBytes(part.name, part.spec.dtype, part.spec.shape, part.data)
                for part in weights
            ],
            base_model=base,
            out=out,
            metadata=metadata,
            adapter=adapter,
            replace=replace,
        )
    return manifest.version


def _lora_of(run: graph_pb2.Run, policy: str) -> LoraShape | None:
    policies = json.loads(run.config_json).get("policies", {})
    lora = policies.get(policy, {}).get("lora")
    return None if lora is None else LoraShape(**lora)


async def _open(
    store: StoreClient, run_id: str, policy: str, version: int, key: str
) -> SegmentReader:
    try:
        return await store.open_segment(run_id, key, holder="export")
    except NotFoundError:
        why = await _why_gone(store, run_id, version)
        raise DomainError(
            ErrorReason.NOT_FOUND,
            f"the weights of {policy} at version {version} {why}",
            {"run": run_id, "policy": policy, "version": str(version)},
        ) from None


async def _why_gone(store: StoreClient, run_id: str, version: int) -> str:
    """What became of the weights of a version, and what to do."""
    answer = await store.find_whole_versions(run_id)
    if not answer.HasField("newest_whole"):
        return "are lost, and no version is whole: they were in memory alone; train the run anew"
    newest = answer.newest_whole
    if version < newest:
        return (
            "are not kept any more; the store keeps those of the newest versions "
            f"(store.retain_versions), the newest is {newest}"
        )
    return (
        "are lost: they were in memory alone when its host was started anew or the folder copied; "
        f"the newest version that is whole is {newest}: ask for that one"
    )


def _entry(
    manifest: graph_pb2.Manifest | None, run_id: str, policy: str, version: int | None
) -> graph_pb2.PolicyManifest:
    if manifest is None:
        which = "any version" if version is None else f"version {version}"
        raise DomainError(
            ErrorReason.NOT_FOUND,
            f"run {run_id} has not committed {which}, or its weights are not kept any more",
            {"run": run_id},
        )
    if policy not in manifest.policies:
        known = ", ".join(sorted(manifest.policies))
        raise DomainError(
            ErrorReason.NOT_FOUND,
            f"run {run_id} has no policy {policy!r}; it has: {known}",
            {"run": run_id, "policy": policy},
        )
    return manifest.policies[policy]

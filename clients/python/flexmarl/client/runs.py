"""Storing a run: its workflow package, dataset and models become objects, its row names them."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.client.bundle import MAX_BUNDLE_BYTES, folder_hash, folder_size, pack_folder
from flexmarl.client.store import StoreClient
from flexmarl.core.errors import DomainError, ErrorReason

SourceT = TypeVar("SourceT", bound=Path | bytes)

MAX_DATASET_BYTES: Final = 1 << 30
"""Largest dataset that is stored with a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSource:
    """What a run is made of, on the submitting host.

    Attributes:
        run_id: Id of the run.
        config_json: Resolved configuration.
        portable_config_json: The same without paths of this host, for the content hash.
        package: Workflow package folder.
        exclude: Paths in it that are no part of it, such as the output of earlier runs.
        dataset: Dataset file, or its content.
        held_out: Queries of the evaluation that are no part of the dataset; None: there are none.
        models: Base model folder of each policy.
        vertex_events: Whether every vertex is an event.
    """

    run_id: str
    config_json: bytes
    portable_config_json: bytes
    package: Path
    exclude: Sequence[Path]
    dataset: Path | bytes
    models: Mapping[str, Path]
    held_out: bytes | None = None
    vertex_events: bool = False


def check_source(source: RunSource) -> None:
    """Whether everything can be stored, before anything is started for it.

    Raises:
        DomainError: A file is too large, or a link or special file; named.
    """
    folder_size(source.package, exclude=source.exclude, max_bytes=MAX_BUNDLE_BYTES)
    _checked_dataset(source.dataset)
    _checked_dataset(source.held_out or b"")
    for folder in sorted(set(source.models.values())):
        folder_size(folder, follow_links=True)


async def store_run(
    store: StoreClient, source: RunSource, *, shards: Sequence[common_pb2.ShardAddress]
) -> graph_pb2.Run:
    """Upload a run's objects and create its row; doing it again changes nothing.

    Raises:
        DomainError: A file is too large or a link; or the store has another run under that id.
    """
    with tempfile.TemporaryDirectory(prefix="flexmarl-bundle-") as scratch:
        archive = Path(scratch) / "workflow.tar"
        packed = await asyncio.to_thread(
            pack_folder, source.package, archive, exclude=source.exclude
        )
        bundle = await store.put_object(archive)
        dataset = await store.put_object(_checked_dataset(source.dataset))
        held_out = None
        if source.held_out is not None:
            held_out = await store.put_object(_checked_dataset(source.held_out))
        models = await _store_models(store, source.models, Path(scratch))
    parts = [source.portable_config_json, packed.content_hash.encode(), dataset.checksum.encode()]
    if held_out is not None:
        parts.append(held_out.checksum.encode())
    parts += [f"{name} {ref.content_hash}".encode() for name, ref in sorted(models.items())]
    run = graph_pb2.Run(
        run_id=source.run_id,
        config_json=source.config_json,
        content_hash=_hash_parts(parts),
        shards=shards,
        workflow_bundle=bundle,
        dataset=dataset,
        evaluation_dataset=held_out,
        models=models,
        vertex_events=source.vertex_events,
    )
    return await store.create_run(run)


async def _store_models(
    store: StoreClient, folders: Mapping[str, Path], scratch: Path
) -> dict[str, graph_pb2.ModelRef]:
    by_folder: dict[Path, graph_pb2.ModelRef] = {}
    for number, folder in enumerate(sorted(set(folders.values()))):
        by_folder[folder] = await _store_model(store, folder, scratch / f"model{number}.tar")
    return {name: by_folder[folder] for name, folder in folders.items()}


async def _store_model(store: StoreClient, folder: Path, archive: Path) -> graph_pb2.ModelRef:
    if await asyncio.to_thread(folder_size, folder, follow_links=True) > MAX_BUNDLE_BYTES:
        # Too large to store with the run: every host has to show the same folder.
        content_hash = await asyncio.to_thread(folder_hash, folder, follow_links=True)
        return graph_pb2.ModelRef(path=str(folder), content_hash=content_hash)
    packed = await asyncio.to_thread(pack_folder, folder, archive, follow_links=True)
    ref = graph_pb2.ModelRef(
        path=str(folder),
        content_hash=packed.content_hash,
        archive=await store.put_object(archive),
    )
    await asyncio.to_thread(archive.unlink)
    return ref


def _checked_dataset(source: SourceT) -> SourceT:
    size = source.stat().st_size if isinstance(source, Path) else len(source)
    if size > MAX_DATASET_BYTES:
        name = source if isinstance(source, Path) else "of the run"
        raise DomainError(
            ErrorReason.DATASET_INVALID,
            f"dataset {name} has {size} bytes, more than {MAX_DATASET_BYTES}; split it",
        )
    return source


def _hash_parts(parts: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return f"sha256:{digest.hexdigest()}"

"""A version of the whole team in a folder: every policy as a Hugging Face model.

    <folder>/v0000010/checkpoint.json
    <folder>/v0000010/<policy>/config.json, model.safetensors, tokenizer ...

A checkpoint is made beside its place and appears by one rename, with all of it on disk; older ones
are deleted afterwards only. So a crash at any moment leaves those before whole, and what it cut is
told by its name and swept by the next one.

A version's number may come again: in a run that returned to an older version, and in one under the
id of a run that was deleted. So a checkpoint says whose it is and of which weights. Those that a
return gave up are deleted like old ones; those of another run are set aside under another name, and
neither count nor are deleted.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any, Final

from flexmarl.client.policies import export_policy
from flexmarl.client.store import StoreClient
from flexmarl.core.checkpoints import CheckpointRule
from flexmarl.core.ids import check_name

DESCRIPTION: Final = "checkpoint.json"
_UNFINISHED: Final = ".unfinished-"


async def write_checkpoint(
    store: StoreClient,
    run_id: str,
    version: int,
    *,
    policies: list[str],
    folder: Path,
    cache_dir: Path,
    rule: CheckpointRule,
) -> Path:
    """Write a version of some policies and delete what the rule does not keep.

    Args:
        store: Store on this node.
        run_id: Run.
        version: Committed version whose weights are kept still.
        policies: Policies to write.
        folder: Where the run's checkpoints lie; nobody else writes there meanwhile.
        cache_dir: Where base models are unpacked when they are not at their path.
        rule: How many are kept, those of earlier starts included.

    Returns:
        The checkpoint; one of the same weights that is there already is left as it is.

    Raises:
        DomainError: NOT_FOUND when the weights are not kept any more; MODEL_INVALID.
        OSError: The folder cannot be written.
        ValueError: A policy's name is none, and might lead out of the folder.
    """
    for policy in policies:
        check_name(policy, what="policy")
    run = await store.get_run(run_id)
    manifest = await store.get_manifest(run_id, version=version)
    entries = {} if manifest is None else manifest.policies
    description = {
        "run": run_id,
        "created_unix_ns": run.created_unix_ns,
        "version": version,
        "policies": policies,
        "weights": {name: entries[name].weights_hash for name in policies if name in entries},
    }
    place = folder / f"v{version:07d}"
    await asyncio.to_thread(_sweep, folder)
    await asyncio.to_thread(_set_aside, folder, run.created_unix_ns)
    if _read(place) != description:
        made = folder / f"{_UNFINISHED}{place.name}-{uuid.uuid4().hex}"
        try:
            for policy in policies:
                await export_policy(
                    store, run_id, policy, out=made / policy, cache_dir=cache_dir, version=version
                )
            await asyncio.to_thread(_publish, made, place, description)
        finally:
            await asyncio.to_thread(shutil.rmtree, made, ignore_errors=True)
    await asyncio.to_thread(_retire, folder, rule, version)
    return place


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Returns the complete checkpoints of a folder by version, oldest first."""
    found = {}
    for description in folder.glob(f"v*/{DESCRIPTION}"):
        number = description.parent.name[1:]
        if number.isdigit():
            found[int(number)] = description.parent
    return dict(sorted(found.items()))


def _read(place: Path) -> dict[str, Any]:
    """What a checkpoint says of itself; nothing where there is none."""
    try:
        found = json.loads((place / DESCRIPTION).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _set_aside(folder: Path, created_unix_ns: int) -> None:
    """Renames what an earlier run under the same id has written."""
    for place in checkpoints_in(folder).values():
        created = _read(place).get("created_unix_ns", created_unix_ns)
        if created != created_unix_ns:
            place.rename(folder / f"{place.name}-of-{created}-{uuid.uuid4().hex[:8]}")


def _publish(made: Path, place: Path, description: dict[str, Any]) -> None:
    text = json.dumps(description, indent=2)
    (made / DESCRIPTION).write_text(text + "\n", encoding="utf-8")
    for path in made.rglob("*"):
        _to_disk(path)
    _to_disk(made)
    if os.path.lexists(place):
        _delete(place)
    made.rename(place)
    _to_disk(place.parent)


def _retire(folder: Path, rule: CheckpointRule, newest: int) -> None:
    there = checkpoints_in(folder)
    for version in rule.surplus(there, newest=newest):
        _delete(there[version])


def _delete(place: Path) -> None:
    # Renamed first: a checkpoint that lost half of its files must not be taken for one.
    dying = place.with_name(f"{_UNFINISHED}{place.name}-{uuid.uuid4().hex}")
    place.rename(dying)
    shutil.rmtree(dying, ignore_errors=True)


def _sweep(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""`flexmarl store`: snapshot, restore, check.

Restoring and checking open the database itself, which only the store's own package can: they run in
a process of it, whose one line of JSON is the answer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.cli.cluster.folder import ClusterFolder
from flexmarl.cli.cluster.plan import STORE
from flexmarl.cli.connect import with_store
from flexmarl.cli.errors import CliError
from flexmarl.cli.output import print_json, print_line, print_table
from flexmarl.client.run_store import RunStore

_MODULE: Final = "flexmarl.meg_store.offline"


def snapshot(
    name: str, *, run_id: str, data_dir: Path, cluster: Sequence[str], as_json: bool
) -> None:
    """Make a snapshot of a store, or of all that a run is spread over.

    Raises:
        DomainError: The name is taken, the disk is full, a store does not answer.
    """
    chosen = name or datetime.now(tz=UTC).strftime("%Y%m%d-%H%M%S")

    async def make(store: RunStore, _folder: ClusterFolder) -> list[pb.CreateSnapshotResponse]:
        if run_id:
            await store.get_run(run_id)
        return await store.create_snapshots(chosen)

    answers = with_store(make, data_dir=data_dir, cluster=cluster)
    if as_json:
        rows = [_snapshot_row(made) for made in answers]
        print_json(rows if run_id else rows[0])
        return
    for made in answers:
        print_line(
            f"{made.path}: store shard {made.shard}, {made.num_objects} objects, "
            f"{made.num_segments} segments of {made.segment_bytes / 2**20:.1f} MiB; "
            "`flexmarl store restore` makes a store of it"
        )


def _snapshot_row(made: pb.CreateSnapshotResponse) -> dict[str, Any]:
    return {
        "shard": made.shard,
        "path": made.path,
        "objects": made.num_objects,
        "segments": made.num_segments,
        "segment_bytes": made.segment_bytes,
    }


def restore(
    sources: Sequence[Path], *, data_dir: Path, store_dirs: Sequence[str], as_json: bool
) -> None:
    """Make data folders from snapshots.

    Raises:
        CliError: A folder is missing or does not fit, or the store's package is not installed.
    """
    folders = list(store_dirs)
    if not folders and len(sources) == 1:
        folders = [str(ClusterFolder(data_dir.resolve()).service(STORE))]
    answer = _offline("restore", *map(_folder, sources), "--to", *folders)
    if as_json:
        print_json(answer["stores"])
        return
    for made in answer["stores"]:
        print_line(
            f"{made['folder']}: store shard {made['shard']}, {made['objects']} objects, "
            f"{made['segments']} segments"
        )


def check(paths: Sequence[Path], *, data_dir: Path, as_json: bool) -> int:
    """Verify folders; returns the exit code.

    Raises:
        CliError: There is no such folder, or the store's package is not installed.
    """
    targets = paths or [ClusterFolder(data_dir.resolve()).service(STORE)]
    answer = _offline("check", *map(_folder, targets))
    if as_json:
        print_json(answer)
    else:
        _print_report(answer)
    return 1 if answer["findings"] else 0


def _print_report(answer: Mapping[str, Any]) -> None:
    for store in answer["stores"]:
        print_line(f"{store['folder']}: store shard {store['shard']}")
    counted = ", ".join(f"{number} {what}" for what, number in answer["checked"].items())
    print_line(f"checked {counted}")
    if answer["findings"]:
        print_table(answer["findings"], ["shard", "kind", "where", "what"])
    if answer["unlisted"]:
        print_line(f"... and {answer['unlisted']} more")
    for run_id, shards in answer["left_out"].items():
        print_line(
            f"{run_id} also lies on {', '.join(shards)}: give those folders, too, to have "
            "marks, references and counts compared over all its stores"
        )
    print_line("damaged" if answer["findings"] else "no damage found")


def _folder(path: Path) -> Path:
    if not path.is_dir():
        raise CliError(f"{path}: no such folder")
    return path.resolve()


def _offline(*arguments: object) -> dict[str, Any]:
    if find_spec("flexmarl.meg_store") is None:
        raise CliError("the MEG Store is not installed here: pip install 'flexmarl[meg-store]'")
    done = subprocess.run(
        [sys.executable, "-m", _MODULE, *map(str, arguments)],
        stdout=subprocess.PIPE,
        check=False,
    )
    answer: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
    if "error" in answer or done.returncode:
        raise CliError(answer.get("error", f"{_MODULE} ended with {done.returncode}"))
    return answer

"""`flexmarl export`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from flexmarl.cli.cluster.folder import ClusterFolder
from flexmarl.cli.connect import with_store
from flexmarl.cli.errors import CliError
from flexmarl.cli.output import print_line
from flexmarl.client.policies import export_policy
from flexmarl.client.store import StoreClient


def export(
    run_id: str,
    *,
    policy: str,
    out: Path,
    version: int | None,
    data_dir: Path,
    cluster: Sequence[str],
) -> None:
    """Write a policy's weights.

    Raises:
        CliError: The folder exists.
        DomainError: No such run, policy or version.
    """
    if os.path.lexists(out):
        raise CliError(f"--out {out}: exists already; give another folder")

    async def write(store: StoreClient, folder: ClusterFolder) -> int:
        return await export_policy(
            store, run_id, policy, out=out, cache_dir=folder.cache, version=version
        )

    written = with_store(write, data_dir=data_dir, cluster=cluster)
    print_line(f"policy {policy} at version {written}: {out}")

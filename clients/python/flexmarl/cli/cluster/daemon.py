"""The process behind `flexmarl up`: runs a local cluster until it is told to stop."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from pathlib import Path

from flexmarl.cli.cluster.folder import ClusterFolder
from flexmarl.cli.cluster.local import LocalCluster
from flexmarl.cli.cluster.plan import ClusterSettings
from flexmarl.cli.errors import EXIT_FAILED, to_cli_error
from flexmarl.cli.interrupt import Interrupted, InterruptGuard
from flexmarl.runtime.config import LogConfig
from flexmarl.runtime.logging import configure_logging


async def run_cluster(folder: ClusterFolder, settings: ClusterSettings) -> None:
    """Start the cluster and keep it until a signal comes.

    Raises:
        CliError: It does not start, or cannot be kept running.
    """
    cluster = LocalCluster(folder, settings, tell=_tell, background=True)
    async with InterruptGuard() as guard:
        guard.on_second(cluster.kill)
        try:
            with contextlib.suppress(Interrupted):
                await guard.run(cluster.start())
                await guard.run(cluster.failed())
        finally:
            await cluster.stop()


def main() -> int:
    """`python -m flexmarl.cli.cluster.daemon --data-dir DIR ...`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--durability", default="process")
    parser.add_argument("--service-set", action="append", default=[])
    args = parser.parse_args()
    folder = ClusterFolder(args.data_dir)
    configure_logging(LogConfig(file=folder.log("cluster")), service="cluster")
    settings = ClusterSettings(
        durability=args.durability, slots=args.slots, overrides=tuple(args.service_set)
    )
    try:
        asyncio.run(run_cluster(folder, settings))
    except Exception as error:  # noqa: BLE001 - the edge of the process: one line for `up`
        failure = to_cli_error(error)
        _tell(f"error: {failure.message}")
        if failure.detail:
            _tell(failure.detail)
        return failure.exit_code or EXIT_FAILED
    return 0


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

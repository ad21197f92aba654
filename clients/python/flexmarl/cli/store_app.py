"""`flexmarl store`: care of a store's data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexmarl.cli.options import DATA_DIR, AsJson, Cluster, DataDir

store_app = typer.Typer(help="Care of a store's data.", no_args_is_help=True)


@store_app.command()
def snapshot(
    name: Annotated[str, typer.Option(help="Name; by default the time.")] = "",
    run_id: Annotated[
        str, typer.Option("--run", help="Copy all stores that this run is spread over.")
    ] = "",
    data_dir: DataDir = DATA_DIR,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Copy a store, while it serves, into `snapshots` of its data."""
    from flexmarl.cli.commands.store import snapshot as command

    command(name, run_id=run_id, data_dir=data_dir, cluster=cluster or [], as_json=as_json)


@store_app.command()
def restore(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SNAPSHOT...",
            help="Folders of snapshots; several: one of each store, made together.",
        ),
    ],
    data_dir: DataDir = DATA_DIR,
    store_dirs: Annotated[
        list[str] | None,
        typer.Option(
            "--store-dir",
            metavar="[SHARD=]FOLDER",
            help="Data folder of a store, with its shard where several are made; "
            "by default the local cluster's.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make data folders from snapshots. Refused where a store is already."""
    from flexmarl.cli.commands.store import restore as command

    command(sources, data_dir=data_dir, store_dirs=store_dirs or [], as_json=as_json)


@store_app.command()
def check(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FOLDER]...",
            help="Snapshots or data folders, one of each store that a run is spread over; "
            "by default that of the local cluster.",
        ),
    ] = None,
    data_dir: DataDir = DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Verify stores that do not run, or snapshots. Exit code 1: something is damaged."""
    from flexmarl.cli.commands.store import check as command

    raise typer.Exit(command(paths or [], data_dir=data_dir, as_json=as_json))


@store_app.command()
def lost(
    shard: Annotated[str, typer.Argument(metavar="SHARD", help="Name of a store, `store.shard`.")],
    run_id: Annotated[str, typer.Option("--run", help="This run alone.")] = "",
    data_dir: DataDir = DATA_DIR,
    cluster: Cluster = None,
) -> None:
    """Give up a store: its runs go on over their other stores."""
    from flexmarl.cli.commands.store_lost import lost as command

    command(shard, run_id=run_id, data_dir=data_dir, cluster=cluster or [])

"""`flexmarl runs`: the stored runs, and removing one."""

from __future__ import annotations

import typer

from flexmarl.cli.options import DATA_DIR, AsJson, Cluster, DataDir, RunId

runs_app = typer.Typer(invoke_without_command=True)


@runs_app.callback()
def runs(
    context: typer.Context,
    data_dir: DataDir = DATA_DIR,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """List the stored runs, or delete one."""
    if context.invoked_subcommand is not None:
        return
    from flexmarl.cli.commands.runs import runs as command

    command(data_dir=data_dir, cluster=cluster or [], as_json=as_json)


@runs_app.command()
def delete(run: RunId, data_dir: DataDir = DATA_DIR, cluster: Cluster = None) -> None:
    """Remove a run that is not driven, and give its space back."""
    from flexmarl.cli.commands.delete_run import delete as command

    command(run, data_dir=data_dir, cluster=cluster or [])

"""Commands that ask the stored graph, and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexmarl.cli.options import DATA_DIR, AsJson, Cluster, DataDir, RunId

query_app = typer.Typer()

Batch = Annotated[int | None, typer.Option("--batch", min=0, help="Batch; by default all.")]


@query_app.command()
def vertices(
    run: RunId,
    agent: Annotated[str, typer.Option(help="Agent or tool.")] = "",
    policy: Annotated[str, typer.Option(help="Policy.")] = "",
    batch: Batch = None,
    group: Annotated[str, typer.Option(help="Id of a group.")] = "",
    sample: Annotated[str, typer.Option(help="Id of a sample.")] = "",
    prefix: Annotated[str, typer.Option(help="What the vertex id starts with.")] = "",
    kind: Annotated[str, typer.Option(help="agent, tool or environment.")] = "",
    status: Annotated[str, typer.Option(help="done, failed or cancelled.")] = "",
    void: Annotated[str, typer.Option(help="Void reason, such as no_reward.")] = "",
    micro_batch: Annotated[str, typer.Option(help="Micro-batch that marked the row.")] = "",
    version: Annotated[str, typer.Option(metavar="N|A..B", help="Version or range.")] = "",
    reward: Annotated[str, typer.Option(metavar="X|A..B", help="Reward or range.")] = "",
    since: Annotated[str, typer.Option(metavar="TIME", help="Finished then or later.")] = "",
    until: Annotated[str, typer.Option(metavar="TIME", help="Finished before then.")] = "",
    claimable: Annotated[
        bool, typer.Option("--claimable", help="Released, complete, not void, not marked.")
    ] = False,
    order: Annotated[str, typer.Option(help="id, finished, reward, duration or tokens.")] = "id",
    descending: Annotated[bool, typer.Option("--descending", help="Largest first.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="At most this many.")] = 100,
    data_dir: DataDir = DATA_DIR,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """List vertices of a run. Ranges are inclusive and may be open: 0.5.., ..3."""
    from flexmarl.cli.commands.vertices import VertexQuery
    from flexmarl.cli.commands.vertices import vertices as command

    command(
        run,
        VertexQuery(
            agent=agent,
            policy=policy,
            batch=batch,
            group=group,
            sample=sample,
            prefix=prefix,
            kind=kind,
            status=status,
            void=void,
            micro_batch=micro_batch,
            version=version,
            reward=reward,
            since=since,
            until=until,
            claimable=claimable,
            order=order,
            descending=descending,
        ),
        limit=limit,
        data_dir=data_dir,
        cluster=cluster or [],
        as_json=as_json,
    )


@query_app.command()
def graph(
    run: RunId,
    sample: Annotated[
        str, typer.Argument(metavar="SAMPLE", help="Id of a sample, or the start of it.")
    ],
    format_: Annotated[str, typer.Option("--format", help="text, dot, mermaid or json.")] = "text",
    critical_path: Annotated[
        bool, typer.Option("--critical-path", help="Show the calls that its end waited for.")
    ] = False,
    around: Annotated[
        str, typer.Option(metavar="PATH", help="Only the neighbours of this call, such as 0.1:0.")
    ] = "",
    hops: Annotated[int, typer.Option(min=1, help="With --around: edges to follow.")] = 1,
    data_dir: DataDir = DATA_DIR,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Draw the graph of one sample."""
    from flexmarl.cli.commands.graph import graph as command

    command(
        run,
        sample,
        format_="json" if as_json else format_,
        critical_path=critical_path,
        around=around,
        hops=hops,
        data_dir=data_dir,
        cluster=cluster or [],
    )


@query_app.command()
def agents(
    run: RunId,
    batch: Batch = None,
    data_dir: DataDir = DATA_DIR,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Show calls, edges, tokens and time per agent."""
    from flexmarl.cli.commands.agents import agents as command

    command(run, batch=batch, data_dir=data_dir, cluster=cluster or [], as_json=as_json)


@query_app.command()
def counts(
    run: RunId,
    batch: Batch = None,
    data_dir: DataDir = DATA_DIR,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Count stored vertices: finished = consumed + void. Exit code 1 where it is not so."""
    from flexmarl.cli.commands.counts import counts as command

    raise typer.Exit(
        command(run, batch=batch, data_dir=data_dir, cluster=cluster or [], as_json=as_json)
    )


@query_app.command("export-trajectories")
def export_trajectories(
    run: RunId,
    out: Annotated[Path, typer.Option("--out", help="Folder to make.")],
    format_: Annotated[str, typer.Option("--format", help="parquet or jsonl.")] = "parquet",
    batch: Batch = None,
    data_dir: DataDir = DATA_DIR,
    cluster: Cluster = None,
) -> None:
    """Write vertices, edges, samples, groups as tables. Texts and tokens are included."""
    from flexmarl.cli.commands.export_trajectories import export_trajectories as command

    command(run, out=out, format_=format_, batch=batch, data_dir=data_dir, cluster=cluster or [])

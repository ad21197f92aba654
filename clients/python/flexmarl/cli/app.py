"""Commands and their options. Bodies are imported when a command runs, so that help is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexmarl.cli.options import DATA_DIR, AsJson, Cluster, DataDir, RunId, ServiceSet
from flexmarl.cli.query_app import query_app
from flexmarl.cli.runs_app import runs_app
from flexmarl.cli.store_app import store_app
from flexmarl.cli.token_app import token_app

app = typer.Typer(
    name="flexmarl",
    help="Train teams of LLM agents: several policies at once, driven by a durable graph.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_OUT = Path("runs")
Out = Annotated[Path, typer.Option("--out", help="Where the folders of runs are.")]

app.add_typer(query_app)
app.add_typer(runs_app, name="runs")
app.add_typer(store_app, name="store")
app.add_typer(token_app, name="token")


@app.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file of the run.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as batch.groups=8."),
    ] = None,
    cluster: Cluster = None,
    out: Out = _OUT,
    run_id: Annotated[str, typer.Option("--run-id", help="Id; by default name and time.")] = "",
    data_dir: DataDir = DATA_DIR,
    service_set: ServiceSet = None,
) -> None:
    """Train a run, on a local cluster unless one is named."""
    from flexmarl.cli.commands.train import train as command

    raise typer.Exit(
        command(
            config,
            overrides=set_ or [],
            cluster=cluster or [],
            out=out,
            run_id=run_id,
            data_dir=data_dir,
            service_overrides=service_set or [],
        )
    )


@app.command()
def resume(
    run: RunId,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Go on with another setting."),
    ] = None,
    cluster: Cluster = None,
    out: Out = _OUT,
    data_dir: DataDir = DATA_DIR,
) -> None:
    """Go on with a run from its last committed version."""
    from flexmarl.cli.commands.resume import resume as command

    raise typer.Exit(
        command(run, overrides=set_ or [], cluster=cluster or [], out=out, data_dir=data_dir)
    )


@app.command()
def up(
    data_dir: DataDir = DATA_DIR,
    slots: Annotated[int, typer.Option(min=1, help="Device slots of the trainer.")] = 1,
    durability: Annotated[
        str, typer.Option(help="What a write survives: process or fsync.")
    ] = "process",
    service_set: ServiceSet = None,
    as_json: AsJson = False,
) -> None:
    """Start a local cluster in the background."""
    from flexmarl.cli.commands.cluster import up as command

    command(
        data_dir,
        slots=slots,
        durability=durability,
        service_overrides=service_set or [],
        as_json=as_json,
    )


@app.command()
def down(
    data_dir: DataDir = DATA_DIR,
    purge: Annotated[
        bool,
        typer.Option("--purge", help="Remove its stored runs, too, and free their memory."),
    ] = False,
) -> None:
    """Stop the local cluster. Stored runs stay, to be resumed, unless `--purge` is given."""
    from flexmarl.cli.commands.cluster import down as command

    command(data_dir, purge=purge)


@app.command()
def status(data_dir: DataDir = DATA_DIR, as_json: AsJson = False) -> None:
    """Show health and address of each local service."""
    from flexmarl.cli.commands.cluster import status as command

    raise typer.Exit(command(data_dir, as_json=as_json))


@app.command()
def doctor(
    config: Annotated[
        list[Path] | None,
        typer.Option("--config", help="Configuration of a service, or a folder of them."),
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option("--peer", metavar="HOST:PORT", help="Service to reach.")
    ] = None,
    meet: Annotated[
        str,
        typer.Option(
            "--meet",
            metavar="HOST:PORT",
            help="Make a process group with another host, at the address of its rank 0: over "
            "gloo, or over NCCL where a trainer's configuration asks for GPUs.",
        ),
    ] = "",
    rank: Annotated[int, typer.Option(min=0, max=1, help="This host's rank in it.")] = 0,
    interface: Annotated[str, typer.Option(help="Network interface of it.")] = "lo",
    data_dir: DataDir = DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Look for what is wrong with host, settings and peers. It says what to do."""
    from flexmarl.cli.commands.doctor import doctor as command

    raise typer.Exit(
        command(
            configs=config or [],
            peers=peer or [],
            data_dir=data_dir,
            meet_at=meet,
            rank=rank,
            interface=interface,
            as_json=as_json,
        )
    )


@app.command()
def serve(
    service: Annotated[str, typer.Argument(help="meg-store, rollout, trainer or orchestrator.")],
    role: Annotated[str, typer.Option(help="Role of rollout: dispatcher or engine-host.")] = "",
    config: Annotated[Path | None, typer.Option("--config", help="TOML file.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key.")
    ] = None,
) -> None:
    """Run one service in the foreground. Without --config: as /etc/flexmarl/SERVICE.toml says."""
    from flexmarl.cli.commands.serve import serve as command

    command(service, role=role, config=config, overrides=set_ or [])


@app.command()
def health(
    addresses: Annotated[
        list[str], typer.Argument(metavar="HOST:PORT...", help="Services to ask.")
    ],
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.01, help="Seconds to wait for an answer.")
    ] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Ask services whether they are ready. Exit code 0: all are."""
    from flexmarl.cli.commands.health import health as command

    raise typer.Exit(command(addresses, timeout_s=timeout_s, as_json=as_json))


@app.command()
def show(
    run: RunId,
    batch: Annotated[
        int | None, typer.Option("--batch", min=0, help="Its samples; by default the newest.")
    ] = None,
    all_samples: Annotated[
        bool, typer.Option("--all", help="Every sample of the batch, not the first ones.")
    ] = False,
    data_dir: DataDir = DATA_DIR,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Show one run: state, versions, policies, samples."""
    from flexmarl.cli.commands.runs import show as command

    command(
        run,
        batch=batch,
        all_samples=all_samples,
        data_dir=data_dir,
        cluster=cluster or [],
        as_json=as_json,
    )


@app.command()
def stop(
    run: RunId,
    now: Annotated[
        bool, typer.Option("--now", help="At once; by default the open batch is finished.")
    ] = False,
    data_dir: DataDir = DATA_DIR,
    cluster: Cluster = None,
) -> None:
    """Stop a run after its open batch, or at once. It can be resumed either way."""
    from flexmarl.cli.commands.stop import stop as command

    command(run, finish_batch=not now, data_dir=data_dir, cluster=cluster or [])


@app.command()
def why(
    run: RunId,
    data_dir: DataDir = DATA_DIR,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Say what a run waits for, and what would end it."""
    from flexmarl.cli.commands.why import why as command

    raise typer.Exit(command(run, data_dir=data_dir, cluster=cluster or [], as_json=as_json))


@app.command()
def top(
    run: Annotated[
        str, typer.Argument(metavar="[RUN]", help="Run; by default the one that goes on.")
    ] = "",
    once: Annotated[
        bool, typer.Option("--once", help="Show it once; so too where the output is no terminal.")
    ] = False,
    data_dir: DataDir = DATA_DIR,
    cluster: Cluster = None,
    as_json: AsJson = False,
) -> None:
    """Watch a run: rewards, queues, slots. Instances, parts of the step and waits, too."""
    from flexmarl.cli.commands.top import top as command

    raise typer.Exit(
        command(run, data_dir=data_dir, cluster=cluster or [], once=once, as_json=as_json)
    )


@app.command()
def export(
    run: RunId,
    policy: Annotated[str, typer.Option("--policy", help="Policy to export.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to make.")],
    version: Annotated[
        int | None, typer.Option("--version", min=0, help="Version; by default the newest.")
    ] = None,
    data_dir: DataDir = DATA_DIR,
    cluster: Cluster = None,
) -> None:
    """Write a policy's weights as a Hugging Face folder."""
    from flexmarl.cli.commands.export import export as command

    command(run, policy=policy, out=out, version=version, data_dir=data_dir, cluster=cluster or [])


@app.command()
def timeline(
    run: RunId,
    out: Annotated[Path, typer.Option("--out", help="JSON file to write.")],
    data_dir: DataDir = DATA_DIR,
    cluster: Cluster = None,
) -> None:
    """Write what is recorded as a Chrome trace. It opens in Perfetto."""
    from flexmarl.cli.commands.timeline import timeline as command

    command(run, out=out, data_dir=data_dir, cluster=cluster or [])

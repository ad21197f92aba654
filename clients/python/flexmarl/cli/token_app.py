"""`flexmarl token`: the file of tokens that services read, and the keys of single runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

token_app = typer.Typer(no_args_is_help=True, help="Make tokens and keys of runs.")

TokenFile = Annotated[
    Path, typer.Option("--file", help="File of tokens, `server.tokens` of the services.")
]
Out = Annotated[Path, typer.Option("--out", help="File for the token; only its owner can read it.")]
RoleName = Annotated[str, typer.Option("--role", help="read, submit or admin.")]


@token_app.command()
def new(
    name: Annotated[str, typer.Argument(help="Who gets it; the name stands in logs.")],
    role: RoleName,
    file: TokenFile,
    out: Out,
) -> None:
    """Make a token and add its hash to the file. Services read the file when they start."""
    from flexmarl.cli.commands.token import new as command

    command(name, role=role, file=file, out=out)


@token_app.command()
def run(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The one run it is for.")],
    role: RoleName,
    file: TokenFile,
    out: Out,
) -> None:
    """Make the key of one run, for the role read or submit."""
    from flexmarl.cli.commands.token import run as command

    command(run_id, role=role, file=file, out=out)

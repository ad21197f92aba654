"""Options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

DATA_DIR: Final = Path(".flexmarl")
"""Folder of the local cluster, unless another is named."""

DataDir = Annotated[
    Path, typer.Option("--data-dir", help="Folder of the local cluster: data, logs, addresses.")
]
Cluster = Annotated[
    list[str] | None,
    typer.Option(
        "--cluster",
        metavar="ADDR",
        envvar="FLEXMARL_CLUSTER",
        help="Use a running cluster: its folder, or store=HOST:PORT and orchestrator=HOST:PORT.",
    ),
]
ServiceSet = Annotated[
    list[str] | None,
    typer.Option(
        "--service-set",
        metavar="SERVICE.KEY=VALUE",
        help="Override a service's configuration, such as meg_store.server.port=7001.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="Id of a run, see `flexmarl runs`.")]

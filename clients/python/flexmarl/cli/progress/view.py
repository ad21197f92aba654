"""Which view of a run fits where its output goes."""

from __future__ import annotations

import sys
from typing import Protocol, Self

from flexmarl.api.orchestrator.v1 import orchestrator_pb2
from flexmarl.cli.output import print_line


class View(Protocol):
    """Shows a run while it is entered."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def say(self, line: str) -> None:
        """Show a line about the cluster."""
        ...

    def update(self, message: orchestrator_pb2.WatchProgressResponse) -> None:
        """Show what a message brings."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was, also in the middle of everything."""
        ...


def make_view() -> View:
    """A screen on a terminal, plain lines otherwise."""
    if sys.stdout.isatty():
        # Imported here: rich's tables take time, and a log file needs none.
        from rich.console import Console

        from flexmarl.cli.progress.live import LiveView

        return LiveView(Console())
    from flexmarl.cli.progress.plain import PlainView

    return PlainView(print_line)

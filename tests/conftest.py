"""What all tests share: files that run in one process when several run, and proofs' lines."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from guardian import guard
from hypothesis import settings

# How long an example takes says something of the machine and its load, and nothing of the code.
settings.register_profile("without deadline", settings.default, deadline=None)
settings.load_profile("without deadline")

_PROVED: Final = "proved"


@pytest.fixture
def proves(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Notes a line of counts; they are printed at the end, as docs/proof keeps them."""
    return partial(record_property, _PROVED)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The lines of tests that passed, with the commit and the load that they were measured under.

    They come with the reports, also from other processes.
    """
    lines = [
        value
        for report in terminalreporter.getreports("passed")
        for name, value in report.user_properties
        if name == _PROVED
    ]
    if not lines:
        return
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    today = datetime.now(tz=UTC).date()
    terminalreporter.section("for docs/proof")
    terminalreporter.line(
        f"{today}, commit {commit or 'unknown'}, load average {os.getloadavg()[2]:.1f}:\n"
    )
    for line in lines:
        terminalreporter.line(f"    {line}")


SHARED = {
    **dict.fromkeys(
        ("gradient_exact", "lora", "memory", "merged_rows", "rank_worker"), "trainer ranks"
    ),
    **dict.fromkeys(
        ("checkpoint", "faults", "lora_service", "service", "service_kills", "user_losses"),
        "trainer cluster",
    ),
}
"""Files of tests/trainer, without `test_`, that use one session's rank workers, or its cluster:
starting those is most of what such a file costs."""

LONG_FILES = (
    "integration/test_kills.py",
    "examples/test_gsm8k_real.py",
    "cli/test_train.py",
    "trainer/",
)
"""Files that take a minute or so with few tests, and groups of such."""


def pytest_configure(config: pytest.Config) -> None:
    """Files keep the order of collection: xdist would begin with those that have most tests.

    What tests start ends with this process, whoever ends it.
    """
    config.option.loadscopereorder = False
    config.add_cleanup(guard())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: begun last, one of them would keep one core busy and the other idle."""
    root = Path(__file__).parent
    items.sort(key=lambda item: not str(item.path.relative_to(root)).startswith(LONG_FILES))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files go to processes whole, as with `--dist loadfile`, those of a group to the same one."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Grouped(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            folder, _, name = file.rpartition("/test_")
            shared = folder.endswith("tests/trainer") and SHARED.get(name.removesuffix(".py"))
            return shared or file

    return Grouped(config, log)

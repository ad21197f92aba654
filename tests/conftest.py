"""What all tests share: which files of them a process, when several run side by side."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

# How long an example takes says something of the machine and its load, and nothing of the code.
settings.register_profile("without deadline", settings.default, deadline=None)
settings.load_profile("without deadline")

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

"""Every config that is shipped parses, and what it names exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexmarl.runtime.config import UnknownKeyError, load_config
from flexmarl.runtime.run_config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "examples").rglob("*.toml"))


def test_there_are_configs() -> None:
    assert "examples/quickstart/config.toml" in CONFIGS
    assert "examples/gsm8k/config.toml" in CONFIGS


@pytest.mark.parametrize("path", CONFIGS)
def test_a_shipped_config_parses(path: str) -> None:
    config = load_config(RunConfig, path=ROOT / path)
    module, _, function = config.workflow.entry.partition(":")
    source = (ROOT / path).parent / config.workflow.package / f"{module}.py"
    assert f"async def {function}(" in source.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", CONFIGS)
def test_an_unknown_key_is_refused(path: str) -> None:
    with pytest.raises(UnknownKeyError, match=r"batch\.grops"):
        load_config(RunConfig, path=ROOT / path, overrides=["batch.grops=3"])

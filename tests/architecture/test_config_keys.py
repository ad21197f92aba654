"""Case H3: a documented key that nothing reads would be a silent no-op."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from architecture.conftest import ROOT
from pydantic import BaseModel

from flexmarl.meg_store.config import MegStoreConfig
from flexmarl.orchestrator.config import OrchestratorConfig
from flexmarl.rollout.config import RolloutConfig
from flexmarl.runtime.config import ConfigError, load_config
from flexmarl.runtime.run_config import RunConfig
from flexmarl.trainer.config import TrainerConfig

CONFIGS = (RunConfig, MegStoreConfig, RolloutConfig, TrainerConfig, OrchestratorConfig)
CODE = ("libs", "services", "clients")
ONE_VALUED = {"BatchConfig.staleness"}
"""Keys that take one value and refuse every other by name: there is nothing to read yet."""


def keys_of(model: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[tuple[str, str]]:
    """Class and name of every key, below sections and mappings, too."""
    if model in seen:
        return
    seen.add(model)
    for name, field in model.model_fields.items():
        yield model.__name__, name
        for inner in models_in(field.annotation):
            yield from keys_of(inner, seen)


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from models_in(argument)


def read_attributes() -> set[str]:
    """Names that the code reads as attributes, declarations left aside."""
    found: set[str] = set()
    for root in CODE:
        for path in (ROOT / root).rglob("*.py"):
            found.update(re.findall(r"\.([a-z][a-z0-9_]*)\b", without_texts(path)))
    return found


def without_texts(path: Path) -> str:
    """Code without comments and strings: a key that is only talked of is not read."""
    text = re.sub(r'""".*?"""', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    # f-strings stay: they read values, too.
    return re.sub(r"#.*|(?<![fF])\"[^\"\n{]*\"", "", text)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_key_is_read(config: type[BaseModel]) -> None:
    read = read_attributes()
    unread = [f"{section}.{key}" for section, key in keys_of(config, set()) if key not in read]
    assert set(unread) <= ONE_VALUED


@pytest.mark.parametrize(("key", "value"), [("batch.staleness", "1")])
def test_a_key_of_one_value_refuses_every_other(key: str, value: str) -> None:
    path = ROOT / "examples/quickstart/config.toml"
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        load_config(RunConfig, path=path, overrides=[f"{key}={value}"])

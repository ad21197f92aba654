"""What the documentation shows works: code is imported or parsed, configs and commands checked."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from docs.pages import (
    HOW_TO,
    LANGUAGES,
    PAGES,
    ROOT,
    RUN_IN_ORDER,
    SHOWN_ONLY,
    TUTORIAL,
    WITH_CODE,
    Block,
    blocks,
    write_files,
)
from docs.pages import commands as commands_of
from typer.main import get_command

from flexmarl.cli.app import app
from flexmarl.orchestrator.config import OrchestratorConfig
from flexmarl.runtime.config import ServiceConfig, load_config
from flexmarl.runtime.run_config import RunConfig
from flexmarl.trainer.config import TrainerConfig

PYTHON = [block for page in WITH_CODE for block in blocks(page, "python")]
SERVICES: dict[str, type[ServiceConfig]] = {
    "flexmarl.orchestrator": OrchestratorConfig,
    "flexmarl.trainer": TrainerConfig,
}
FOREGROUND = [
    block
    for page in PAGES
    for block in blocks(page, "sh")
    if block.text.startswith("python -m flexmarl.")
]
FRAGMENTS = [b for page in HOW_TO for b in blocks(page, "toml") if not b.title]


def name_of(block: Block) -> str:
    return f"{Path(block.page).name}-{block.title or block.text.splitlines()[0][:30]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reader")
    assert write_files(made)
    (made / "my_team/model").mkdir()
    (made / "my_team/queries.jsonl").touch()
    return made / "my_team"


@pytest.mark.parametrize("block", PYTHON, ids=name_of)
def test_python_parses_and_its_imports_are_there(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flexmarl"):
            missing = {alias.name for alias in node.names} - names_in(str(node.module))
            assert missing == set(), f"{node.module} has no {sorted(missing)}"


def test_saved_files_are_modules_and_their_tests_pass(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    names = sorted(path.stem for path in folder.glob("*.py"))
    passed = []
    for name in names:  # of another test's reader, perhaps
        monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        for name in names:
            module = importlib.import_module(name)
            for test in (t for t in vars(module) if t.startswith("test_")):
                getattr(module, test)()
                passed.append(test)
    finally:
        for name in names:
            sys.modules.pop(name, None)
    assert {"team", "rewards", "tools", "mine"} <= set(names)
    assert len(passed) >= 2


def test_the_tutorials_config_is_one(folder: Path) -> None:
    config = load_config(RunConfig, path=folder / "config.toml")
    assert config.policies.keys() == {"writer", "editor"}


@pytest.mark.parametrize("block", FRAGMENTS, ids=name_of)
def test_parts_of_configs_fit_the_tutorials(block: Block, folder: Path) -> None:
    whole = tomllib.loads((folder / "config.toml").read_text())
    RunConfig.model_validate(merged(whole, tomllib.loads(block.text)))


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_every_toml_parses(page: Path) -> None:
    for block in blocks(page, "toml"):
        tomllib.loads(block.text)


def test_every_block_of_commands_is_run_or_has_a_reason_why_not() -> None:
    ours = [block for page in PAGES for block in blocks(page)]
    assert {block.language for block in ours} == LANGUAGES
    run = {block.page for block in ours if block.language == "bash"}
    assert run == {str(page.relative_to(ROOT)) for page in RUN_IN_ORDER}
    shown = [(block.page, first_words(block)) for block in ours if block.language == "sh"]
    assert sorted(shown) == sorted(SHOWN_ONLY)


def first_words(block: Block) -> str:
    """Those of a block that `SHOWN_ONLY` knows it by; its first line if it does not."""
    text = block.text.lstrip()
    known = [words for page, words in SHOWN_ONLY if page == block.page and text.startswith(words)]
    return known[0] if known else text.partition("\n")[0]


@pytest.mark.parametrize("block", FOREGROUND, ids=name_of)
def test_settings_of_a_service_that_is_started_by_hand_exist(block: Block) -> None:
    _, _, module, *options = shlex.split(block.text.replace("\\\n", " "))
    assert options[::2] == ["--set"] * (len(options) // 2)
    load_config(SERVICES[module], overrides=options[1::2])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_their_options_exist(page: Path) -> None:
    root: Any = get_command(app)
    for line in commands_of(page):
        command, words = root, line.split()
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        assert command is not root, f"{page.name}: flexmarl {line}"
        known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
        asked = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert asked <= known, f"{page.name}: flexmarl {line}"


def test_the_tutorial_makes_all_that_its_config_names(folder: Path) -> None:
    made = {block.title for block in blocks(TUTORIAL) if block.title}
    assert made == {"my_team/make_queries.py", "my_team/team.py", "my_team/config.toml"}


def names_in(module: str) -> set[str]:
    """What a module defines, read from its source: importing some of them would import torch."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    stub = Path(spec.origin).with_suffix(".pyi")  # generated code has its names there
    source = (stub if stub.exists() else Path(spec.origin)).read_text(encoding="utf-8")
    names: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(t.id for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """A config with the sections and keys of a part put over it."""
    result = dict(base)
    for key, value in change.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result

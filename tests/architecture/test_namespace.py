"""One namespace, several roots: what keeps `import flexmarl.x` working in each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# The generated portion is one level deeper: flexmarl.api.<service>.
PORTIONS = {
    "protos/gen": {"api"},
    "libs": {"core", "runtime"},
    "clients/python": {"cli", "client"},
    "services/meg_store": {"meg_store"},
    "services/rollout": {"rollout"},
    "services/orchestrator": {"orchestrator"},
    "services/trainer": {"trainer"},
}


def portions_of(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir() if p.is_dir() and any(p.rglob("*.py"))}


def test_no_root_closes_the_namespace(root: Path, import_roots: list[str]) -> None:
    stray = [r for r in import_roots if (root / r / "flexmarl/__init__.py").exists()]
    assert stray == [], "a flexmarl/__init__.py hides the other roots"


def test_each_root_holds_its_portions(root: Path, import_roots: list[str]) -> None:
    found = {name: portions_of(root / name / "flexmarl") for name in import_roots}
    assert found == PORTIONS


def test_each_portion_is_typed(root: Path) -> None:
    missing = [
        f"{name}/flexmarl/{portion}"
        for name, portions in PORTIONS.items()
        for portion in sorted(portions)
        if not (root / name / "flexmarl" / portion / "py.typed").exists()
    ]
    assert missing == []


def test_the_four_lists_of_roots_agree(pyproject: dict[str, Any], import_roots: list[str]) -> None:
    tool = pyproject["tool"]
    wheel = tool["hatch"]["build"]["targets"]["wheel"]
    mypy = tool["mypy"]["mypy_path"].split(":")
    assert wheel["sources"] == import_roots
    assert wheel["only-include"] == [f"{r}/flexmarl" for r in import_roots]
    assert mypy == [f"$MYPY_CONFIG_FILE_DIR/{r}" for r in import_roots]
    assert tool["pyright"]["extraPaths"] == import_roots
    own = [r for r in import_roots if r != "protos/gen"]
    assert tool["ruff"]["src"] == own
    assert tool["ruff"]["namespace-packages"] == [f"{r}/flexmarl" for r in own]


def test_import_rules_name_every_portion(pyproject: dict[str, Any]) -> None:
    listed = set(pyproject["tool"]["importlinter"]["root_packages"])
    assert listed == {f"flexmarl.{p}" for portions in PORTIONS.values() for p in portions}

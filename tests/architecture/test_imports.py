"""Who may import what: the static rules, and what really happens in a slim installation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flexmarl.core.errors import ErrorFamily

# Imports every module of a package while some top-level packages cannot be imported.
PROBE = """
import importlib, importlib.abc, json, pkgutil, sys

package, blocked = sys.argv[1], set(json.loads(sys.argv[2]))

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)
        return None

sys.meta_path.insert(0, Blocker())
root = importlib.import_module(package)
names = [m.name for m in pkgutil.walk_packages(root.__path__, package + ".")]
names = [n for n in names if not n.endswith(".__main__") and n not in sys.argv[3:]]
for name in names:
    importlib.import_module(name)
print(len(names))
"""

# Modules that are there for an extra, and are imported where that extra may be missing.
OPTIONAL = ["flexmarl.cli.progress.plot"]

MODELS = ["torch", "transformers", "tokenizers", "vllm"]


def run_python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=120, check=False
    )


def test_import_contracts_hold(root: Path) -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [tool, "--no-cache"], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.parametrize(
    ("package", "blocked"),
    [
        ("flexmarl.core", [*MODELS, "rocksdict", "grpc", "google", "pydantic", "numpy", "asyncio"]),
        ("flexmarl.runtime", [*MODELS, "rocksdict", "numpy", "pyarrow", "matplotlib"]),
        ("flexmarl.client", [*MODELS, "rocksdict", "numpy", "pyarrow", "matplotlib"]),
        ("flexmarl.cli", [*MODELS, "rocksdict", "numpy", "pyarrow", "matplotlib"]),
        ("flexmarl.meg_store", [*MODELS, "numpy", "pyarrow"]),
        ("flexmarl.orchestrator", [*MODELS, "rocksdict"]),
    ],
)
def test_a_slim_installation_imports(package: str, blocked: list[str]) -> None:
    done = run_python("-c", PROBE, package, json.dumps(blocked), *OPTIONAL)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 0, "nothing was imported"


@pytest.mark.parametrize(
    ("service", "app"),
    [
        ("rollout", "rollout.dispatcher.app"),
        ("rollout", "rollout.host.app"),
        ("trainer", "trainer.app"),
    ],
)
def test_the_main_process_of_a_service_loads_no_torch(service: str, app: str) -> None:
    code = (
        f"import sys, flexmarl.{service}.__main__, flexmarl.{app}; "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = run_python("-c", code)
    assert done.stdout.strip() == "[]", done.stderr[-3000:]


def test_the_blocker_blocks() -> None:
    done = run_python("-c", PROBE, "flexmarl.runtime", json.dumps(["pydantic"]))
    assert "blocked: pydantic" in done.stderr


def test_help_needs_no_heavy_module() -> None:
    code = (
        "import sys, flexmarl.cli.main; "
        "heavy = {'torch', 'transformers', 'grpc', 'numpy', 'matplotlib', 'pyarrow'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = run_python("-c", code)
    assert done.stdout.strip() == "[]", done.stderr[-2000:]


def test_each_family_of_errors_has_its_exception() -> None:
    from flexmarl.client import errors

    missing = [f.value for f in ErrorFamily if not isinstance(getattr(errors, f.value, None), type)]
    assert missing == []

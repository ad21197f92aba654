"""Nothing unpickles what came over a wire or from a foreign file: no code of ours can."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing"}
"""What reads objects out of bytes, and what sends them to other processes so."""

CALLS = {
    "torch.load",
    "yaml.load",
    "numpy.load",
    "np.load",
    "eval",
    "exec",
    *(
        f"dist.{name}"
        for name in (
            "all_gather_object",
            "broadcast_object_list",
            "gather_object",
            "recv_object_list",
            "scatter_object_list",
            "send_object_list",
        )
    ),
}


def unpickling(source: str) -> Iterator[str]:
    """What a text imports or calls of these."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (n.name for n in names if n.name.partition(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in MODULES:
                yield module
            case ast.Call(func=func) if ast.unparse(func) in CALLS:
                yield ast.unparse(func)


@pytest.mark.parametrize("part", ["libs", "services", "clients", "deploy"])
def test_no_code_of_ours_unpickles(root: Path, part: str) -> None:
    files = list((root / part).rglob("*.py"))
    assert files
    found = {
        str(file.relative_to(root)): names
        for file in files
        if (names := list(unpickling(file.read_text(encoding="utf-8"))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import multiprocessing.shared_memory",
        "torch.load(path)",
        "dist.broadcast_object_list(x)",
        "eval(text)",
    ],
)
def test_what_unpickles_is_seen(source: str) -> None:
    assert list(unpickling(source))


def test_what_does_not_is_not() -> None:
    assert list(unpickling("model.eval(); json.load(file); import pickled")) == []

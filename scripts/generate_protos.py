"""Regenerates protos/gen from protos/, or with --check says whether it is up to date.

grpcio-tools is pinned: its generated code must load on every protobuf runtime that pyproject.toml
admits.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import shutil
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
GEN = PROTOS / "gen"


def generate(out: Path) -> None:
    """Writes messages, stubs and type stubs of every contract below `out`."""
    sources = sorted(p for p in (PROTOS / "flexmarl").rglob("*.proto"))
    include = Path(grpc_tools.__file__).parent / "_proto"
    # protoc looks for its plugins by PATH, where an environment that is not activated is missing.
    plugins = Path(sys.executable).parent
    os.environ["PATH"] = f"{plugins}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    status = protoc.main(
        [
            "protoc",
            f"-I{PROTOS}",
            f"-I{include}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out={out}",
            f"--mypy_grpc_out={out}",
            *(str(p) for p in sources),
        ]
    )
    if status:
        sys.exit(status)
    (out / "flexmarl/api/py.typed").touch()


def differences(a: Path, b: Path) -> list[str]:
    """Relative paths that stand in only one of the two trees, or differ in content."""
    names = {
        p.relative_to(base).as_posix()
        for base in (a, b)
        for p in base.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    return sorted(
        n
        for n in names
        if not ((a / n).exists() and (b / n).exists() and filecmp.cmp(a / n, b / n, shallow=False))
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 on drift")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        out = Path(tmp)
        generate(out)
        drift = differences(out, GEN)
        if args.check:
            if drift:
                sys.exit("protos/gen is out of date, run `make protos`: " + ", ".join(drift))
            return
        shutil.rmtree(GEN, ignore_errors=True)
        shutil.copytree(out, GEN)


if __name__ == "__main__":
    main()

"""What images are built from, checked without building one."""

from __future__ import annotations

import re
import runpy
import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [*sorted(ROOT.glob("services/*/Dockerfile")), ROOT / "clients/python/Dockerfile"]
HEAVY = re.compile(r"^(torch|transformers|vllm|rocksdict)\b")


def extras(text: str) -> list[str]:
    found = re.search(r"install\.sh dependencies (.+)$", text, flags=re.MULTILINE)
    assert found
    return found[1].split()


def build_stage(text: str) -> str:
    """The stage that installs, without the extras: all images have the same."""
    stage = text[text.index("FROM ${BASE} AS build") : text.index("FROM ${BASE}\n")]
    return re.sub(r"(dependencies) .+", r"\1", stage)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_images_are_made_alike(file):
    text = file.read_text()
    stages = re.findall(r"^FROM (\S+)", text, flags=re.MULTILINE)
    assert stages == ["${BASE}", "${BASE}"]
    users = re.findall(r"^USER (\S+)", text, flags=re.MULTILINE)
    assert users == ["flexmarl"]
    assert "--uid 10001" in text
    assert extras(text)
    assert build_stage(text) == build_stage(FILES[0].read_text()), "a mend of one is not in all"
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, flags=re.MULTILINE):
        *sources, _ = shlex.split(line)
        assert [source for source in sources if not (ROOT / source).exists()] == []


@pytest.mark.parametrize("file", FILES[:-1], ids=lambda file: file.parent.name)
def test_a_service_is_healthy_when_it_says_so(file):
    text = file.read_text()
    probed = re.search(r'"flexmarl", "health", "127\.0\.0\.1:(\d+)"', text)
    served = re.search(r'^CMD \["flexmarl", "serve", "(\S+)"\]', text, flags=re.MULTILINE)
    assert probed
    assert served
    config = tomllib.loads((ROOT / f"deploy/docker/etc/{served[1]}.toml").read_text())
    assert config["server"]["port"] == int(probed[1])
    assert f"deploy/docker/etc/{served[1]}.toml" in text


def test_models_are_only_where_they_are_needed():
    requirements = runpy.run_path(str(ROOT / "deploy/docker/requirements.py"))["requirements"]
    heavy = {
        file.parent.name: {
            found[1]
            for line in requirements(ROOT / "pyproject.toml", extras(file.read_text()))
            if (found := HEAVY.match(line))
        }
        for file in FILES
    }
    assert heavy == {
        "meg_store": {"rocksdict"},
        "orchestrator": set(),
        "rollout": {"torch", "transformers"},
        "trainer": {"torch", "transformers"},
        "python": set(),
    }


def test_every_file_of_a_build_gets_into_its_context():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = [line[1:] for line in ignored if line.startswith("!")]
    assert "*" in ignored
    for file in [*FILES, ROOT / "services/rollout/vllm-cpu.Dockerfile"]:
        for line in re.findall(r"^COPY (?!--from)(.+)$", file.read_text(), flags=re.MULTILINE):
            *sources, _ = shlex.split(line)
            outside = [s for s in sources if not any(f"{s}/".startswith(f"{a}/") for a in allowed)]
            assert outside == []

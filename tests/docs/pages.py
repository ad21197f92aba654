"""Code blocks of the documentation.

A block's info string says what it is: a language, and `title="file"` for one that the reader saves
as a file. Blocks of `bash` are run, see `RUN_IN_ORDER`. Those of `sh` cannot be, or not here:
`SHOWN_ONLY` says why of each; their commands and options must exist all the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "docs/tutorial.md"
HOW_TO = sorted((ROOT / "docs/how_to").glob("*.md"))
WITH_CODE = (*sorted((ROOT / "docs").glob("*.md")), *HOW_TO)
PAGES = (
    *WITH_CODE,
    *sorted(ROOT.glob("*.md")),
    *(page for part in ("services", "deploy", "examples") for page in (ROOT / part).rglob("*.md")),
)
LANGUAGES = {"bash", "sh", "python", "toml", "text", "mermaid"}

RUN_IN_ORDER = tuple(
    ROOT / name
    for name in (
        "docs/tutorial.md",
        "README.md",
        "docs/how_to/read_the_timeline.md",
        "docs/how_to/find_out_why_a_run_waits.md",
        "docs/how_to/resume.md",
        "docs/security.md",
        "CONTRIBUTING.md",
    )
)
"""Pages whose `bash` blocks a reader may run one after the other, in one folder."""

_HOSTS = (
    "needs several hosts: tests/deployment/test_three_hosts.py makes them, and runs the example"
)
_STOPPED = "takes a run that somebody stopped on its way: tests/cli/test_train.py does"
_FOREGROUND = "serves until it is ended: every test of a cluster starts it, with these keys"

SHOWN_ONLY = {
    ("README.md", "make demo"): "`.ci/run` does both, whole",
    ("CONTRIBUTING.md", ".venv/bin/pytest tests -m real"): "`.ci/run` runs all of that tier",
    ("docs/deployment.md", "make images"): "needs a container engine: tests/compose does it",
    ("docs/gsm8k.md", "make gsm8k"): "needs the data set: tests/examples/test_gsm8k_real.py has it",
    ("docs/quickstart.md", ".venv/bin/flexmarl train"): "needs an environment with vLLM: "
    "tests/examples/test_gsm8k_vllm.py trains there",
    ("docs/security.md", "export FLEXMARL_CLIENT__CA"): "asks another host: "
    "tests/security/test_locked_cluster.py asks this one",
    ("docs/how_to/resume.md", "flexmarl resume first"): _STOPPED,
    ("docs/how_to/resume.md", "flexmarl resume again"): _STOPPED,
    ("docs/how_to/scale_out.md", ".venv/bin/python -m deploy"): _HOSTS,
    ("docs/how_to/scale_out.md", "flexmarl train"): _HOSTS,
    ("docs/how_to/scale_out.md", "flexmarl store snapshot"): "needs several stores: "
    "tests/cli/test_store_care.py copies, restores and checks them",
    ("docs/how_to/scale_out.md", "flexmarl store restore"): "as the one before it",
    ("services/orchestrator/README.md", "python -m flexmarl"): _FOREGROUND,
    ("services/trainer/README.md", "python -m flexmarl"): _FOREGROUND,
}
"""Each block of `sh`, by its page and its first words, and why no test runs it as it is."""

_BLOCK = re.compile(r"^ *```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"(?:^|\s|`)flexmarl ([a-z][^`\n]*)")


@dataclass(frozen=True)
class Block:
    """One block of code.

    Attributes:
        page: Its document, from the repository's root.
        language: Its language.
        title: File that the reader saves it as; empty for none.
        text: The code.
    """

    page: str
    language: str
    title: str
    text: str


def blocks(page: Path, language: str = "") -> list[Block]:
    """Blocks of a page, those of one language if it is given."""
    found = [
        Block(str(page.relative_to(ROOT)), *(part or "" for part in match.groups()))
        for match in _BLOCK.finditer(page.read_text(encoding="utf-8"))
    ]
    return [block for block in found if language in ("", block.language)]


def write_files(folder: Path) -> list[Path]:
    """The files that the tutorial and the how-tos have their reader make."""
    written = []
    for page in (TUTORIAL, *HOW_TO):
        for block in blocks(page):
            if block.title:
                path = folder / block.title
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text, encoding="utf-8")
                written.append(path)
    return written


def commands(page: Path) -> list[str]:
    """What follows `flexmarl` wherever a page shows it as a command."""
    shown = [block.text for block in blocks(page) if block.language in ("bash", "sh", "")]
    text = page.read_text(encoding="utf-8")
    shown += re.findall(r"`([^`\n]+)`", text)
    joined = "\n".join(shown).replace("\\\n", " ")
    return [match.strip() for match in _COMMAND.findall(joined)]

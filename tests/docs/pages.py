"""Code blocks of the documentation.

A block's info string says what it is: a language, and `title="file"` for one that the reader saves
as a file. Blocks of `bash` are run by `make prove`; `sh`, or no word, is shown only: its commands
and their options must exist.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "docs/tutorial.md"
HOW_TO = sorted((ROOT / "docs/how_to").glob("*.md"))
WITH_CODE = (*sorted((ROOT / "docs").glob("*.md")), *HOW_TO)
WITH_COMMANDS = (*WITH_CODE, ROOT / "README.md", ROOT / "CONTRIBUTING.md")

RUN_IN_ORDER = (
    TUTORIAL,
    *(
        ROOT / f"docs/how_to/{name}.md"
        for name in ("read_the_timeline", "find_out_why_a_run_waits", "resume")
    ),
)
"""Pages whose bash blocks a reader may run one after the other, in one folder."""

_BLOCK = re.compile(r"^ *```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"(?:^|\s|`)flexmarl ([a-z][^`\n]*)")


@dataclass(frozen=True)
class Block:
    """One block of code.

    Attributes:
        page: Name of its document.
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
        Block(page.name, *(part or "" for part in match.groups()))
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

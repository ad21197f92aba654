"""What stands in the repository's texts: links lead somewhere, nothing names one machine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

LINK = re.compile(r"\[[^\]]*\]\(([^)\s#]+)(?:#[^)]*)?\)")

# Written in halves, so that this file is not its own finding.
FORBIDDEN = re.compile(
    "|".join(
        [
            "/(wor" + "k|roo" + "t)/[a-z.]",
            "pypi" + r"\.org",
            "python" + "hosted",
            "registry" + r"\.npmjs",
            "debian" + r"\.org/",
        ]
    )
)
UNFINISHED = re.compile(r"\b(TO" + "DO|FIX" + "ME|XX" + r"X)\b|NotImpl" + "ementedError")


def tracked(root: Path) -> list[Path]:
    """Files of the repository that hold text of ours, those not yet committed included."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
        timeout=60,
    )
    names = sorted(n for n in done.stdout.decode().split("\0") if n)
    return [root / n for n in names if n != "LICENSE" and (root / n).is_file()]


def findings(root: Path, pattern: re.Pattern[str]) -> list[str]:
    """Lines that match, with their file."""
    found = []
    for path in tracked(root):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(root)}:{number}: {line.strip()[:100]}"
            for number, line in enumerate(text.splitlines(), 1)
            if pattern.search(line)
        ]
    return found


def test_no_text_names_a_machine_or_a_registry(root: Path) -> None:
    assert findings(root, FORBIDDEN) == []


def test_nothing_is_left_unfinished(root: Path) -> None:
    assert [f for f in findings(root, UNFINISHED) if not f.startswith("protos/gen/")] == []


def test_links_lead_to_files(root: Path) -> None:
    broken = []
    for path in tracked(root):
        if path.suffix != ".md":
            continue
        for target in LINK.findall(path.read_text(encoding="utf-8")):
            if "://" not in target and not (path.parent / target).exists():
                broken.append(f"{path.relative_to(root)}: {target}")
    assert broken == []


def test_every_decision_record_is_numbered_once(root: Path) -> None:
    numbers = [p.name[:4] for p in sorted((root / "docs/adr").glob("[0-9]*.md"))]
    assert numbers == [f"{n:04d}" for n in range(1, len(numbers) + 1)]
    assert numbers

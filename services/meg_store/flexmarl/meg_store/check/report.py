"""What a check found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

MAX_FINDINGS: Final = 200


@dataclass(frozen=True, slots=True)
class Finding:
    """One damage.

    Attributes:
        kind: What is damaged: database, log, table, row, edge, reference, count, object, segment,
            claim, mark, record, ledger, manifest, event.
        where: The thing, such as `run-1 vertex b000000a0-...`.
        what: What is wrong with it.
    """

    kind: str
    where: str
    what: str


@dataclass(slots=True)
class CheckReport:
    """Findings, the first `MAX_FINDINGS` in full, and how much was looked at."""

    findings: list[Finding] = field(default_factory=list)
    num_findings: int = 0
    checked: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, where: str, what: str) -> None:
        """Note a damage."""
        self.num_findings += 1
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(Finding(kind, where, what))

    def expect(self, holds: bool, kind: str, where: str, what: str) -> None:
        """Note a damage unless something holds."""
        if not holds:
            self.add(kind, where, what)

    def as_json(self) -> dict[str, Any]:
        """As `flexmarl store check --json` prints it."""
        return {
            "checked": dict(sorted(self.checked.items())),
            "findings": [{"kind": f.kind, "where": f.where, "what": f.what} for f in self.findings],
            "unlisted": self.num_findings - len(self.findings),
        }

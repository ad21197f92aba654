"""What a check found."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError

MAX_FINDINGS: Final = 200

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Finding:
    """One damage.

    Attributes:
        shard: Store shard that it was found in; empty where the database does not say its name.
        kind: What is damaged: database, log, table, run, term, row, edge, reference, place, count,
            object, segment, claim, mark, record, ledger, manifest, event.
        where: The thing, such as `run-1 vertex b000000a0-...`.
        what: What is wrong with it.
    """

    shard: str
    kind: str
    where: str
    what: str


@dataclass(slots=True)
class CheckReport:
    """Findings, the first `MAX_FINDINGS` in full, and how much was looked at.

    Attributes:
        stores: Folders that were read, by shard.
        findings: Damage.
        num_findings: All of it, beyond `findings` too.
        checked: How many things of each kind were read.
        left_out: Shards of a run that were not read, by run: nothing is said of what lies there,
            nor of whether it agrees with the rest.
    """

    stores: dict[str, Path] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    num_findings: int = 0
    checked: Counter[str] = field(default_factory=Counter)
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def of(self, shard: str) -> ShardReport:
        """The report, as one shard's checks write it."""
        return ShardReport(self, shard)

    def add(self, finding: Finding) -> None:
        """Note a damage."""
        self.num_findings += 1
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(finding)

    def as_json(self) -> dict[str, Any]:
        """As `flexmarl store check --json` prints it."""
        return {
            "stores": [
                {"shard": shard, "folder": str(folder)} for shard, folder in self.stores.items()
            ],
            "checked": dict(sorted(self.checked.items())),
            "findings": [
                {"shard": f.shard, "kind": f.kind, "where": f.where, "what": f.what}
                for f in self.findings
            ],
            "unlisted": self.num_findings - len(self.findings),
            "left_out": self.left_out,
        }


@dataclass(frozen=True, slots=True)
class ShardReport:
    """A report for the findings of one shard."""

    whole: CheckReport
    shard: str

    @property
    def checked(self) -> Counter[str]:
        """How many things of each kind were read, over all shards."""
        return self.whole.checked

    def add(self, kind: str, where: str, what: str) -> None:
        """Note a damage."""
        self.whole.add(Finding(self.shard, kind, where, what))

    def expect(self, holds: bool, kind: str, where: str, what: str) -> None:
        """Note a damage unless something holds."""
        if not holds:
            self.add(kind, where, what)

    def read(self, kind: str, where: str, decode: Callable[[bytes], T], value: bytes) -> T | None:
        """A stored value; None, and a finding, where it is not what it should be."""
        try:
            return decode(value)
        except (DecodeError, struct.error, UnicodeDecodeError) as error:
            self.add(kind, where, f"is not readable: {error}")
            return None

"""One group of a batch: its samples and their attempts, and where it stands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from flexmarl.core.closure import Close, Drop
from flexmarl.core.ids import GroupId, SampleId
from flexmarl.core.run_effects import GroupSpec
from flexmarl.core.states import GroupStatus, SampleStatus
from flexmarl.core.training_rows import Row, SampleFact


class GroupStage(Enum):
    """Where a group stands."""

    ADMITTING = auto()
    OPEN = auto()
    READING = auto()
    CLOSING = auto()
    TERMINAL = auto()


@dataclass(slots=True)
class GroupState:
    """A group, its samples, and how it ends.

    `attempts` and `current` hold the newest attempt of each sample and its status, by ordinal;
    `samples` holds every attempt that ended, by id; `leaving` what open attempts told, by id.
    """

    spec: GroupSpec
    group_id: GroupId
    stage: GroupStage
    attempts: dict[int, int] = field(default_factory=dict)
    current: dict[int, SampleStatus] = field(default_factory=dict)
    samples: dict[str, SampleFact] = field(default_factory=dict)
    leaving: dict[str, SampleFact] = field(default_factory=dict)
    decision: Close | Drop | None = None
    cancelled: bool = False
    status: GroupStatus = GroupStatus.OPEN
    rows: tuple[Row, ...] = ()
    released: int = 0
    zero_variance: bool = False
    lost: bool = False

    def sample_id(self, ordinal: int) -> SampleId:
        """The newest attempt of a sample."""
        return SampleId(self.group_id, ordinal, self.attempts[ordinal])

    def begin(self, ordinals: Iterable[int], *, attempt: int = 0) -> list[SampleId]:
        """Open an attempt of samples."""
        opened = list(ordinals)
        self.attempts.update(dict.fromkeys(opened, attempt))
        self.current.update(dict.fromkeys(opened, SampleStatus.OPEN))
        return [self.sample_id(ordinal) for ordinal in opened]

    def status_of(self, sample_id: str) -> SampleStatus:
        """Status of a sample attempt; one that nothing was heard of is open."""
        fact = self.samples.get(sample_id)
        return SampleStatus.OPEN if fact is None else fact.status

    def newest(self) -> list[SampleFact]:
        """What is known of the newest attempt of each sample."""
        facts = []
        for ordinal in self.current:
            sample_id = self.sample_id(ordinal)
            text = str(sample_id)
            fact = self.samples.get(text) or self.leaving.get(text)
            facts.append(fact or SampleFact(sample_id=sample_id, status=SampleStatus.OPEN))
        return facts

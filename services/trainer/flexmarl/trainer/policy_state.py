"""The state of a bound policy: what is saved of it, and what its ranks hold beyond that.

`record` is the newest saved state. `ledger` is the content of the ranks' gradient sum, `saved` that
of the newest saved one; they differ by what a crash would lose. Whoever calls sees to it that one
method runs at a time, and that a failure in the middle ends the binding.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

from flexmarl.api.meg_store.v1 import graph_pb2, meg_store_pb2
from flexmarl.api.trainer.v1 import rank_pb2, trainer_pb2
from flexmarl.core.ledger import Ledger, Presence
from flexmarl.trainer import records
from flexmarl.trainer.binding_parts import BindingParts
from flexmarl.trainer.keepers import Keepers
from flexmarl.trainer.pool import Meeting
from flexmarl.trainer.results import largest
from flexmarl.trainer.segments import StateTargets

_SET: Final = ("weights", "master", "moments")
_NOBODY: Final[Mapping[int, rank_pb2.Handover]] = {}


class PolicyState:
    """See the module's text.

    Args:
        parts: Ranks, segments, store.
        check: Raises when the binding may no longer write.
    """

    def __init__(self, parts: BindingParts, *, check: Callable[[], None]) -> None:
        self._parts = parts
        self._check = check
        self._parameters: list[meg_store_pb2.NamedBuffer] = []
        self._published: list[meg_store_pb2.NamedBuffer] = []
        self._record: graph_pb2.StateRecord | None = None
        self._saved = Ledger(batch=0)
        self._num_saves = 0
        self._has_moments = False
        self.ledger = self._saved
        self.size_bytes = 0
        self.loaded_bytes: Counter[str] = Counter()

    @property
    def started(self) -> bool:
        """Whether the ranks have a state, made or loaded."""
        return self._record is not None

    @property
    def record(self) -> graph_pb2.StateRecord:
        """The newest saved state."""
        assert self._record is not None, "a binding has a state"
        return self._record

    def presence(self, micro_batch_id: str, *, batch: int) -> Presence:
        """Says what became of a micro-batch: in the sum, or in the update that made this set."""
        for ledger in (self.ledger, records.applied_ledger(self.record)):
            if ledger is not None and ledger.batch == batch:
                return ledger.presence(micro_batch_id)
        return Presence.NEW

    async def start(
        self, meeting: Meeting, *, version: int | None, keepers: Keepers | None
    ) -> dict[str, float]:
        """Binds the ranks and loads the newest saved state, or makes and saves set 0.

        Args:
            meeting: How the ranks find each other.
            version: Newest committed version.
            keepers: Slots that may keep the state, if it is to come from them.

        Returns:
            Seconds by part.

        Raises:
            DomainError: VERSION_MISMATCH when the saved state is not of this or the next version;
                MODEL_INVALID, CHILD_DIED, and what the store answers.
        """
        key = self._parts.claim.key
        state = await self._parts.store.get_state(key.run_id, key.policy)
        records.check_loadable(state, policy=key.policy, version=version)
        if state is None:
            return await self._make_first_set(meeting)
        return await self._load(meeting, state, version=version, keepers=keepers)

    async def save_sum(self) -> trainer_pb2.StateResult:
        """Writes sum and ledger, unless they are saved already.

        Master and moments did not change since they were saved with their set, so a swap in the
        middle of a batch writes the sum alone.
        """
        if self.ledger == self._saved:
            return trainer_pb2.StateResult(state=self.record)
        started = time.perf_counter()
        ledger = self.ledger
        kinds = ("gradients",) if ledger.added else ()
        self._num_saves += 1
        async with self._targets(kinds, version=ledger.batch, number=self._num_saves) as targets:
            if kinds:
                export = rank_pb2.RankExport(targets=targets.for_ranks())
                await self._command(rank_pb2.RankCommand(export=export))
            refs = await targets.seal()
            claim = self._parts.claim
            record = records.with_sum(self.record, claim, ledger, refs.get("gradients"))
            await self._write(record, ledger)
        seconds = {"save": time.perf_counter() - started}
        return trainer_pb2.StateResult(state=self.record, seconds=seconds)

    @asynccontextmanager
    async def room_for_set(self, ledger: Ledger) -> AsyncIterator[StateTargets]:
        """Makes room for the set that an update makes, before anything changes.

        Raises:
            DomainError: DISK_FULL, MEMORY_TIER_FULL.
        """
        async with self._targets(_SET, version=ledger.batch + 1) as targets:
            yield targets

    async def step(self, ledger: Ledger, targets: StateTargets) -> trainer_pb2.StateResult:
        """Makes and saves set `ledger.batch` + 1.

        The sum is not saved on its own first: set, ledger and marks are one SaveState, so after a
        crash either all of it is there, or the newest save of set `batch` is and the rest is
        computed again, which costs computing and never rows.
        """
        started = time.perf_counter()
        state = self.record
        async with self._parts.segments.opened(
            {} if self._has_moments else {"moments": state.moments}
        ) as sources:
            apply = rank_pb2.RankApply(
                denominator=self._parts.config.loss.denominator(ledger.counts),
                num_updates=state.num_updates,
                targets=targets.for_ranks(),
                sources=sources,
            )
            replies = await self._command(rank_pb2.RankCommand(apply=apply))
        self._has_moments = True
        written = replies[0].written
        refs = await targets.seal(written)
        seconds = largest([reply.written.seconds for reply in replies])
        metrics = dict(written.metrics)
        if "skipped" not in metrics:
            metrics["weights_unchanged"] = float(written.weights_hash == state.weights_hash)
        saving = time.perf_counter()
        record = records.applied_state(
            self._parts.claim,
            refs,
            weights_hash=written.weights_hash,
            ledger=ledger,
            num_updates=state.num_updates + ("skipped" not in metrics),
            metrics=metrics,
        )
        await self._write(record, Ledger(batch=ledger.batch + 1))
        seconds["save"] = time.perf_counter() - saving
        seconds["total"] = time.perf_counter() - started
        return trainer_pb2.StateResult(state=record, metrics=metrics, seconds=seconds)

    async def _make_first_set(self, meeting: Meeting) -> dict[str, float]:
        initial = rank_pb2.RankInitial(seed=self._parts.init_seed)
        seconds = await self._bind_ranks(meeting, rank_pb2.RankBind(initial=initial))
        kinds = _SET[:1] if self._parts.frozen else _SET
        async with self._targets(kinds, version=0) as targets:
            export = rank_pb2.RankExport(targets=targets.for_ranks())
            replies = await self._command(rank_pb2.RankCommand(export=export))
            written = replies[0].written
            refs = await targets.seal(written)
        record = records.first_state(self._parts.claim, refs, weights_hash=written.weights_hash)
        await self._write(record, Ledger(batch=0))
        return seconds

    async def _load(
        self,
        meeting: Meeting,
        state: graph_pb2.StateRecord,
        *,
        version: int | None,
        keepers: Keepers | None,
    ) -> dict[str, float]:
        self._record = state
        self.ledger = self._saved = records.ledger_of(state, version=version)
        if self._parts.frozen:
            return {}
        # Moments are left out until the update: a swap in the middle of a batch never moves them.
        refs = {"master": state.master}
        if self.ledger.added:
            refs["gradients"] = state.gradients
        # Named even where the ranks keep the content: only they know what is still there when they
        # are bound, since state that is loaded ahead of its turn takes kept room at any moment.
        async with self._parts.segments.opened(refs) as segments:
            saved = rank_pb2.RankSaved(
                master_key=state.master.key, moments_key=state.moments.key, segments=segments
            )
            givers = {} if keepers is None else await keepers.ask(state)
            return await self._bind_ranks(meeting, rank_pb2.RankBind(saved=saved), givers)

    async def _bind_ranks(
        self,
        meeting: Meeting,
        template: rank_pb2.RankBind,
        givers: Mapping[int, rank_pb2.Handover] = _NOBODY,
    ) -> dict[str, float]:
        parts = self._parts
        template.binding = str(parts.claim.key)
        template.policy_json = parts.config.model_dump_json().encode()
        template.model_path, template.model_hash = parts.model_path, parts.model_hash
        template.package_path = parts.package_path
        if parts.config.loss.kl is not None or parts.config.lora is not None:
            template.reference.seed = parts.init_seed
        template.members.extend(parts.ranks.members)
        template.num_near = parts.ranks.num_near
        template.group_prefix = meeting.prefix
        template.kept_groups.extend(meeting.kept)
        template.store_host = meeting.host
        template.store_port = meeting.port
        commands = []
        for rank in range(len(parts.ranks)):
            command = rank_pb2.RankCommand(bind=template)
            command.bind.rank = rank
            if rank in givers:
                command.bind.saved.giver.CopyFrom(givers[rank])
            commands.append(command)
        self._check()
        replies = await parts.ranks.each(commands)
        self._parameters = list(replies[0].bound.parameters)
        self._published = list(replies[0].bound.published) or self._parameters
        self.size_bytes = replies[0].bound.state_bytes
        self._has_moments = all(reply.bound.has_moments for reply in replies)
        for reply in replies:
            self.loaded_bytes.update(reply.bound.loaded_bytes)
        return dict(replies[0].bound.seconds)

    async def _command(self, command: rank_pb2.RankCommand) -> list[rank_pb2.RankReply]:
        self._check()
        return await self._parts.ranks.command(command)

    async def _write(self, state: graph_pb2.StateRecord, ledger: Ledger) -> None:
        """The one write that makes state and ledger true together."""
        self._check()
        await self._parts.store.save_state(self._parts.claim.key.run_id, state)
        self._record = state
        self.ledger = self._saved = ledger

    @asynccontextmanager
    async def _targets(
        self, kinds: Sequence[str], *, version: int, number: int | None = None
    ) -> AsyncIterator[StateTargets]:
        targets = await self._parts.segments.allocate(
            kinds,
            self._parameters,
            published=self._published,
            world_size=len(self._parts.ranks),
            version=version,
            number=number,
        )
        try:
            yield targets
        finally:
            targets.abandon()

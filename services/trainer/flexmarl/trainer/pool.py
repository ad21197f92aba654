"""The pool of warm workers of a trainer, and the place where groups of them meet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from flexmarl.api.trainer.v1 import rank_pb2
from flexmarl.core.errors import DomainError
from flexmarl.core.process_groups import GroupBook
from flexmarl.runtime.aio import Background
from flexmarl.runtime.children import Children
from flexmarl.runtime.logging import get_logger
from flexmarl.trainer.config import TrainerConfig
from flexmarl.trainer.rendezvous import Rendezvous
from flexmarl.trainer.simulated.process import SimulatedProcess
from flexmarl.trainer.simulated.rank import SimulatedRank
from flexmarl.trainer.workers import RankProcess, Worker

PRELOAD = ("flexmarl.trainer.rank.preload",)
"""What workers find imported: the trainer's own process never imports torch."""

_log = get_logger(__name__)

_RANK = "flexmarl.trainer.rank.main:run_rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """How the workers of a group find each other.

    Attributes:
        prefix: Names the group within the rendezvous store; "" where nobody has to meet.
        kept: Prefixes of the groups that workers keep.
        host: Host of the rendezvous store.
        port: Its port; 0 where nobody has to meet.
    """

    prefix: str
    kept: Sequence[str]
    host: str
    port: int


class WorkerPool:
    """One warm worker per slot.

    Args:
        config: Slots, devices, times.
        children: Starts processes.
        background: Owns the supervisors.
        on_death: Called with the slot of a worker that died.
    """

    def __init__(
        self,
        config: TrainerConfig,
        children: Children,
        background: Background,
        *,
        on_death: Callable[[str], None],
    ) -> None:
        self._config = config
        self._children = children
        self._background = background
        self._on_death = on_death
        self._rendezvous = Rendezvous(
            children, host=config.rendezvous_host, timeout_s=config.collective_timeout_s
        )
        self._once: set[str] = set()
        # Each worker keeps `max_modules` groups on average.
        self._groups = GroupBook(max_groups=config.max_modules * len(config.slots))
        self.workers = {
            slot: Worker(
                slot=slot,
                position=position,
                spawn=self._spawner(slot, position),
                warm_timeout_s=config.warm_timeout_s,
                on_death=self._died,
            )
            for position, slot in enumerate(config.slots)
        }
        for slot, worker in self.workers.items():
            background.start(f"worker of {slot}", worker.run())

    @property
    def ready(self) -> bool:
        """Whether all workers are warm."""
        return all(worker.ready for worker in self.workers.values())

    async def wait_ready(self) -> None:
        """Waits until all workers are warm.

        Raises:
            DomainError: NOT_READY.
        """
        for worker in self.workers.values():
            await worker.wait_ready(timeout_s=self._config.warm_timeout_s)

    async def meet(self, workers: Sequence[Worker]) -> Meeting:
        """Says how a group of workers finds itself; starts the rendezvous when first needed."""
        if len(workers) == 1:
            return Meeting(prefix="", kept=self.kept_groups(), host="", port=0)
        return await self._meeting(self._groups.meet([_process_name(w) for w in workers]))

    async def meet_others(self, prefix: str) -> Meeting:
        """Says how a group over several trainers finds itself: here, where it is led from.

        It is made for one binding, under a prefix of its own, and not kept: what a trainer keeps is
        its own book's, and no book knows what the workers of several trainers keep. `part` ends it.
        """
        self._once.add(prefix)
        return await self._meeting(prefix)

    async def meet_in_pairs(self, prefix: str) -> rank_pb2.Handover:
        """Says where workers of a binding meet others, under names below its prefix; see `part`."""
        self._once.add(prefix)
        port = await self._rendezvous.port(self._prefixes)
        return rank_pb2.Handover(prefix=prefix, store_host=self._rendezvous.host, store_port=port)

    def part(self, prefix: str) -> None:
        """Says that nobody meets under this prefix any more."""
        self._once.discard(prefix)

    def kept_groups(self) -> Sequence[str]:
        """Prefixes of the groups that workers keep."""
        return self._groups.kept

    async def _meeting(self, name: str) -> Meeting:
        if self._config.device == "simulated":
            return Meeting(prefix="", kept=(), host="", port=0)
        port = await self._rendezvous.port(self._prefixes)
        return Meeting(
            prefix=name,
            kept=[*self.kept_groups(), name],
            host=self._rendezvous.host,
            port=port,
        )

    @property
    def _prefixes(self) -> set[str]:
        """What meetings in progress, and groups that are kept, are known by."""
        return {*self._groups.kept, *self._once}

    def _died(self, worker: Worker) -> None:
        """Ends what was bound to a dead worker, and the groups that it was in."""
        self._on_death(worker.slot)
        self._groups.forget(_process_name(worker))
        forget = rank_pb2.RankForget(position=worker.position)
        for other in self.workers.values():
            if other is not worker and other.ready:
                self._background.start(
                    f"{other.slot} forgets {worker.slot}", self._forget(other, forget)
                )

    async def _forget(self, worker: Worker, forget: rank_pb2.RankForget) -> None:
        command = rank_pb2.RankCommand(forget=forget)
        try:
            await worker.call(command, timeout_s=self._config.command_timeout_s)
        except DomainError as error:
            # Most often its own end: whoever waits in a collective for a dead rank is ended.
            _log.info("worker_did_not_forget", slot=worker.slot, error=str(error))

    def _spawner(self, slot: str, position: int) -> Callable[[], Awaitable[RankProcess]]:
        config = self._config
        args = {
            "position": position,
            "device": "cpu" if config.device == "cpu" else f"cuda:{position}",
            "interface": config.interface,
            "threads": config.compute_threads,
            "timeout_s": config.collective_timeout_s,
            "arena_bytes": config.arena_bytes,
            "max_arena_bytes": config.max_arena_bytes,
            "max_modules": config.max_modules,
            "max_reference_bytes": config.max_reference_bytes,
            "verify": config.verify_swaps,
            "warm": not config.cold_start,
        }

        async def spawn() -> RankProcess:
            return await self._children.spawn_preloaded(_RANK, args, name=f"rank/{slot}")

        async def simulate() -> RankProcess:
            simulated = config.simulated
            return SimulatedProcess(
                SimulatedRank(simulated.costs(), seconds_scale=simulated.seconds_scale)
            )

        return simulate if config.device == "simulated" else spawn


def _process_name(worker: Worker) -> str:
    """Names a worker's process: a group with a new one is a new group."""
    return f"{worker.position}g{worker.generation}"

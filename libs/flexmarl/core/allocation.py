"""Which policy holds which device slots.

A policy needs `world_size` slots of one trainer, all or none. Among those that wait, the one with
the longest remaining work goes first. A bound policy gives way

- at once when it has nothing left to do in the batch,
- after its minimum residence when it has no ready work, or when the waiting one has
  `PREEMPT_RATIO` times its ready work (a smaller ratio would swap the two to and fro),

and in every case only between two operations, so at a boundary between micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

PREEMPT_RATIO = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One policy, as the allocation sees it.

    Attributes:
        policy: Its name.
        world_size: Slots that it needs.
        work: Ready work (tokens; an update or a first binding counts 1); 0 when there is none.
        expects: Whether more work may come in this batch.
        trainer: Trainer that it is bound to; None when it is not.
        slots: Slots that it holds.
        since: When it was bound.
        busy: Whether an operation runs on it.
        leaving: Whether it is giving its slots back already.
        finishing: Whether its update is all that is left: its slots come free by themselves, and
            nobody else has to leave in the middle of his work.
        last_trainer: Trainer that held it last; its state may still be warm there.
    """

    policy: str
    world_size: int
    work: float
    expects: bool = False
    trainer: str | None = None
    slots: tuple[str, ...] = ()
    since: float = 0.0
    busy: bool = False
    leaving: bool = False
    finishing: bool = False
    last_trainer: str | None = None


@dataclass(frozen=True, slots=True)
class BindSlots:
    """Bind a policy to slots."""

    policy: str
    trainer: str
    slots: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class GiveWay:
    """Suspend a policy so that another one gets its slots."""

    policy: str
    reason: str


@dataclass(frozen=True, slots=True)
class Allocation:
    """What to do now, and when to look again (None: at the next event)."""

    actions: tuple[BindSlots | GiveWay, ...]
    look_again_at: float | None


def allocate(
    demands: Iterable[Demand],
    *,
    trainers: Mapping[str, Sequence[str]],
    min_residence_s: float,
    now: float,
) -> Allocation:
    """Decides over the slots.

    Args:
        demands: All policies of the run.
        trainers: Slots of each trainer that can be used now.
        min_residence_s: Time that a policy keeps its slots while it has or expects work.
        now: Time of the decision, on the clock of `Demand.since`.
    """
    by_name = {demand.policy: demand for demand in demands}
    bound = [d for d in by_name.values() if d.trainer is not None]
    rooms = {name: _Room(name, slots, bound) for name, slots in sorted(trainers.items())}
    waiting = sorted(
        (d for d in by_name.values() if d.trainer is None and d.work > 0),
        key=lambda d: (-d.work, d.policy),
    )
    actions: list[BindSlots | GiveWay] = []
    look_again: list[float] = []
    for demand in waiting:
        room = _with_room(demand, rooms.values())
        if room is not None:
            slots = room.take(demand.world_size)
            reason = f"{demand.work:g} of ready work, {demand.world_size} free slot(s)"
            actions.append(BindSlots(demand.policy, room.trainer, slots, reason))
            continue
        plans = [
            _plan(demand, room, min_residence_s=min_residence_s, now=now) for room in rooms.values()
        ]
        look_again.extend(plan.look_again_at for plan in plans if plan.look_again_at is not None)
        possible = [plan for plan in plans if plan.victims is not None]
        if possible:
            best = min(possible, key=_cost)
            victims = best.victims or ()
            best.room.reserve(demand.world_size, victims)
            reason = f"{demand.policy} waits with {demand.work:g} of ready work"
            actions.extend(GiveWay(victim.policy, reason) for victim in victims)
    return Allocation(tuple(actions), min(look_again, default=None))


class _Room:
    """Slots of one trainer: free ones, and those that will be when somebody has left."""

    def __init__(self, trainer: str, slots: Sequence[str], bound: Sequence[Demand]) -> None:
        here = [d for d in bound if d.trainer == trainer]
        held = {slot for d in here for slot in d.slots}
        self.trainer = trainer
        self.free = [slot for slot in slots if slot not in held]
        self.coming = sum(len(d.slots) for d in here if d.leaving or d.finishing)
        self.holders = sorted(
            (d for d in here if not d.leaving and not d.finishing and not d.busy),
            key=lambda d: (d.work, d.expects, d.since, d.policy),
        )

    def take(self, count: int) -> tuple[str, ...]:
        taken, self.free = tuple(self.free[:count]), self.free[count:]
        return taken

    def reserve(self, count: int, victims: Sequence[Demand]) -> None:
        """Keep free and coming slots for a policy, so that nobody behind it counts on them."""
        self.holders = [d for d in self.holders if d not in victims]
        self.coming += sum(len(d.slots) for d in victims)
        from_free = min(count, len(self.free))
        self.free = self.free[from_free:]
        self.coming -= count - from_free


@dataclass(frozen=True, slots=True)
class _Plan:
    """Who would have to leave a trainer; None when nobody may, or not enough of them."""

    room: _Room
    victims: tuple[Demand, ...] | None
    look_again_at: float | None


def _with_room(demand: Demand, rooms: Iterable[_Room]) -> _Room | None:
    fitting = [room for room in rooms if len(room.free) >= demand.world_size]
    for room in fitting:
        if room.trainer == demand.last_trainer:
            return room
    # The fullest that fits keeps room for policies with more ranks.
    return min(fitting, key=lambda room: (len(room.free), room.trainer), default=None)


def _plan(demand: Demand, room: _Room, *, min_residence_s: float, now: float) -> _Plan:
    short = demand.world_size - len(room.free) - room.coming
    chosen: list[Demand] = []
    later: list[float] = []
    for victim in room.holders:
        if short <= 0:
            break
        at = _gives_way_at(victim, demand, min_residence_s=min_residence_s)
        if at is not None and at > now:
            later.append(at)
        elif at is not None:
            chosen.append(victim)
            short -= len(victim.slots)
    if short > 0:
        return _Plan(room, None, min(later, default=None))
    return _Plan(room, tuple(chosen), None)


def _gives_way_at(victim: Demand, demand: Demand, *, min_residence_s: float) -> float | None:
    if victim.work == 0 and not victim.expects:
        return victim.since
    if victim.work == 0 or demand.work >= PREEMPT_RATIO * victim.work:
        return victim.since + min_residence_s
    return None


def _cost(plan: _Plan) -> tuple[float, str]:
    return sum(victim.work for victim in plan.victims or ()), plan.room.trainer

"""Which policy holds which device slots: a plan over estimates, made anew at every event.

A policy needs slots of one trainer, all or none. Among those that wait, the one with the longest
remaining work goes first. It gets `world_size` slots; those that nobody else waits for, too, as far
as its share of the remaining work and `max_world_size` go. A bound policy gives way

- at once when it has nothing left to do in the batch,
- after its minimum residence when it has no ready work and the waiting one's is worth the swap,
- after its minimum residence when it has been idle for as long as swapping both takes, to whoever
  waits: how long it will go on idling is not known, and who leaves after as long as leaving costs
  never pays more than twice what was best (the argument of the ski rental problem),
- after its minimum residence when the waiting one has `PREEMPT_RATIO` times its ready work (a
  smaller ratio would swap the two to and fro),
- to itself, when free slots, or those of policies that have no ready work, would save it
  `WIDEN_RATIO` times what the swaps cost,

and in every case only between two operations, so at a boundary between micro-batches. A policy with
a place of its own (static allocation) keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flexmarl.core.training_estimates import speed

PREEMPT_RATIO = 2.0
WIDEN_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class Place:
    """Slots of one trainer that are kept for one policy."""

    trainer: str
    slots: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One policy, as the allocation sees it.

    Attributes:
        policy: Its name.
        world_size: Slots that it needs.
        max_world_size: Most slots that it can use; below `world_size` means just those.
        work: Ready work (tokens; an update or a first binding counts 1); 0 when there is none.
        remaining: Estimate of all its work that is left in the batch, in tokens.
        rate: Tokens per second on one slot.
        swap_s: What taking it off its slots and on again costs, in seconds.
        expects: Whether more work may come in this batch.
        trainer: Trainer that it is bound to; None when it is not.
        slots: Slots that it holds.
        since: When it was bound.
        idle_since: When its last operation ended.
        busy: Whether an operation runs on it.
        leaving: Whether it is giving its slots back already.
        finishing: Whether its update is all that is left: its slots come free by themselves, and
            nobody else has to leave in the middle of his work.
        last_trainer: Trainer that held it last; its state may still be warm there.
        place: Slots kept for it; None where slots go where work is.
    """

    policy: str
    world_size: int
    work: float
    max_world_size: int = 0
    remaining: float = 0.0
    rate: float = 1.0
    swap_s: float = 0.0
    expects: bool = False
    trainer: str | None = None
    slots: tuple[str, ...] = ()
    since: float = 0.0
    idle_since: float = 0.0
    busy: bool = False
    leaving: bool = False
    finishing: bool = False
    last_trainer: str | None = None
    place: Place | None = None

    @property
    def remaining_s(self) -> float:
        """Seconds of one slot that its remaining work takes."""
        return max(self.remaining, self.work) / self.rate

    @property
    def worth_a_swap(self) -> bool:
        """Whether its ready work outweighs a swap, or will not grow any more."""
        return not self.expects or self.work / self.rate >= self.swap_s


@dataclass(frozen=True, slots=True)
class BindSlots:
    """Bind a policy to slots."""

    policy: str
    trainer: str
    slots: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class GiveWay:
    """Suspend a policy so that another one, or it itself, gets slots."""

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
    everyone = list(demands)
    bound = [d for d in everyone if d.trainer is not None]
    rooms = {name: _Room(name, slots, bound) for name, slots in sorted(trainers.items())}
    given: list[tuple[Demand, _Room, list[str]]] = []
    leaves: list[GiveWay] = []
    look_again: list[float] = []
    unserved = False
    for demand in waiting_in_order(everyone):
        if demand.place is not None:
            room = rooms.get(demand.place.trainer)
            if room is not None and room.take_place(demand.place.slots):
                given.append((demand, room, list(demand.place.slots)))
            continue
        found = _with_room(demand, rooms.values())
        if found is not None:
            given.append((demand, found, found.take(demand.world_size)))
            continue
        unserved = True
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
            leaves.extend(GiveWay(victim.policy, reason) for victim in victims)
    if not unserved:
        _widen(given, everyone)
        leaves.extend(_widenings(rooms.values(), everyone))
    binds = [
        BindSlots(
            demand.policy,
            room.trainer,
            tuple(slots),
            f"{demand.work:g} of ready work, {len(slots)} free slot(s)",
        )
        for demand, room, slots in given
    ]
    return Allocation((*binds, *leaves), min(look_again, default=None))


def waiting_in_order(demands: Iterable[Demand]) -> list[Demand]:
    """Returns the policies that wait for slots, who is served first in front."""
    # Who has no place of its own is through quickly, and would wait for ever behind those with one.
    return sorted(
        (d for d in demands if d.trainer is None and d.work > 0),
        key=lambda d: (d.place is not None, -d.remaining_s, d.policy),
    )


class _Room:
    """Slots of one trainer: free ones, and those that will be when somebody has left."""

    def __init__(self, trainer: str, slots: Sequence[str], bound: Sequence[Demand]) -> None:
        here = [d for d in bound if d.trainer == trainer]
        held = {slot for d in here for slot in d.slots}
        self.trainer = trainer
        self.size = len(slots)
        self.free = [slot for slot in slots if slot not in held]
        self.coming = sum(len(d.slots) for d in here if d.leaving or d.finishing)
        self.holders = sorted(
            (d for d in here if not (d.leaving or d.finishing or d.busy or d.place)),
            key=lambda d: (d.work, d.expects, d.since, d.policy),
        )

    def take(self, count: int) -> list[str]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def take_place(self, slots: Sequence[str]) -> bool:
        if not set(slots) <= set(self.free):
            return False
        self.free = [slot for slot in self.free if slot not in slots]
        return True

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
    if victim.work and victim.remaining_s / speed(len(victim.slots)) <= victim.swap_s:
        return None  # it is through sooner than it could come back
    settled_at = victim.since + min_residence_s
    outweighs = demand.work / demand.rate >= PREEMPT_RATIO * victim.work / victim.rate
    if demand.worth_a_swap and outweighs:
        return settled_at
    if victim.work:
        return None
    return max(settled_at, victim.idle_since + victim.swap_s + demand.swap_s)


def _cost(plan: _Plan) -> tuple[float, str]:
    return sum(victim.work / victim.rate for victim in plan.victims or ()), plan.room.trainer


def _share(demand: Demand, everyone: Sequence[Demand], room: _Room) -> int:
    """Slots that a policy should hold by its part of the work that is left."""
    most = max(demand.max_world_size, demand.world_size)
    total_s = sum(other.remaining_s for other in everyone)
    fair = round(room.size * demand.remaining_s / total_s) if total_s else 0
    return min(max(fair, demand.world_size), most)


def _widen(given: list[tuple[Demand, _Room, list[str]]], everyone: Sequence[Demand]) -> None:
    for demand, room, slots in given:
        if demand.place is None:
            slots += room.take(max(_share(demand, everyone, room) - len(slots), 0))


def _widenings(rooms: Iterable[_Room], everyone: Sequence[Demand]) -> list[GiveWay]:
    """Policies that leave so that a bound one gets more slots; one is helped per trainer."""
    leaves: list[GiveWay] = []
    for room in rooms:
        for holder in sorted(room.holders, key=lambda d: (-d.remaining_s, d.policy)):
            if holder.work:
                leaves.extend(found := _widening(holder, room, everyone))
                if found:
                    break
    return leaves


def _widening(holder: Demand, room: _Room, everyone: Sequence[Demand]) -> list[GiveWay]:
    """Who leaves for a bound policy to get free slots, and those of policies without work."""
    held = len(holder.slots)
    wanted, there = _share(holder, everyone, room), held + len(room.free)
    idle: list[Demand] = []
    for other in room.holders:
        if there < wanted and not other.work:
            idle.append(other)
            there += len(other.slots)
    wider = min(wanted, there)
    if wider <= held:
        return []
    saved_s = holder.remaining_s * (1 / speed(held) - 1 / speed(wider))
    # Who has work to come pays for its way back.
    swaps_s = holder.swap_s + sum(other.swap_s for other in idle if other.expects)
    if saved_s <= WIDEN_RATIO * swaps_s:
        return []
    reason = f"{wider} slots instead of {held} save {holder.policy} {saved_s:.3g} s"
    return [GiveWay(leaving.policy, reason) for leaving in (holder, *idle)]

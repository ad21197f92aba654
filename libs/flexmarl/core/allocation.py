"""Which policy holds which device slots: a plan over estimates, made anew at every event.

A policy needs slots of one trainer, all or none; of several only where no trainer has as many, for
its ranks would speak over the network. Among those that wait, the one with the longest remaining
work goes first. It gets `world_size` slots; those that nobody else waits for, too, as far
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
a place of its own (static allocation) keeps it. Where nobody has work, those are bound whose work
is expected (`binding_ahead`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flexmarl.core.binding_ahead import bind_ahead
from flexmarl.core.demands import PREEMPT_RATIO, WIDEN_RATIO, Demand, Place, share_of
from flexmarl.core.slot_rooms import Hall, Room
from flexmarl.core.training_estimates import speed


@dataclass(frozen=True, slots=True)
class BindSlots:
    """Bind a policy to slots, one rank each in this order; the first trainer leads."""

    policy: str
    trainer: str
    slots: tuple[str, ...]
    reason: str
    beyond: tuple[Place, ...] = ()


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
    ahead: bool = True,
) -> Allocation:
    """Decides over the slots.

    Args:
        demands: All policies of the run.
        trainers: Slots of each trainer that can be used now.
        min_residence_s: Time that a policy keeps its slots while it has or expects work.
        now: Time of the decision, on the clock of `Demand.since`.
        ahead: Whether policies are bound before they have work, where nobody has any.
    """
    everyone = list(demands)
    bound = [d for d in everyone if d.trainer is not None]
    rooms = {name: Room(name, slots, bound) for name, slots in sorted(trainers.items())}
    given: list[tuple[Demand, list[Place]]] = []
    leaves: list[GiveWay] = []
    look_again: list[float] = []
    unserved = False
    for demand in waiting_in_order(everyone):
        if demand.places:
            if _take_places(demand, rooms):
                given.append((demand, list(demand.places)))
            continue
        choice = _choice(demand, rooms)
        found = _with_room(demand, choice)
        if found is not None:
            given.append((demand, found.take(demand.world_size)))
            continue
        unserved = True
        plans = [_plan(demand, room, min_residence_s=min_residence_s, now=now) for room in choice]
        look_again.extend(plan.look_again_at for plan in plans if plan.look_again_at is not None)
        possible = [plan for plan in plans if plan.victims is not None]
        if possible:
            best = min(possible, key=_cost)
            victims = best.victims or ()
            for room in rooms.values():
                room.vacate(victims)
            best.room.keep(demand.world_size)
            reason = f"{demand.policy} waits with {demand.work:g} of ready work"
            leaves.extend(GiveWay(victim.policy, reason) for victim in victims)
    if not unserved:
        _widen(given, everyone, rooms)
        leaves.extend(_widenings([*rooms.values()], everyone))
    binds = [_bind(demand, places) for demand, places in given]
    actions: tuple[BindSlots | GiveWay, ...] = (*binds, *leaves)
    if ahead and not actions and not unserved:
        actions = _ahead(rooms.values(), everyone)
    return Allocation(actions, min(look_again, default=None))


def waiting_in_order(demands: Iterable[Demand]) -> list[Demand]:
    """Returns the policies that wait for slots, who is served first in front."""
    # Who has no place of its own is through quickly, and would wait for ever behind those with one.
    return sorted(
        (d for d in demands if d.trainer is None and d.work > 0),
        key=lambda d: (bool(d.places), -d.remaining_s, d.policy),
    )


def _bind(demand: Demand, places: Sequence[Place]) -> BindSlots:
    first, *others = places
    count = sum(len(place.slots) for place in places)
    where = f"free slot(s) of {len(places)} trainers" if others else "free slot(s)"
    return BindSlots(
        demand.policy,
        first.trainer,
        first.slots,
        f"{demand.work:g} of ready work, {count} {where}",
        tuple(others),
    )


def _ahead(rooms: Iterable[Room], everyone: Sequence[Demand]) -> tuple[BindSlots | GiveWay, ...]:
    """The next step of the first trainer that is not as its coming work wants it."""
    for room in rooms:
        step = bind_ahead(room, everyone)
        if step is None:
            continue
        policy = step.demand.policy
        if step.leaving:
            reason = f"{policy} has more work to come"
            return tuple(GiveWay(one.policy, reason) for one in step.leaving)
        (place,) = room.take(step.num_slots)
        return (BindSlots(policy, place.trainer, place.slots, "its work is expected"),)
    return ()


def _take_places(demand: Demand, rooms: Mapping[str, Room]) -> bool:
    """Takes the slots that are kept for a policy; all or none."""
    if not all(p.trainer in rooms and rooms[p.trainer].has(p.slots) for p in demand.places):
        return False
    for place in demand.places:
        rooms[place.trainer].take_place(place.slots)
    return True


def _choice(demand: Demand, rooms: Mapping[str, Room]) -> Sequence[Room | Hall]:
    """Where a policy may go: to one of the trainers, or to all of them together."""
    if demand.spans:
        return [Hall([*rooms.values()], first=demand.last_trainer)]
    return [*rooms.values()]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Who would have to leave a trainer; None when nobody may, or not enough of them."""

    room: Room | Hall
    victims: tuple[Demand, ...] | None
    look_again_at: float | None


def _with_room(demand: Demand, rooms: Iterable[Room | Hall]) -> Room | Hall | None:
    fitting = [room for room in rooms if room.num_free >= demand.world_size]
    for room in fitting:
        if room.trainer == demand.last_trainer:
            return room
    # The fullest that fits keeps room for policies with more ranks.
    return min(fitting, key=lambda room: (room.num_free, room.trainer), default=None)


def _plan(demand: Demand, room: Room | Hall, *, min_residence_s: float, now: float) -> _Plan:
    short = demand.world_size - room.num_free - room.coming
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
            short -= room.count_of(victim)
    if short > 0:
        return _Plan(room, None, min(later, default=None))
    return _Plan(room, tuple(chosen), None)


def _gives_way_at(victim: Demand, demand: Demand, *, min_residence_s: float) -> float | None:
    if victim.work == 0 and not victim.expects:
        return victim.since
    if victim.work and victim.remaining_s / speed(victim.num_slots) <= victim.swap_s:
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


def _widen(
    given: list[tuple[Demand, list[Place]]],
    everyone: Sequence[Demand],
    rooms: Mapping[str, Room],
) -> None:
    for demand, places in given:
        if demand.places or demand.spans:
            continue
        (place,) = places
        room = rooms[place.trainer]
        share = share_of(demand, everyone, num_slots=room.size)
        (more,) = room.take(max(share - len(place.slots), 0))
        places[0] = Place(place.trainer, place.slots + more.slots)


def _widenings(rooms: Sequence[Room], everyone: Sequence[Demand]) -> list[GiveWay]:
    """Policies that leave so that a bound one gets more slots; one is helped per trainer."""
    leaves: list[GiveWay] = []
    for room in rooms:
        for holder in sorted(room.holders, key=lambda d: (-d.remaining_s, d.policy)):
            if not holder.work or holder.beyond:
                continue
            leaving, reason = _widening(holder, room, everyone)
            if leaving:
                for each in rooms:  # one that leaves here leaves the other trainers, too
                    each.vacate(leaving)
                leaves.extend(GiveWay(one.policy, reason) for one in leaving)
                break
    return leaves


def _widening(
    holder: Demand, room: Room, everyone: Sequence[Demand]
) -> tuple[Sequence[Demand], str]:
    """Who leaves for a bound policy to get free slots, and those of policies without work."""
    held = len(holder.slots)
    wanted, there = share_of(holder, everyone, num_slots=room.size), held + room.num_free
    idle: list[Demand] = []
    for other in room.holders:
        if there < wanted and not other.work:
            idle.append(other)
            there += room.count_of(other)
    wider = min(wanted, there)
    if wider <= held:
        return (), ""
    saved_s = holder.remaining_s * (1 / speed(held) - 1 / speed(wider))
    # Who has work to come pays for its way back.
    swaps_s = holder.swap_s + sum(other.swap_s for other in idle if other.expects)
    if saved_s <= WIDEN_RATIO * swaps_s:
        return (), ""
    reason = f"{wider} slots instead of {held} save {holder.policy} {saved_s:.3g} s"
    return (holder, *idle), reason

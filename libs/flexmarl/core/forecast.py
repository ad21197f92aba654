"""Where instances go between two batches: to where the next one will need them.

The next batch is expected to cost of each policy what a sample did on average. Instances are shared
out so that the policy with the most work per instance has as little as possible, every policy at
least one (I10). What fits already stays; only shares that differ by more than rounding are moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace

from flexmarl.core.balance import Move
from flexmarl.core.balance_monitor import PolicyLoad


def share_out(demands: Mapping[str, float], num_instances: int) -> dict[str, int]:
    """Instances per policy: one each, the others one by one to who has most work per instance.

    Args:
        demands: Expected work by policy, in any unit that is the same for all.
        num_instances: Instances; at least one per policy.
    """
    shares = dict.fromkeys(sorted(demands), 1)
    most = [(-demands[policy], policy) for policy in shares]
    heapify(most)
    for _ in range(num_instances - len(shares)):
        policy = most[0][1]
        shares[policy] += 1
        heapreplace(most, (-demands[policy] / shares[policy], policy))
    return shares


def forecast_moves(
    loads: Sequence[PolicyLoad], *, demands: Mapping[str, float], min_gain: float
) -> list[Move]:
    """Moves that prepare the next batch.

    Args:
        loads: All policies, between two batches.
        demands: Average tokens that a sample cost of each policy; policies without are unknown.
        min_gain: Share by which the longest expected time must fall, or nothing moves.
    """
    known = [load for load in loads if load.policy in demands and load.num_instances > 0]
    if len(known) < 2:
        return []
    seconds = {load.policy: demands[load.policy] / load.tokens_per_s for load in known}
    now = {load.policy: load.num_instances for load in known}
    then = share_out(seconds, sum(now.values()))
    before_s = max(seconds[policy] / now[policy] for policy in now)
    after_s = max(seconds[policy] / then[policy] for policy in now)
    if after_s >= before_s * (1.0 - min_gain):
        return []
    moves: list[Move] = []
    by_name = {load.policy: load for load in known}
    givers = [p for p in sorted(now) for _ in range(now[p] - then[p])]
    for receiver in sorted(now):
        for _ in range(then[receiver] - now[receiver]):
            # An instance of the same base takes weights over; another one must start an engine.
            givers.sort(key=lambda p: by_name[p].base != by_name[receiver].base)
            moves.append(_forecast_move(by_name[givers.pop(0)], by_name[receiver], seconds, then))
    return moves


def _forecast_move(
    giver: PolicyLoad,
    receiver: PolicyLoad,
    seconds: Mapping[str, float],
    then: Mapping[str, int],
) -> Move:
    restart = giver.base != receiver.base
    share = seconds[receiver.policy] / (sum(seconds.values()) or 1.0)
    return Move(
        giver.policy,
        receiver.policy,
        restart=restart,
        gain_s=0.0,
        cost_s=receiver.restart_s if restart else receiver.load_s,
        reason=(
            f"forecast: {share:.0%} of the next batch is for {receiver.policy}, "
            f"which gets {then[receiver.policy]} instances"
        ),
    )

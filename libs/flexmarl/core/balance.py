"""When an instance moves from one policy to another, and why.

Rules:
    `drain_time`: the policy whose queue takes longest to drain gets an instance, when the longer of
    the two drain times, its own and the giver's, falls by more than the move costs. Drain time is
    outstanding tokens / (requests at once x tokens per second of one), and at once are as many as
    there are requests and places for them: who has more places than requests gives for nothing,
    however long its calls take. Where no queue says so, the same is asked of the rest of the batch:
    queues are short-sighted, since what drains comes again with the next calls of the same samples.
    There the work is what open samples are expected to cost yet, and carried by all places.
    `queue_gap`: the longest queue gets one from the shortest when they differ by more than a gap
    (FlexMARL, arXiv 2602.09578, section 3.2: 5).
    `off`: never.

Invariants: a policy never gives its last instance away (I10). One move is decided at a time. What
was moved stays for `residence_s`: who received gives nothing away, who gave receives nothing from
whom it gave to. A move must be right `confirm` times in a row. A move within one base model costs a
weight load, another one the start of an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from flexmarl.core.balance_monitor import PolicyLoad

Rule = Literal["drain_time", "queue_gap", "off"]

_NEVER: Final = -1e18

Coming = Callable[[str], float]
"""Tokens that open samples are expected to cost yet of a policy, what is outstanding included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceConfig:
    """Numbers of the rule; see the module.

    Attributes:
        rule: When to move.
        queue_gap: Waiting vertices by which queues must differ, for `queue_gap`.
        gain_margin: Share of its cost that a move must gain beyond its cost, for `drain_time`.
        residence_s: How long what was moved stays.
        confirm: Decisions in a row that must agree.
    """

    rule: Rule = "drain_time"
    queue_gap: int = 5
    gain_margin: float = 0.5
    residence_s: float = 2.0
    confirm: int = 2


@dataclass(frozen=True, slots=True)
class Move:
    """Move one instance.

    Attributes:
        giver: Policy that loses it.
        receiver: Policy that gets it.
        restart: Whether another base model must be started.
        gain_s: Time that it saves, as far as the rule knows.
        cost_s: Time that it takes.
        reason: In words, with the figures that decided.
    """

    giver: str
    receiver: str
    restart: bool
    gain_s: float
    cost_s: float
    reason: str


class Balancer:
    """Decides moves; see the module."""

    def __init__(self, config: BalanceConfig) -> None:
        self._config = config
        self._received_at: dict[str, float] = {}
        self._gave_at: dict[tuple[str, str], float] = {}
        self._candidate: tuple[str, str] | None = None
        self._seen = 0

    def decide(
        self, loads: Sequence[PolicyLoad], now: float, *, coming: Coming | None = None
    ) -> Move | None:
        """The move to make now, if any.

        Args:
            loads: All policies.
            now: Seconds.
            coming: What is left of the batch; None while nothing is known of it.
        """
        if self._config.rule == "off":
            return None
        if self._config.rule == "queue_gap":
            return self._confirmed(self._by_queue_gap(loads, now))
        move = self._by_drain_time(loads, now, what="its queue")
        if move is None and coming is not None:
            whole = [load.with_all(max(coming(load.policy), load.work_tokens)) for load in loads]
            move = self._by_drain_time(whole, now, what="the rest of its batch")
        return self._confirmed(move)

    def moved(self, giver: str, receiver: str, now: float) -> None:
        """A move was begun."""
        self._received_at[receiver] = now
        self._gave_at[(giver, receiver)] = now
        self._candidate = None

    def _confirmed(self, move: Move | None) -> Move | None:
        pair = None if move is None else (move.giver, move.receiver)
        self._seen = self._seen + 1 if pair == self._candidate else 1
        self._candidate = pair
        return move if self._seen >= self._config.confirm else None

    def _by_drain_time(self, loads: Sequence[PolicyLoad], now: float, *, what: str) -> Move | None:
        receiver, before_s = _slowest(loads)
        if receiver is None:
            return None
        after_s = receiver.drain_with_more_s
        margin = 1.0 + self._config.gain_margin
        own_base, near_s, far_s = receiver.base, receiver.load_s, receiver.restart_s
        most_s = before_s - after_s - margin * min(near_s, far_s)
        if most_s <= 0.0:
            return None
        best, best_gain_s, best_net_s, best_cost_s = None, 0.0, 0.0, 0.0
        # Without calls, and no further than to who cannot be outdone: this runs at every look.
        for load in loads:
            if load.num_instances < 2 or load is receiver:
                continue
            giver_s = load.drain_with_less_s
            slower = giver_s > after_s and giver_s > load.drain_s
            gain_s = before_s - (giver_s if slower else after_s)
            cost_s = near_s if load.base == own_base else far_s
            net_s = gain_s - margin * cost_s
            if net_s > best_net_s and self._may_move(load.policy, receiver.policy, now):
                best, best_gain_s, best_net_s, best_cost_s = load, gain_s, net_s, cost_s
                if net_s >= most_s:
                    break
        if best is None:
            return None
        why = (
            f"drain_time: {receiver.policy} takes {before_s:.2f} s for {what} with "
            f"{receiver.num_instances} instances; the longer of both falls by {best_gain_s:.2f} s "
            f"for {best_cost_s:.2f} s"
        )
        return _move(best, receiver, best_gain_s, best_cost_s, why)

    def _by_queue_gap(self, loads: Sequence[PolicyLoad], now: float) -> Move | None:
        receiver = max(loads, key=lambda load: load.num_waiting, default=None)
        if receiver is None:
            return None
        givers = [
            load
            for load in loads
            if load.num_instances > 1
            and receiver.num_waiting - load.num_waiting > self._config.queue_gap
            and self._may_move(load.policy, receiver.policy, now)
        ]
        giver = min(givers, key=lambda load: (load.num_waiting, load.work_tokens), default=None)
        if giver is None:
            return None
        gap = receiver.num_waiting - giver.num_waiting
        cost_s = receiver.load_s if giver.base == receiver.base else receiver.restart_s
        why = f"queue_gap: {receiver.num_waiting} wait for {receiver.policy}, {gap} more"
        return _move(giver, receiver, 0.0, cost_s, why)

    def _may_move(self, giver: str, receiver: str, now: float) -> bool:
        """Whether the newest moves of the two are old enough."""
        settled = now - self._config.residence_s
        return (
            self._received_at.get(giver, _NEVER) <= settled
            and self._gave_at.get((receiver, giver), _NEVER) <= settled
        )


def _slowest(loads: Sequence[PolicyLoad]) -> tuple[PolicyLoad | None, float]:
    """The policy with a queue whose work takes longest, and how long; infinite without instance."""
    slowest, longest_s = None, 0.0
    for load in loads:
        if load.num_waiting and load.drain_s > longest_s:
            slowest, longest_s = load, load.drain_s
    return slowest, longest_s


def _move(
    giver: PolicyLoad, receiver: PolicyLoad, gain_s: float, cost_s: float, reason: str
) -> Move:
    restart = giver.base != receiver.base
    return Move(giver.policy, receiver.policy, restart, gain_s, cost_s, reason)

"""Moves instances between policies, as `core.balance` and `core.forecast` decide.

    decided -> its requests are handed over -> vacated -> planned for its new policy
            -> weights loaded (or an engine started) -> serves

The loop wakes every `interval_s`. One instance is vacated at a time: the core waits for what its
engine gives back, at most `handover_s`, so no move hangs.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from flexmarl.core.balance import Balancer, Move
from flexmarl.core.balance_monitor import Monitor
from flexmarl.core.forecast import forecast_moves
from flexmarl.rollout.dispatcher.call_desk import CallDesk
from flexmarl.rollout.dispatcher.fleet import Fleet
from flexmarl.rollout.dispatcher.instances import Instance
from flexmarl.runtime.logging import get_logger
from flexmarl.runtime.pipeline_config import BalanceSection
from flexmarl.runtime.spans import SpanRecorder

FORECAST_GAIN: Final = 0.2
"""Share of the next batch's longest time that moving before it must save."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Moving:
    """A move under way, until its instance serves the receiver."""

    move: Move
    began_s: float


class Mover:
    """See the module.

    Attributes:
        moves: Moves begun, by giver, receiver, and what decided: a rule, or the forecast.
        moved_s: Seconds of the moves that ended, from the decision until the instance served.

    Args:
        run_id: Run.
        section: Rule and its numbers.
        desk: Calls, whose queues are looked at.
        fleet: Instances.
        spans: Told of every move.
        open_versions: Number of open samples by version.
    """

    def __init__(
        self,
        run_id: str,
        section: BalanceSection,
        *,
        desk: CallDesk,
        fleet: Fleet,
        spans: SpanRecorder,
        open_versions: Callable[[], Mapping[int, int]],
    ) -> None:
        self.moves: Counter[tuple[str, str, str]] = Counter()
        self.moved_s = 0.0
        self._run_id = run_id
        self._section = section
        self._desk = desk
        self._fleet = fleet
        self._spans = spans
        self._open_versions = open_versions
        self._balancer = Balancer(section.decisions())
        self._monitor = Monitor(fleet.bases, book=desk.book, costs=fleet.costs)
        self._vacating: dict[str, _Moving] = {}
        self._arriving: dict[str, _Moving] = {}
        self._loop = asyncio.get_running_loop()
        desk.on_vacated(self._vacated)
        fleet.on_serving(self._serves)

    async def run(self) -> None:
        """Looks at the queues until cancelled."""
        if self._section.rule == "off" or len(self._fleet.bases) < 2:
            return
        while True:
            await asyncio.sleep(self._section.interval_s)
            self._look()

    def between_batches(self) -> None:
        """No sample is open: instances go where the next batch is expected to need them."""
        if self._section.rule == "off" or not self._section.forecast or self._vacating:
            return
        loads = self._monitor.observe(self._loop.time())
        demands = self._desk.demands()
        for move in forecast_moves(loads, demands=demands, min_gain=FORECAST_GAIN):
            self._begin(move, why="forecast")

    def _look(self) -> None:
        if self._vacating or not any(self._open_versions().values()):
            return
        now = self._loop.time()
        loads = self._monitor.observe(now)
        move = self._balancer.decide(loads, now, coming=self._desk.coming())
        if move is not None and self._begin(move, why=self._section.rule):
            self._balancer.moved(move.giver, move.receiver, now)

    def _begin(self, move: Move, *, why: str) -> bool:
        """Vacates an instance of the giver; its last serving one stays (I10)."""
        able = [i for i in self._fleet.serving(move.giver) if i.instance_id not in self._vacating]
        if len(able) < 2:
            return False
        instance = min(able, key=self._work_at)
        _log.info(
            "instance_moves",
            run=self._run_id,
            instance=instance.instance_id,
            giver=move.giver,
            receiver=move.receiver,
            reason=move.reason,
            restart=move.restart,
            gain_s=round(move.gain_s, 3),
            cost_s=round(move.cost_s, 3),
            requests=self._desk.num_at(instance.instance_id),
        )
        self.moves[move.giver, move.receiver, why] += 1
        self._vacating[instance.instance_id] = _Moving(move, time.time())
        self._desk.vacate(instance.instance_id)
        return True

    def _work_at(self, instance: Instance) -> tuple[int, str]:
        return self._desk.load_at(instance.instance_id), instance.instance_id

    def _vacated(self, instance_id: str) -> None:
        moving = self._vacating.pop(instance_id, None)
        if moving is None:
            return
        self._arriving[instance_id] = moving
        self._fleet.reassign(instance_id, moving.move.receiver)

    def _serves(self, instance: Instance) -> None:
        """An instance takes requests: a move may have ended."""
        moving = self._arriving.get(instance.instance_id)
        if moving is None or moving.move.receiver not in instance.spec.policies:
            return
        del self._arriving[instance.instance_id]
        move, now = moving.move, time.time()
        self.moved_s += now - moving.began_s
        self._spans.add(
            f"moves/{instance.instance_id}",
            f"{move.giver} to {move.receiver}",
            moving.began_s,
            now,
            run=self._run_id,
            reason=move.reason,
        )

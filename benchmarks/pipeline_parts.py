"""Where the time of a step goes: who is busy, who waits for whom, when instances move.

Made of spans, be they measured (`pipeline_run`) or of virtual time (`pipeline_virtual`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

Kind = Literal["request", "wait", "load", "move", "close", "train"]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time, in emulated seconds.

    Attributes:
        kind: A request at an instance, a ready call that waits for one, a load of weights, a move
            of an instance, the close of a group, or an operation on one trainer slot.
        name: Policy; for a move both, for an operation policy and operation.
        start_s: Its start.
        end_s: Its end.
    """

    kind: Kind
    name: str
    start_s: float
    end_s: float


def parts(
    spans: Sequence[Span],
    edges: Sequence[float],
    *,
    num_instances: int,
    max_concurrency: int,
    num_slots: int,
) -> Iterator[str]:
    """Says of each batch what its time went to.

    Args:
        spans: Of the whole run.
        edges: When each batch began, and when the last one was over.
        num_instances: Instances.
        max_concurrency: Requests that one serves at a time.
        num_slots: Trainer slots.
    """
    for number, (begin_s, end_s) in enumerate(pairwise(edges)):
        own = [_cut(span, begin_s, end_s) for span in spans if _meets(span, begin_s, end_s)]
        of = {kind: [span for span in own if span.kind == kind] for kind in get_args(Kind)}
        step_s = end_s - begin_s
        closes = " ".join(f"{span.end_s - begin_s:.0f}" for span in of["close"])
        yield f"batch {number}: {step_s:.1f} s; groups close at {closes}"
        places = num_instances * max_concurrency
        served_s = _sum_s(of["request"])
        yield (
            f"  instances: {served_s / (places * step_s):.0%} of {places} places serve "
            f"({_by_name(of['request'])}), last at {_last_s(of['request']) - begin_s:.0f} s; "
            f"{_sum_s(of['load']) / (num_instances * step_s):.0%} load"
        )
        waits = {name: _sum_s(found) / len(found) for name, found in _grouped(of["wait"]).items()}
        yield "  calls wait: " + ", ".join(f"{name} {s:.1f} s" for name, s in waits.items())
        moves = Counter(span.name for span in of["move"])
        yield f"  moves: {', '.join(f'{name} {n}' for name, n in sorted(moves.items())) or 'none'}"
        busy_s = _sum_s(of["train"])
        yield (
            f"  slots: {busy_s / (num_slots * step_s):.0%} of {num_slots} busy "
            f"({_by_name(of['train'])})"
        )


def _meets(span: Span, begin_s: float, end_s: float) -> bool:
    return begin_s <= span.start_s < end_s or span.start_s < begin_s < span.end_s


def _cut(span: Span, begin_s: float, end_s: float) -> Span:
    return Span(span.kind, span.name, max(span.start_s, begin_s), min(span.end_s, end_s))


def _sum_s(spans: Iterable[Span]) -> float:
    return sum(span.end_s - span.start_s for span in spans)


def _last_s(spans: Iterable[Span]) -> float:
    return max((span.end_s for span in spans), default=0.0)


def _grouped(spans: Iterable[Span]) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        found[span.name].append(span)
    return dict(sorted(found.items()))


def _by_name(spans: Iterable[Span]) -> str:
    found = _grouped(spans)
    return ", ".join(f"{name} {_sum_s(own):.0f} s" for name, own in found.items()) or "none"

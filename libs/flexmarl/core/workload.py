"""An emulated workload: sample graphs with the lengths of their calls, and what devices cost.

Seconds are emulated ones. Rates and costs are turned into seconds once, when the document is read,
so that schedules add up plain numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of an agent, which becomes one row.

    Attributes:
        policy: Policy that serves it.
        after: Calls of the same sample that it waits for, by place.
        engine_s: Time at an engine: tool, prompt, and output.
        unit_s: Time of its gradients on one trainer unit.
    """

    policy: str
    after: tuple[int, ...]
    engine_s: float
    unit_s: float


Sample = tuple[Call, ...]
"""Calls by place; each comes behind those that it waits for."""

Group = tuple[Sample, ...]
Batch = tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCosts:
    """What a policy's size costs, in seconds.

    Attributes:
        update_s: Applying an update, publishing it, and loading it on all instances.
        switch_s: A colocated device's way from rollout to training and back.
    """

    update_s: float
    switch_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Devices: separate pools, or the same devices for both in turn."""

    rollout_instances: int
    trainer_units: int
    colocated_groups: int
    max_concurrency: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Batches of sample graphs, and the devices that they run on."""

    name: str
    policies: Mapping[str, PolicyCosts]
    pools: Pools
    batches: tuple[Batch, ...]


def parse_workload(document: Mapping[str, Any]) -> Workload:
    """Reads a workload document.

    Raises:
        ValueError: A key is missing, or a call waits for one that does not come before it.
    """
    try:
        return _parse(document)
    except KeyError as error:
        raise ValueError(f"workload: no key {error.args[0]!r}") from None


def remaining_paths(sample: Sample) -> list[float]:
    """Longest time from the start of each call to the end of its sample, by place, in seconds."""
    behind = [0.0] * len(sample)
    for place in reversed(range(len(sample))):
        behind[place] += sample[place].engine_s
        for before in sample[place].after:
            behind[before] = max(behind[before], behind[place])
    return behind


def levels(sample: Sample) -> list[int]:
    """Number of calls on the longest way to each call, itself left out, by place."""
    found: list[int] = []
    for call in sample:
        found.append(1 + max((found[before] for before in call.after), default=-1))
    return found


def calls_of(groups: Iterable[Group]) -> Iterator[Call]:
    """All calls of some groups."""
    return (call for group in groups for sample in group for call in sample)


def _parse(document: Mapping[str, Any]) -> Workload:
    trainer, pools = document["trainer"], document["pools"]
    return Workload(
        name=document["name"],
        policies={
            name: PolicyCosts(
                update_s=size["params_b"]
                * (trainer["apply_s_per_b"] + trainer["publish_and_load_s_per_b"]),
                switch_s=size["params_b"] * trainer["colocated_switch_s_per_b"],
            )
            for name, size in document["policies"].items()
        },
        pools=Pools(
            rollout_instances=pools["rollout_instances"],
            trainer_units=pools["trainer_units"],
            colocated_groups=pools["colocated_groups"],
            max_concurrency=document["engine"]["max_concurrency"],
        ),
        batches=tuple(
            tuple(tuple(_sample(vertices, document) for vertices in group) for group in batch)
            for batch in document["batches"]
        ),
    )


def _sample(vertices: list[Mapping[str, Any]], document: Mapping[str, Any]) -> Sample:
    engine, rates = document["engine"], document["trainer"]["tokens_per_s_per_unit"]
    places: dict[int, int] = {}
    calls: list[Call] = []
    for vertex in vertices:
        policy = document["agents"][vertex["agent"]]
        prompt, output = vertex["prompt_tokens"], vertex["output_tokens"]
        missing = [before for before in vertex["after"] if before not in places]
        if missing:
            raise ValueError(f"workload: vertex {vertex['id']} comes before vertex {missing[0]}")
        calls.append(
            Call(
                policy=policy,
                after=tuple(places[before] for before in vertex["after"]),
                engine_s=vertex["tool_s"]
                + prompt / engine["prefill_tokens_per_s"]
                + output / engine["decode_tokens_per_s"][policy],
                unit_s=(prompt + output) / rates[policy],
            )
        )
        places[vertex["id"]] = len(places)
    return tuple(calls)

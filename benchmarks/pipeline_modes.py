"""The modes of `make bench NAME=pipeline`: one workload, one team, other rules.

Every mode runs in the same four services; what differs is configuration, and for `mas_rl` that a
query's samples go level by level. Devices and costs are the workload's and the same for all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flexmarl.core.ideal_schedule import MODES, Mode
from flexmarl.core.workload import Workload, levels, parse_workload
from flexmarl.runtime.run_config import RunConfig

QUICKSTART_MODEL: Final = Path(__file__).parents[1] / "examples/quickstart/model"
TEAM: Final = Path(__file__).parent / "emulated"
CONTEXT: Final = 1 << 17
LONG_S: Final = 7200.0
LOOK_S: Final = 0.02
"""Shortest time between two looks of the balancing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """A workload and the length of its second.

    Attributes:
        document: The workload as it is stored.
        workload: The same, read.
        second_s: Wall seconds of an emulated one.
    """

    document: Mapping[str, Any]
    workload: Workload
    second_s: float

    @classmethod
    def read(cls, path: Path, *, second_s: float) -> Emulation:
        """Reads a workload file."""
        document = json.loads(path.read_text(encoding="utf-8"))
        return cls(document=document, workload=parse_workload(document), second_s=second_s)


def num_slots(emulation: Emulation, mode: Mode) -> int:
    """Trainer units of a mode."""
    pools = emulation.workload.pools
    return pools.colocated_groups if MODES[mode].colocated else pools.trainer_units


def trainer_settings(emulation: Emulation, mode: Mode) -> list[str]:
    """`SERVICE.key=value` items of the trainer's simulated devices.

    Colocated devices do not swap policies; their change of phase is in the time of a load.
    """
    costs = emulation.document["trainer"]
    swaps = not MODES[mode].colocated
    settings = {
        "device": '"simulated"',
        "simulated.seconds_scale": emulation.second_s,
        "simulated.scaling_efficiency": costs["scaling_efficiency"],
        "simulated.swap_out_s_per_b": costs["swap_out_s_per_b"] if swaps else 0.0,
        "simulated.swap_in_s_per_b": costs["swap_in_s_per_b"] if swaps else 0.0,
        "simulated.apply_s_per_b": costs["apply_s_per_b"],
    }
    for name, size in emulation.document["policies"].items():
        settings[f"simulated.policies.{name}.params_b"] = size["params_b"]
        rate = costs["tokens_per_s_per_unit"][name]
        settings[f"simulated.policies.{name}.tokens_per_s"] = rate
    return [f"trainer.{key}={value}" for key, value in settings.items()]


def run_config(emulation: Emulation, mode: Mode, folder: Path) -> RunConfig:
    """The run of a mode; its dataset and model are written into the folder."""
    rules, document = MODES[mode], emulation.document
    batches = document["batches"]
    dataset = folder / "queries.jsonl"
    with dataset.open("w", encoding="utf-8") as file:
        for query in _queries(emulation, mode):
            file.write(json.dumps(query, separators=(",", ":")) + "\n")
    names = sorted(document["policies"])
    return RunConfig.model_validate(
        {
            "name": f"{emulation.workload.name}-{mode.value}",
            "versions": len(batches) + 1,  # the last batch shows when its version is loaded
            "workflow": {
                "package": str(TEAM),
                "entry": "team:team",
                "reward": "team:reward",
                "sample_timeout_s": LONG_S,
            },
            "dataset": {"path": str(dataset), "shuffle": False},
            "batch": {
                "groups": len(batches[0]),
                "samples_per_group": len(batches[0][0]),
                "on_sample_failure": "fail",
            },
            "policies": {name: _policy(emulation, mode, name, folder) for name in names},
            "agents": {
                agent: {
                    "policy": policy,
                    "prompt": "{text}",
                    "max_tokens": CONTEXT // 2,
                    "ignore_eos": True,
                    "timeout_s": LONG_S,
                }
                for agent, policy in document["agents"].items()
            },
            "rollout": {
                "max_concurrent_queries": 1 if rules.serial else None,
                # Its times are of the emulated world, too; a look costs real time.
                "balance": {
                    "rule": "drain_time" if rules.balances else "off",
                    "interval_s": max(0.1 * emulation.second_s, LOOK_S),
                    "residence_s": 2.0 * emulation.second_s,
                },
            },
            "trainer": {"slots": num_slots(emulation, mode)},
            "pipeline": {
                "overlap": rules.overlaps,
                "allocation": "on_demand" if rules.allocates else "static",
                "colocated": rules.colocated,
            },
        }
    )


def _policy(emulation: Emulation, mode: Mode, name: str, folder: Path) -> dict[str, Any]:
    rules, document, pools = MODES[mode], emulation.document, emulation.workload.pools
    num_policies = len(document["policies"])
    engine, costs = document["engine"], document["trainer"]
    params_b = document["policies"][name]["params_b"]
    devices = pools.colocated_groups if rules.colocated else pools.rollout_instances
    load_s = costs["publish_and_load_s_per_b"] * params_b
    if rules.colocated:
        load_s += sum(policy.switch_s for policy in emulation.workload.policies.values())
    units = num_slots(emulation, mode)
    world_size = units // num_policies if rules.colocated else 1
    return {
        "model": {"path": str(_model(folder)), "init": "random"},
        "rollout": {
            "engine": "simulated",
            # All devices serve one policy at a time in `mas_rl`: one instance stands for them.
            "instances": 1 if rules.serial else devices // num_policies,
            "max_concurrency": pools.max_concurrency * (devices if rules.serial else 1),
            "max_context": CONTEXT,
            "simulated": {
                "time_scale": emulation.second_s,
                "prefill_tokens_per_s": engine["prefill_tokens_per_s"],
                "decode_tokens_per_s": engine["decode_tokens_per_s"][name],
                "load_s": load_s,
                "move_s": document["moving_an_instance_s_per_b"] * params_b,
            },
        },
        "trainer": {
            "world_size": world_size,
            "max_world_size": units if rules.allocates else world_size,
            "micro_batch_rows": document["micro_batch_rows"],
        },
    }


def _model(folder: Path) -> Path:
    """A tokenizer with one token per digit, and a context that fits every call."""
    model = folder / "model"
    if not model.is_dir():
        model.mkdir()
        for file in QUICKSTART_MODEL.iterdir():
            (model / file.name).write_bytes(file.read_bytes())
        shape = json.loads((model / "config.json").read_text())
        shape["max_position_embeddings"] = CONTEXT
        (model / "config.json").write_text(json.dumps(shape))
    return model


def _queries(emulation: Emulation, mode: Mode) -> Iterator[dict[str, Any]]:
    bound = ""
    batches = [*enumerate(emulation.workload.batches)]
    # One batch more, so that the last version is seen to serve.
    for number, batch in [*batches, (len(batches), batches[0][1])]:
        for place, group in enumerate(batch):
            graphs = emulation.document["batches"][number % len(batches)][place]
            samples = [
                [
                    {**vertex, "level": level}
                    for vertex, level in zip(vertices, levels(sample), strict=True)
                ]
                for vertices, sample in zip(graphs, group, strict=True)
            ]
            phases: list[dict[str, Any]] = []
            if MODES[mode].serial:
                phases, bound = _phases(emulation, samples, bound)
            yield {"key": f"{number}/{place}", "samples": samples, "phases": phases}


def _phases(
    emulation: Emulation, samples: list[list[dict[str, Any]]], bound: str
) -> tuple[list[dict[str, Any]], str]:
    """Level by level, agents in turn; a change of policy costs half of its switch."""
    agents = emulation.document["agents"]
    wanted = {(call["level"], call["agent"]) for sample in samples for call in sample}
    phases: list[dict[str, Any]] = []
    for level in sorted({level for level, _ in wanted}):
        names = sorted(agent for at, agent in wanted if at == level)
        for agent in sorted(names, key=lambda name: (agents[name] != bound, name)):
            policy = agents[agent]
            switch_s = 0.0
            if bound not in ("", policy):
                switch_s = emulation.workload.policies[policy].switch_s / 2 * emulation.second_s
            phases.append({"level": level, "agent": agent, "switch_s": switch_s})
            bound = policy
    return phases, bound

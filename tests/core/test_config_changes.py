"""Settings of a resumed run are accepted or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from flexmarl.core.config_changes import config_changes

OLD: dict[str, Any] = {
    "name": "x",
    "seed": 0,
    "versions": 4,
    "batch": {"groups": 8, "refill_max": 2},
    "dataset": {"path": "/a", "epochs": None},
    "evaluation": {"every": 2, "fraction": 0.1},
    "workflow": {"entry": "a:b", "num_workers": 1},
    "advantage": {"scope": "group"},
    "policies": {"p": {"kind": "trained", "optimizer": {"lr": 1.0}, "loss": {"clip_low": 0.2},
                       "model": {"path": "/m"}, "rollout": {"instances": 1}}},
    "agents": {"a": {"max_tokens": 4, "timeout_s": 1.0}},
    "pipeline": {},
}  # fmt: skip


def change(key: str, value: Any) -> Any:
    new = {**OLD}
    inner = new
    *path, last = key.split(".")
    for name in path:
        inner[name] = dict(inner.get(name, {}))
        inner = inner[name]
    inner[last] = value
    (found,) = config_changes(OLD, new)
    assert found.key == key
    return found


def test_the_same_settings_are_no_change() -> None:
    assert config_changes(OLD, {**OLD}) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("versions", 9),
        ("dataset.epochs", 2),
        ("evaluation.every", 3),
        ("batch.refill_max", 0),
        ("workflow.num_workers", 2),
        ("agents.a.timeout_s", 9.0),
        ("policies.p.optimizer.lr", 0.1),
        ("policies.p.rollout.instances", 3),
        ("pipeline.overlap", False),
        ("store_shards", ["b:2"]),
    ],
)
def test_what_only_changes_how_it_goes_on_is_accepted(key: str, value: Any) -> None:
    assert change(key, value).refused == ""


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("seed", 1, "this run"),
        ("dataset.path", "/b", "cursor"),
        ("evaluation.fraction", 0.2, "held out"),
        ("evaluation.every", 0, "held out"),
        ("workflow.entry", "a:c", "replayed"),
        ("advantage.scope", "agent", "released"),
        ("batch.groups", 9, "admitted"),
        ("policies.p.model.path", "/n", "model"),
        ("policies.p.loss.clip_low", 0.1, "gradients"),
        ("policies.p.kind", "frozen", "sampled and trained"),
        ("policies.q.kind", "frozen", "sampled and trained"),
        ("agents.a.max_tokens", 5, "stored calls"),
    ],
)
def test_what_makes_it_another_run_is_refused_with_the_reason(key, value, why) -> None:
    found = change(key, value)
    assert why in found.refused
    assert str(found).startswith(f"{key}: ")

"""Advantages of one group, by hand, by peers' numbers, and by their properties."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peer_vectors import peer

from flexmarl.core.advantages import (
    AdvantageRule,
    FinishedSample,
    group_advantages,
    group_scopes,
)
from flexmarl.core.states import VoidReason
from flexmarl.core.training_rows import Rewards, Row


def row(sample: str, path: str = "0:0", agent: str = "solver") -> Row:
    return Row(vertex_id=f"{sample}/{path}", sample_id=sample, agent=agent, policy=agent, path=path)


def sample(name: str, rewards: Rewards, *rows: Row) -> FinishedSample:
    return FinishedSample(sample_id=name, rewards=rewards, rows=rows or (row(name),))


def team(values: list[float], rule: AdvantageRule) -> list[float]:
    samples = [sample(f"s{i}", Rewards(team=value)) for i, value in enumerate(values)]
    return [item.advantage for item in group_advantages(samples, rule).released]


def of(result: Any) -> Mapping[str, float]:
    return {item.row.vertex_id: item.advantage for item in result.released}


STD = AdvantageRule()
PLAIN = AdvantageRule(normalize_std=False)


@pytest.mark.parametrize("name", ["grpo_binary_3of8", "grpo_zero_variance"])
def test_agrees_with_verl(name: str) -> None:
    vector = peer(name)
    assert team(vector["in"]["rewards"], STD) == pytest.approx(vector["out"], abs=1e-6)


@pytest.mark.parametrize(("name", "rule"), [("grpo_std", STD), ("grpo_nostd(Dr.GRPO)", PLAIN)])
def test_agrees_with_verl_in_groups_by_id(name: str, rule: AdvantageRule) -> None:
    vector = peer(name)
    rewards = [sum(tokens) for tokens in vector["in"]["token_level_rewards"]]
    expected = [tokens[0] for tokens in vector["out"]]
    for group in ("a", "b"):
        members = [i for i, name_ in enumerate(vector["in"]["group"]) if name_ == group]
        got = team([rewards[i] for i in members], rule)
        assert got == pytest.approx([expected[i] for i in members], abs=1e-6)


@pytest.mark.parametrize("scope", ["group", "agent", "call_site"])
@pytest.mark.parametrize("calls", [1, 3])
def test_samples_of_one_query_are_compared_and_not_each_with_itself(scope, calls) -> None:
    """E1: rewards 1, 0, 1, 0; a group per trajectory would hand the raw rewards on."""
    samples = [
        sample(f"s{i}", Rewards(team=reward), *(row(f"s{i}", f"0:{n}") for n in range(calls)))
        for i, reward in enumerate([1.0, 0.0, 1.0, 0.0])
    ]
    result = group_advantages(samples, AdvantageRule(scope=scope, normalize_std=False))
    assert [item.advantage for item in result.released] == [
        value for value in (0.5, -0.5, 0.5, -0.5) for _ in range(calls)
    ]


def test_a_single_sample_has_nothing_to_be_compared_with() -> None:
    # verl takes the raw reward here, which is a policy gradient without a baseline.
    assert team([1.0], STD) == [0.0]
    assert team([1.0], PLAIN) == [0.0]


def test_low_variance_keeps_its_shape() -> None:
    assert team([1.0, 1.00001], STD) == pytest.approx([-0.62, 0.62], abs=0.01)


def test_no_variance_is_not_divided_by() -> None:
    assert team([0.1, 0.1, 0.1], STD) == pytest.approx([0, 0, 0], abs=1e-12)
    result = group_advantages(
        [sample(f"s{i}", Rewards(team=0.1)) for i in range(3)], AdvantageRule()
    )
    assert result.zero_variance


def test_rows_that_differ_where_samples_do_not_stay_bounded() -> None:
    rule = AdvantageRule(scope="agent")
    samples = [
        sample(
            name,
            Rewards(vertices={f"{name}/0:0": 0.0, f"{name}/0:1": 1.0}),
            row(name, "0:0"),
            row(name, "0:1"),
        )
        for name in ("s0", "s1")
    ]
    result = group_advantages(samples, rule)
    assert sorted(of(result).values()) == [-0.5, -0.5, 0.5, 0.5]
    assert not result.zero_variance


def test_an_agent_called_five_times_counts_once() -> None:
    rule = AdvantageRule(scope="agent", normalize_std=False)
    often = [row("s0", f"0:{i}") for i in range(5)]
    result = group_advantages(
        [
            sample("s0", Rewards(agents={"solver": 1.0}), *often),
            sample("s1", Rewards(agents={"solver": 0.0}), row("s1")),
        ],
        rule,
    )
    assert of(result)["s0/0:4"] == 0.5
    assert of(result)["s1/0:0"] == -0.5


def test_agent_scope_compares_samples_that_called_the_agent() -> None:
    rule = AdvantageRule(scope="agent", normalize_std=False)
    both = Rewards(agents={"solver": 1.0, "judge": 3.0})
    result = group_advantages(
        [
            sample("s0", both, row("s0"), row("s0", "0:1", "judge")),
            sample("s1", Rewards(agents={"solver": 0.0, "judge": 9.0}), row("s1")),
        ],
        rule,
    )
    assert of(result) == {"s0/0:0": 0.5, "s0/0:1": 0.0, "s1/0:0": -0.5}


def test_call_site_scope_compares_the_same_path() -> None:
    rule = AdvantageRule(scope="call_site", normalize_std=False)
    samples = [
        sample(
            name,
            Rewards(vertices={f"{name}/0:0": first, f"{name}/0:1": second}),
            row(name, "0:0"),
            row(name, "0:1"),
        )
        for name, first, second in (("s0", 1.0, 10.0), ("s1", 0.0, 20.0))
    ]
    result = group_advantages(samples, rule)
    assert of(result) == {"s0/0:0": 0.5, "s0/0:1": -5.0, "s1/0:0": -0.5, "s1/0:1": 5.0}


def test_another_agent_at_the_same_path_is_another_call_site() -> None:
    rule = AdvantageRule(scope="call_site", normalize_std=False)
    rewards = Rewards(agents={"solver": 1.0, "judge": 5.0})
    result = group_advantages(
        [sample("s0", rewards, row("s0")), sample("s1", rewards, row("s1", agent="judge"))], rule
    )
    assert set(of(result).values()) == {0.0}


def test_a_missing_agent_reward_voids_the_row() -> None:
    rule = AdvantageRule(scope="agent")
    result = group_advantages(
        [sample("s0", Rewards(team=1.0, agents={"judge": 1.0}), row("s0"))], rule
    )
    assert [(v.row.vertex_id, v.reason) for v in result.voided] == [
        ("s0/0:0", VoidReason.NO_REWARD)
    ]
    assert not result.released
    assert not result.zero_variance


def test_a_missing_team_reward_voids_the_row_in_group_scope() -> None:
    result = group_advantages([sample("s0", Rewards(agents={"solver": 1.0}))], STD)
    assert result.voided[0].reason is VoidReason.NO_REWARD


def test_the_only_number_is_every_agents_reward() -> None:
    rule = AdvantageRule(scope="agent", normalize_std=False)
    result = group_advantages(
        [sample("s0", Rewards(team=1.0)), sample("s1", Rewards(team=0.0))], rule
    )
    assert of(result) == {"s0/0:0": 0.5, "s1/0:0": -0.5}


def test_a_sample_without_rows_still_is_an_answer_to_the_query() -> None:
    rule = AdvantageRule(normalize_std=False)
    empty = FinishedSample(sample_id="s1", rewards=Rewards(team=0.0), rows=())
    result = group_advantages([sample("s0", Rewards(team=1.0)), empty], rule)
    assert of(result) == {"s0/0:0": 0.5}


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12))
def test_advantages_are_centred_bounded_and_blind_to_order(values: list[float]) -> None:
    got = team(values, STD)
    count = len(values)
    assert math.fsum(got) == pytest.approx(0.0, abs=1e-6)
    assert all(abs(a) <= (count - 1) / math.sqrt(count) + 1e-6 for a in got)
    assert team(values[::-1], STD) == pytest.approx(got[::-1], abs=1e-9)


def test_an_estimator_of_the_runs_own_is_asked_once_per_scope_and_answers_per_sample() -> None:
    rule = AdvantageRule(estimator="mine:f", scope="agent")
    samples = [
        sample("s0", Rewards(agents={"a": 1.0, "b": 5.0}), row("s0", "0:0", "a"),
               row("s0", "0:1", "a"), row("s0", "0:2", "b")),
        sample("s1", Rewards(agents={"a": 2.0}), row("s1", "0:0", "a"), row("s1", "0:2", "b")),
        sample("s2", Rewards(agents={"b": 7.0}), row("s2", "0:2", "b")),
    ]  # fmt: skip
    assert group_scopes(samples, rule) == ((1.0, 2.0), (5.0, 7.0))
    result = group_advantages(samples, rule, own=((10.0, 20.0), (50.0, 70.0)))
    assert of(result) == {
        "s0/0:0": 10.0, "s0/0:1": 10.0, "s0/0:2": 50.0, "s1/0:0": 20.0, "s2/0:2": 70.0,
    }  # fmt: skip
    assert [void.row.vertex_id for void in result.voided] == ["s1/0:2"]
    assert not result.zero_variance
    assert set(of(group_advantages(samples, rule)).values()) == {0.0}


def test_a_group_without_a_value_is_not_asked_about() -> None:
    rule = AdvantageRule(estimator="mine:f")
    assert group_scopes([sample("s0", Rewards(agents={"a": 1.0}))], rule) == ()

"""Every estimator against peers' numbers and by hand; what it declares, and what it refuses."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peer_vectors import peer

from flexmarl.core.advantages import (
    AdvantageRule,
    FinishedSample,
    GroupAdvantages,
    group_advantages,
    make_rule,
    whiten_batch,
)
from flexmarl.core.estimators.gae import gae, whitened
from flexmarl.core.estimators.registry import ESTIMATORS
from flexmarl.core.overlong import OverlongRule
from flexmarl.core.training_rows import MAX_REWARD, Rewards, Row, is_usable


def rule(estimator: str, **more: object) -> AdvantageRule:
    asked = {"scope": None, "normalize_std": None, "epsilon": 1e-6, "overlong": None, **more}
    return make_rule(estimator, **asked)  # type: ignore[arg-type]


def group(
    rewards: list[float],
    chosen: AdvantageRule,
    *,
    rows: int = 1,
    name: str = "s",
    policy: str = "p",
    tokens: int = 1,
) -> GroupAdvantages:
    samples = [
        FinishedSample(
            sample_id=f"{name}{i}",
            rewards=Rewards(team=reward),
            rows=[
                Row(
                    vertex_id=f"{name}{i}/{n}",
                    sample_id=f"{name}{i}",
                    agent="solver",
                    policy=policy,
                    path=f"0:{n}",
                    num_response_tokens=tokens,
                )
                for n in range(rows)
            ],
        )
        for i, reward in enumerate(rewards)
    ]
    return group_advantages(samples, chosen)


def values(advantages: GroupAdvantages) -> list[float]:
    return [item.advantage for item in advantages.released]


def groups_of(name: str) -> list[tuple[list[float], list[float]]]:
    """(rewards, advantages) of each group of a peer's vector that has others to compare with."""
    vector = peer(name)
    rewards = [sum(tokens) for tokens in vector["in"]["token_level_rewards"]]
    expected = [tokens[0] for tokens in vector["out"]]
    members = {
        key: [i for i, of in enumerate(vector["in"]["group"]) if of == key] for key in ("a", "b")
    }
    return [
        ([rewards[i] for i in found], [expected[i] for i in found]) for found in members.values()
    ]


@pytest.mark.parametrize(
    ("vector", "estimator"),
    [("grpo_std", "grpo"), ("grpo_nostd(Dr.GRPO)", "dr_grpo"), ("rloo", "rloo")],
)
def test_agrees_with_verl(vector: str, estimator: str) -> None:
    for rewards, expected in groups_of(vector):
        assert values(group(rewards, rule(estimator))) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "dr_mas", "rloo"])
def test_a_sample_without_others_has_nothing_to_be_compared_with(estimator: str) -> None:
    # verl gives it its raw reward (1.0 in its vectors): a policy gradient without a baseline.
    assert values(group([1.0], rule(estimator))) == [0.0]


def test_leave_one_out_is_bounded_where_the_others_have_no_variance() -> None:
    """E5: divided by the others' deviation, the first would have an advantage of a million."""
    assert values(group([1.0, 0.0, 0.0, 0.0], rule("rloo"))) == pytest.approx(
        [1.0, -1 / 3, -1 / 3, -1 / 3]
    )
    with pytest.raises(ValueError, match="normalize_std: rloo never divides"):
        rule("rloo", normalize_std=True)


def test_leave_one_out_leaves_the_whole_sample_out_not_one_row() -> None:
    assert values(group([3.0, 0.0], rule("rloo"), rows=2)) == [3.0, 3.0, -3.0, -3.0]


def test_every_agent_has_its_own_baseline_and_deviation_in_dr_mas() -> None:
    chosen = rule("dr_mas")
    assert chosen.scope == "agent"
    samples = [
        FinishedSample(
            sample_id=name,
            rewards=Rewards(agents={"solver": small, "judge": large}),
            rows=[
                Row(vertex_id=f"{name}/{a}", sample_id=name, agent=a, policy="p", path=a)
                for a in ("solver", "judge")
            ],
        )
        for name, small, large in (("s0", 0.0, 100.0), ("s1", 0.1, 300.0))
    ]
    got = values(group_advantages(samples, chosen))
    assert got == pytest.approx([-math.sqrt(0.5)] * 2 + [math.sqrt(0.5)] * 2, abs=1e-4)


def test_reinforce_pp_whitens_over_the_batch_by_one_value_per_sample() -> None:
    chosen = rule("reinforce_pp")
    assert chosen.release_scope == "batch"
    long = group([1.0, 3.0], chosen, rows=5)
    short = group([5.0], chosen, name="t")
    first, second = whiten_batch([long, short])
    # Mean 3 and deviation 2 over three samples; by rows they would be 2.27 and 1.35.
    assert values(first) == pytest.approx([-1.0] * 5 + [0.0] * 5, abs=1e-6)
    assert values(second) == pytest.approx([1.0], abs=1e-6)


def test_reinforce_pp_with_baseline_first_takes_off_the_mean_of_the_group() -> None:
    chosen = rule("reinforce_pp_baseline")
    hard, easy = group([0.0, 2.0], chosen), group([9.0, 11.0], chosen, name="t")
    got = [value for part in whiten_batch([hard, easy]) for value in values(part)]
    assert got == pytest.approx([-math.sqrt(0.75), math.sqrt(0.75)] * 2, abs=1e-6)


def test_policies_are_whitened_apart() -> None:
    chosen = rule("reinforce_pp")
    one = group([0.0, 1.0], chosen)
    other = group([100.0, 300.0], chosen, name="t", policy="q")
    whole = [values(part) for part in whiten_batch([one, other])]
    assert whole[0] == pytest.approx(whole[1], abs=1e-6)


def test_a_batch_of_one_reward_is_centred_and_not_blown_up() -> None:
    chosen = rule("reinforce_pp")
    (only,) = whiten_batch([group([0.7] * 4, chosen)])
    assert values(only) == pytest.approx([0.0] * 4, abs=1e-12)
    assert only.zero_variance


@given(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=10))
def test_whitened_advantages_have_mean_0_and_at_most_variance_1(rewards: list[float]) -> None:
    (only,) = whiten_batch([group(rewards, rule("reinforce_pp"))])
    got = values(only)
    assert math.fsum(got) == pytest.approx(0.0, abs=1e-6)
    assert math.fsum(value**2 for value in got) <= len(got) - 1 + 1e-6


def test_overlong_responses_lose_reward_softly() -> None:
    vector = peer("dapo_soft_overlong")
    long = OverlongRule(max_tokens=vector["in"]["max"], buffer_tokens=vector["in"]["cache"])
    assert [long.of(n) for n in vector["in"]["lens"]] == pytest.approx(vector["out"], abs=1e-6)


def test_the_penalty_is_part_of_what_is_compared_and_not_of_the_reward() -> None:
    chosen = rule("dr_grpo", overlong=OverlongRule(max_tokens=10, buffer_tokens=5, penalty=2.0))
    samples = [
        FinishedSample(
            sample_id=name,
            rewards=Rewards(team=1.0),
            rows=[
                Row(
                    vertex_id=name, sample_id=name, agent="a", policy="p", path="0",
                    num_response_tokens=tokens,
                )
            ],
        )
        for name, tokens in (("short", 5), ("long", 12))
    ]  # fmt: skip
    result = group_advantages(samples, chosen)
    assert values(result) == [1.0, -1.0]
    assert [item.reward for item in result.released] == [1.0, 1.0]
    assert not result.zero_variance


def test_every_estimator_declares_what_it_needs() -> None:
    for name, estimator in ESTIMATORS.items():
        assert estimator.name == name
        assert estimator.columns == ("reward",)
        assert rule(name).scope == estimator.scopes[0]
        assert rule(name).release_scope in (*estimator.scopes, "batch")


@pytest.mark.parametrize(
    ("estimator", "more", "says"),
    [
        ("ppo", {}, "there are: grpo, dr_grpo"),
        ("ppo", {}, 'or a "module:function" of the package'),
        ("mine:advantages", {"normalize_std": True}, "normalize_std: mine:advantages divides by"),
        ("dr_mas", {"scope": "group"}, "scope = 'group': dr_mas takes agent"),
        ("dr_grpo", {"normalize_std": True}, "normalize_std: dr_grpo never divides"),
    ],
)
def test_what_does_not_go_together_is_named(
    estimator: str, more: dict[str, object], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        rule(estimator, **more)


def test_what_can_be_chosen_is_chosen() -> None:
    assert not rule("grpo", normalize_std=False).normalize_std
    assert rule("grpo", scope="call_site").scope == "call_site"
    assert not rule("rloo", normalize_std=False).normalize_std


def test_an_estimator_of_the_runs_own_compares_the_group_unless_told_otherwise() -> None:
    assert (rule("mine:f").scope, rule("mine:f").release_scope) == ("group", "group")
    assert rule("mine:f", scope="call_site").release_scope == "call_site"
    assert rule("mine:f").is_own
    assert not rule("grpo").is_own


@pytest.mark.parametrize("name", ["gae_plain", "gae_123_g1_l1", "gae_123_g0.5_l1"])
def test_gae_agrees_with_verl(name: str) -> None:
    given_, out = peer(name)["in"], peer(name)["out"]
    mask = [1, 1, 1]
    advantages, returns = gae(
        given_["rewards"][0],
        given_["values"][0],
        mask,
        gamma=given_["gamma"],
        lam=given_.get("lam", 1),
    )
    assert advantages == pytest.approx(out["adv_raw"][0], abs=1e-6)
    assert returns == pytest.approx(out["returns"][0], abs=1e-6)
    assert whitened(advantages, mask) == pytest.approx(out["adv_whitened"][0], abs=1e-6)


@pytest.mark.parametrize(
    ("rewards", "mask", "gamma", "expected"),
    [
        ([0, 0, 0, 0, 0, 1], [1, 1, 0, 0, 1, 1], 1.0, [1, 1, 0, 0, 1, 1]),
        ([0, 0, 0, 0, 2], [1, 1, 0, 0, 1], 0.5, [0.5, 1, 0, 0, 2]),
        ([0, 0, 3, 0], [1, 1, 0, 0], 0.5, [1.5, 3, 0, 0]),
    ],
    ids=["no_reset", "discount_counts_actions", "reward_on_an_observation"],
)
def test_returns_reach_over_observations(
    rewards: list[float], mask: list[int], gamma: float, expected: list[float]
) -> None:
    """E2: observation tokens are no steps."""
    advantages, returns = gae(rewards, [0.0] * len(mask), mask, gamma=gamma, lam=1.0)
    assert returns == expected
    assert advantages == expected


def test_whitened_advantages_have_mean_0_and_variance_1_where_the_mask_is_1() -> None:
    low, high, masked = whitened([1.0, 3.0, 9.0], [1, 1, 0])
    assert (low, masked) == (-high, 0.0)
    assert high == pytest.approx(0.5**0.5, rel=1e-6)  # of two, the unbiased variance is 2


def test_gae_refuses_what_has_no_meaning() -> None:
    with pytest.raises(ValueError, match="2 rewards, 1 values, 2 mask entries"):
        gae([0, 1], [0], [1, 1], gamma=1, lam=1)
    with pytest.raises(ValueError, match="before the first action"):
        gae([1, 0], [0, 0], [0, 1], gamma=1, lam=1)
    assert whitened([1.0, 2.0], [0, 0]) == [0.0, 0.0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(rewards=st.lists(st.floats(-MAX_REWARD, MAX_REWARD), min_size=1, max_size=6))
def test_whatever_reward_is_usable_the_advantages_are_finite(
    estimator: str, rewards: list[float]
) -> None:
    made = [group(rewards, rule(estimator))]
    for found in (*made, *whiten_batch(made)):
        assert all(math.isfinite(advantage) for advantage in values(found))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e200, -1.7e308])
def test_numbers_beyond_are_not_usable(number: float) -> None:
    assert not is_usable(number)
    assert is_usable(-MAX_REWARD)

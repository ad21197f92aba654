"""Losses on plain tensors: peers' numbers, clipping, correction, aggregation, extremes (E7, E9)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from peer_vectors import peer

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ledger import Counts
from flexmarl.runtime.algorithm_config import LOSS_KINDS, LossConfig
from flexmarl.trainer.rank.losses.base import PolicyInputs, PolicyTerm
from flexmarl.trainer.rank.losses.choose import choose
from flexmarl.trainer.rank.losses.correction import correction
from flexmarl.trainer.rank.losses.kl import divergence
from flexmarl.trainer.rank.losses.registry import LOSSES
from flexmarl.trainer.rank.losses.total import (
    Coefficients,
    LossInputs,
    LossOutput,
    total_loss,
)

NONE = Coefficients()
EVERY = pytest.mark.parametrize("kind", LOSS_KINDS)


def inputs(
    current: list[float],
    *,
    behaviour: list[float] | None = None,
    advantage: list[float] | None = None,
    mask: list[bool] | None = None,
    row: list[int] | None = None,
    entropy: list[float] | None = None,
    reference: list[float] | None = None,
    dtype: torch.dtype = torch.float64,
) -> LossInputs:
    count = len(current)
    kept = torch.tensor([True] * count if mask is None else mask)
    rows = torch.tensor([0] * count if row is None else row)
    lengths = torch.zeros(int(rows.max()) + 1, dtype=torch.int64).index_add(0, rows, kept.long())

    def column(values: list[float] | None, default: float) -> torch.Tensor:
        return torch.tensor([default] * count if values is None else values, dtype=torch.float64)

    return LossInputs(
        current=torch.tensor(current, dtype=dtype, requires_grad=True),
        entropy=column(entropy, 0.0).to(dtype),
        behaviour=column(behaviour, -1.0),
        reference=None if reference is None else column(reference, 0.0),
        advantage=column(advantage, 1.0),
        row=rows,
        row_tokens=lengths[rows].clamp(min=1),
        mask=kept,
        num_rows=len(lengths),
    )


def loss(
    given: LossInputs, *, coefficients: Coefficients = NONE, **config: Any
) -> tuple[LossOutput, list[float]]:
    """Returns what `total_loss` gives, and the gradient of each log-probability."""
    parsed = LossConfig.model_validate(config)
    output = total_loss(given, parsed, coefficients, LOSSES[parsed.kind])
    output.total.backward()
    assert given.current.grad is not None
    return output, given.current.grad.tolist()


def from_ratios(vector: dict[str, Any], *, old: float = -1.0, **more: Any) -> LossInputs:
    """Rows of a peer's vector, padding kept as masked tokens."""
    ratios, advantages = vector["ratio"], vector["adv"]
    if not isinstance(ratios[0], list):
        ratios, advantages = [ratios], [advantages]
    mask = vector.get("mask", [[1.0] * len(line) for line in ratios])
    return inputs(
        [old + math.log(ratio) for line in ratios for ratio in line],
        behaviour=[old for line in ratios for _ in line],
        advantage=[value for line in advantages for value in line],
        mask=[bool(value) for line in mask for value in line],
        row=[number for number, line in enumerate(ratios) for _ in line],
        **more,
    )


def counts(given: LossInputs) -> Counts:
    rows = len(set(given.row[given.mask].tolist()))
    return Counts(num_rows=rows, num_tokens=int(given.mask.sum()))


def test_the_names_that_a_config_takes_are_those_that_there_are() -> None:
    assert tuple(LOSSES) == LOSS_KINDS


@pytest.mark.parametrize("clip_high", [0.2, 0.28], ids=["sym", "dapo"])
@pytest.mark.parametrize(
    ("aggregation", "words"),
    [("token_mean", "token-mean"), ("seq_mean_token_mean", "seq-mean-token-mean")],
)
def test_ppo_clip_agrees_with_verl(clip_high: float, aggregation: Any, words: str) -> None:
    if clip_high == 0.2:
        name = f"ppo_clip_sym0.2_{words}"
    elif aggregation == "token_mean":
        name = "ppo_clip_dapo_low0.2_high0.28_token-mean"
    else:
        pytest.skip("verl's numbers have clip-higher by token mean only")
    vector = peer(name)
    given = from_ratios(vector["in"])
    output, _ = loss(given, old="behaviour", clip_high=clip_high, aggregation=aggregation)
    mean = output.total.item() / counts(given).denominator(aggregation)
    assert mean == pytest.approx(vector["out"][0], abs=1e-6)
    share = output.sums["clip_fraction"].item() / counts(given).num_tokens
    assert share == pytest.approx(vector["out"][1]["actor/pg_clipfrac"], abs=1e-6)


@pytest.mark.parametrize("words", ["token-mean", "seq-mean-token-sum-norm"])
def test_dual_clip_agrees_with_verl(words: str) -> None:
    vector = peer(f"ppo_dualclip_c3_{words}")
    given = from_ratios(vector["in"])
    output, _ = loss(given, kind="dual_clip", old="behaviour", dual_clip=3.0)
    # One row of three tokens: the mean over tokens and the sum over a width of 3 are the same.
    assert output.total.item() / 3 == pytest.approx(vector["out"][0], abs=1e-6)
    assert output.sums["clip_fraction"] == 0.0
    assert output.sums["dual_clip_fraction"] == 1.0


def test_gspo_agrees_with_verl() -> None:
    vector = peer("gspo_seq_ratio_and_loss")
    ratios = [[math.exp(value) for value in line] for line in vector["in"]["log_ratio"]]
    given = from_ratios({**vector["in"], "ratio": ratios})
    output, _ = loss(
        given,
        kind="gspo",
        old="behaviour",
        clip_low=vector["in"]["low"],
        clip_high=vector["in"]["high"],
        aggregation="seq_mean_token_mean",
    )
    expected, stats = vector["out"]["loss"]
    assert output.total.item() / 2 == pytest.approx(expected, abs=1e-6)
    share = output.sums["clip_fraction"].item() / 5
    assert share == pytest.approx(stats["actor/pg_clipfrac"], abs=1e-6)


def test_cispo_agrees_with_verl() -> None:
    vector = peer("cispo")
    # The loss depends on the log-probabilities themselves, which the vector leaves out; these three
    # give its value.
    old = [-1.0, -1.0, -3.0]
    given = inputs(
        [base + math.log(ratio) for base, ratio in zip(old, vector["in"]["ratio"], strict=True)],
        behaviour=old,
        advantage=vector["in"]["adv"],
    )
    output, grad = loss(given, kind="cispo", old="behaviour")
    assert output.total.item() / 3 == pytest.approx(vector["out"][0], abs=1e-6)
    assert output.sums["clip_fraction"].item() / 3 == pytest.approx(
        vector["out"][1]["actor/pg_clipfrac"], abs=1e-6
    )
    assert grad == pytest.approx([-0.8, 1.0, 4.8])  # no token loses its gradient to the clip


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_divergence_agrees_with_verl(estimator: Any) -> None:
    vector = peer(f"kl_{estimator}")
    current, reference = (
        torch.tensor(vector["in"][name][0], dtype=torch.float64) for name in ("logprob", "ref")
    )
    got = divergence(current, reference, torch.ones(5, dtype=torch.bool), estimator)
    assert got.tolist() == pytest.approx(vector["out"][0], abs=1e-6)


def test_k3_is_the_unbiased_positive_estimator_and_bounded_before_exp() -> None:
    """Where verl's is 10 with gradient 0 (a log-ratio of 2.9), this one still pulls."""
    current = torch.tensor([-3.0, -0.5, -200.0, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.1, -0.5, 0.0, -200.0], dtype=torch.float64)
    kl = divergence(current, reference, torch.ones(4, dtype=torch.bool), "k3")
    assert kl[0].item() == pytest.approx(math.exp(2.9) - 1 - 2.9)
    assert kl[1].item() == 0.0
    kl.sum().backward()
    assert current.grad is not None
    assert current.grad[0].item() == pytest.approx(1 - math.exp(2.9))
    assert current.grad[2].item() == 0.0
    assert current.grad[3].item() == pytest.approx(1.0)


def test_token_correction_agrees_with_verl() -> None:
    vector = peer("tis_token")
    gaps = vector["in"]["log_ratio(old-rollout)"]
    mask = [bool(value) for line in vector["in"]["mask"] for value in line]
    flat = [value for line in gaps for value in line]
    factor, capped = correction(
        torch.tensor(flat) * torch.tensor(mask),
        policy_inputs(mask, row=[0, 0, 0, 1, 1, 1]),
        LossConfig(correction_cap=vector["in"]["cap"]),
    )
    expected = [value for line in vector["out"] for value in line]
    assert (factor * torch.tensor(mask)).tolist() == pytest.approx(expected, abs=1e-6)
    assert (capped & torch.tensor(mask)).tolist() == [False, False, True, True, False, True]


def test_row_correction_is_the_product_over_its_tokens() -> None:
    gap = torch.tensor([0.5, -0.25, 3.0])
    factor, _ = correction(
        gap,
        policy_inputs([True] * 3, row=[0, 0, 1]),
        LossConfig(correction="sequence", correction_cap=5.0),
    )
    assert factor.tolist() == pytest.approx([math.exp(0.25), math.exp(0.25), 5.0])


def policy_inputs(mask: list[bool], *, row: list[int]) -> PolicyInputs:
    zero = torch.zeros(len(mask))
    return PolicyInputs(
        current=zero, old=zero, log_ratio=zero, advantage=zero, mask=torch.tensor(mask),
        row=torch.tensor(row), row_tokens=torch.ones(len(mask)), num_rows=max(row) + 1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("vector", "aggregation", "limit"),
    [
        ("agg_token-mean", "token_mean", 1),
        ("agg_seq-mean-token-sum", "seq_mean_token_sum", 1),
        ("agg_seq-mean-token-sum-norm", "dr_grpo", 3),
    ],
)
def test_aggregations_agree_with_verl(vector: str, aggregation: Any, limit: int) -> None:
    """verl divides dr_grpo by a tensor's width, which is 3 here; we by the configured limit."""
    found = peer(vector)
    values = [value for line in found["in"]["loss"] for value in line]
    mask = [bool(value) for line in found["in"]["mask"] for value in line]
    given = inputs(
        [-1.0] * 9, advantage=[-v for v in values], mask=mask, row=[0, 0, 0, 1, 1, 1, 2, 2, 2]
    )
    output, _ = loss(given, aggregation=aggregation, response_limit=limit)
    mean = output.total.item() / counts(given).denominator(aggregation, response_limit=limit)
    assert mean == pytest.approx(found["out"][0], abs=1e-6)


def test_the_mean_of_means_weighs_rows_alike() -> None:
    given = inputs([-1.0] * 4, row=[0, 1, 1, 1])
    assert loss(given, aggregation="seq_mean_token_mean")[1] == pytest.approx([-1.0] + [-1 / 3] * 3)


@EVERY
def test_at_staleness_zero_the_gradient_is_advantage_times_that_of_the_log_probability(kind):
    output, grad = loss(inputs([-1.0, -2.0], advantage=[0.5, -2.0]), kind=kind)
    assert grad == pytest.approx([-0.5, 2.0])
    assert output.sums["ratio"] == 2.0
    assert output.sums["clip_fraction"] == 0.0


@pytest.mark.parametrize(
    ("current", "advantage", "moves"),
    [(-0.5, 1.0, False), (-0.5, -1.0, True), (-1.5, 1.0, True), (-1.5, -1.0, False)],
)
def test_a_ratio_beyond_the_clip_moves_only_back(current, advantage, moves):
    _, grad = loss(inputs([current], advantage=[advantage]), old="behaviour")
    assert (grad[0] != 0.0) is moves


def test_the_correction_is_capped_and_detached():
    given = inputs([-0.5, -3.0], behaviour=[-1.0, -1.0])
    _, grad = loss(given, correction_cap=1.2)
    assert grad == pytest.approx([-1.2, -math.exp(-2.0)])


@EVERY
@pytest.mark.parametrize("old", ["proximal", "behaviour"])
@pytest.mark.parametrize("extreme", [-200.0, -1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_log_probs_keep_value_and_gradient_finite(kind, old, extreme, dtype):
    more = {} if old == "behaviour" else {"correction_cap": 5.0, "correction": "sequence"}
    for estimator in ("k1", "k3") if extreme == -1e30 else ("k1", "k2", "k3"):
        for current, other in ((extreme, 0.0), (0.0, extreme)):
            given = inputs(
                [current, -1.0],
                behaviour=[other, -1.0],
                reference=[other, -1.0],
                advantage=[-1.0, 1.0],
                dtype=dtype,
            )
            coefficients = Coefficients(kl=0.1)
            config = {"kind": kind, "old": old, "kl": {"estimator": estimator}, **more}
            output, grad = loss(given, coefficients=coefficients, **config)
            assert math.isfinite(output.total.item())
            assert all(math.isfinite(value) for value in grad)


@EVERY
def test_a_masked_token_gives_nothing_however_extreme(kind):
    given = inputs(
        [-1.0, 500.0],
        behaviour=[-1.0, -math.inf],
        reference=[-1.0, math.inf],
        mask=[True, False],
        advantage=[2.0, 9.0],
    )
    output, grad = loss(
        given, coefficients=Coefficients(kl=1.0), kind=kind, correction_cap=3.0, kl={}
    )
    assert grad == [-2.0, 0.0]
    assert math.isfinite(output.total.item())
    assert output.maxima["logprob_gap_max"].item() == 0.0


@EVERY
def test_a_pass_without_an_unmasked_token_gives_nothing(kind):
    given = inputs([-1.0, -2.0], mask=[False, False], reference=[0.0, 0.0], entropy=[1.0, 1.0])
    coefficients = Coefficients(entropy=1.0, kl=1.0)
    output, grad = loss(given, coefficients=coefficients, kind=kind, kl={})
    assert grad == [0.0, 0.0]
    assert output.total.item() == 0.0


def test_all_terms_share_the_aggregation():
    given = inputs(
        [-1.0] * 3, entropy=[1.0, 2.0, 4.0], advantage=[0.0] * 3, row=[0, 1, 1],
        reference=[-2.0, -3.0, -5.0],
    )  # fmt: skip
    both = Coefficients(entropy=0.5, kl=2.0)
    config = {"kl": {"estimator": "k1"}}
    output, _ = loss(given, coefficients=both, **config)
    assert output.total.item() == -0.5 * 7 + 2.0 * 7
    assert output.sums["kl"] == 7.0
    output, _ = loss(given, coefficients=both, aggregation="seq_mean_token_mean", **config)
    assert output.total.item() == -0.5 * (1 + 3) + 2.0 * (1 + 3)
    assert output.sums["loss_entropy"] + output.sums["loss_kl"] == output.sums["loss"]


def test_the_gap_between_engine_and_trainer_is_measured():
    given = inputs([-1.0, -1.0, -1.0, -1.0], behaviour=[-1.0, -1.05, -1.5, -0.5])
    output, _ = loss(given)
    assert output.sums["logprob_gap"].item() == pytest.approx(1.05)
    assert output.sums["logprob_outside"] == 2
    assert output.maxima["logprob_gap_max"].item() == pytest.approx(0.5)


USERS = """
import torch
from flexmarl.trainer.rank.losses.base import PolicyTerm

def plain(inputs, config):
    return -inputs.advantage * inputs.current

def whole(inputs, config):
    return PolicyTerm(per_token=-inputs.current, fractions={"large": inputs.current > -1.5})

def raises(inputs, config):
    return inputs.nothing

def one_number(inputs, config):
    return -inputs.current.sum()

def detached(inputs, config):
    return -inputs.current.detach()

def text(inputs, config):
    return "no"

def nothing_in_it(inputs, config):
    return PolicyTerm(per_token=None)

def complex_numbers(inputs, config):
    return -inputs.current * 1j

def ends(inputs, config):
    raise SystemExit("enough")

def without_grad(inputs, config):
    torch.set_grad_enabled(False)
    return -inputs.current

def forgetful(inputs, config):
    inputs.mask.fill_(True)
    return -inputs.current

def share(flags, name="large"):
    return lambda inputs, config: PolicyTerm(per_token=-inputs.current, fractions={name: flags})

share_of_numbers = share(torch.zeros(2))
share_of_one = share(torch.ones(1, dtype=torch.bool))
share_of_text = share("all")
numbered = share(torch.ones(2, dtype=torch.bool), 3)

def no_shares(inputs, config):
    return PolicyTerm(per_token=-inputs.current, fractions=None)

def usurper(inputs, config):
    shares = {"loss": inputs.mask, "mine": inputs.mask}
    return PolicyTerm(per_token=-inputs.current, fractions=shares)

number = 3
"""


def test_a_loss_of_the_run_is_used_like_any_other(tmp_path):
    (tmp_path / "mine.py").write_text(USERS)
    found = choose("mine:whole", package=tmp_path)
    given = inputs([-1.0, -2.0])
    output = total_loss(given, LossConfig(kind="mine:whole"), Coefficients(), found)
    assert output.total.item() == 3.0
    assert output.sums["large"] == 1
    plain = choose("mine:plain", package=tmp_path)
    assert total_loss(given, LossConfig(), Coefficients(), plain).total.item() == 3.0


def test_two_runs_may_have_modules_of_one_name(tmp_path):
    for name, sign in (("one", "-"), ("two", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(
            f"def f(inputs, config):\n    return {sign}inputs.current\n"
        )
    totals = []
    for name in ("one", "two", "one"):
        found = choose("mine:f", package=tmp_path / name)
        output = total_loss(inputs([-2.0]), LossConfig(), Coefficients(), found)
        totals.append(output.total.item())
    assert totals == [2.0, -2.0, 2.0]


@pytest.mark.parametrize(
    ("name", "reason", "says"),
    [
        ("nowhere:f", ErrorReason.WORKFLOW_IMPORT_FAILED, "No module named 'nowhere'"),
        ("gone:f", ErrorReason.WORKFLOW_IMPORT_FAILED, "SystemExit: enough"),
        ("mine:missing", ErrorReason.WORKFLOW_IMPORT_FAILED, "mine has no function missing"),
        ("mine:number", ErrorReason.WORKFLOW_IMPORT_FAILED, "mine has no function number"),
        ("mine:raises", ErrorReason.LOSS_RAISED, "AttributeError"),
        ("mine:one_number", ErrorReason.LOSS_RAISED, "one number per token"),
        ("mine:detached", ErrorReason.LOSS_RAISED, "do not depend on inputs.current"),
        ("mine:text", ErrorReason.LOSS_RAISED, "returned str"),
        ("mine:nothing_in_it", ErrorReason.LOSS_RAISED, "returned NoneType"),
        ("mine:complex_numbers", ErrorReason.LOSS_RAISED, "complex128 for .* of torch.float64"),
        ("mine:ends", ErrorReason.LOSS_RAISED, "SystemExit: enough"),
        ("mine:without_grad", ErrorReason.LOSS_RAISED, "do not depend on inputs.current"),
        ("mine:forgetful", ErrorReason.LOSS_RAISED, "changed inputs.mask in place"),
        ("mine:share_of_numbers", ErrorReason.LOSS_RAISED, "float32 as fraction 'large'"),
        ("mine:share_of_one", ErrorReason.LOSS_RAISED, r"\(1,\) .* as fraction 'large'"),
        ("mine:share_of_text", ErrorReason.LOSS_RAISED, "str as fraction 'large'"),
        ("mine:numbered", ErrorReason.LOSS_RAISED, "a fraction named 3"),
        ("mine:no_shares", ErrorReason.LOSS_RAISED, "NoneType as fractions"),
    ],
)
def test_a_broken_loss_of_the_run_is_named(tmp_path, name, reason, says):
    (tmp_path / "mine.py").write_text(USERS)
    (tmp_path / "gone.py").write_text("raise SystemExit('enough')")
    with pytest.raises(DomainError, match=says) as caught:
        found = choose(name, package=tmp_path)
        total_loss(inputs([-1.0, -2.0]), LossConfig(), Coefficients(), found)
    assert caught.value.reason is reason
    assert name in caught.value.message
    assert torch.is_grad_enabled()


def test_a_share_takes_no_other_numbers_name(tmp_path):
    (tmp_path / "mine.py").write_text(USERS)
    found = choose("mine:usurper", package=tmp_path)
    output = total_loss(inputs([-1.0, -3.0]), LossConfig(), Coefficients(), found)
    assert (output.sums["loss"], output.sums["mine"]) == (4.0, 2)


def test_a_policy_term_carries_no_fractions_by_itself():
    assert PolicyTerm(per_token=torch.zeros(1)).fractions == {}

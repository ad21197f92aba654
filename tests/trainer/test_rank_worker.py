"""What a worker does with odd micro-batches, with policies that take turns, with a step."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer import reference
from trainer.harness import (
    Policy,
    Ranks,
    Row,
    flat,
    make_rows,
    policy_config,
    read,
    saved,
    write_model,
)

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.weights_probe import probe_prompt

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

MEMBERS = pytest.mark.parametrize("members", [[0], [0, 1]], ids=["one_rank", "two_ranks"])


@MEMBERS
async def test_a_gradient_that_is_not_finite_is_dropped_whole_on_all_ranks(
    ranks: Ranks, tiny_model: Path, members: list[int]
) -> None:
    policy = Policy(ranks, policy_config(tiny_model), tiny_model, members)
    await policy.bind()
    rows = make_rows(6)
    await policy.add(rows)
    before = flat((await policy.export("gradients"))["gradients"])

    bad = [*rows[:5], replace(rows[5], advantage=math.inf)]
    replies = await policy.add(bad, "bad")
    assert [reply.finite for reply in replies] == [False] * len(members)
    after = flat((await policy.export("gradients"))["gradients"])
    assert np.array_equal(before, after)

    assert (await policy.add(rows, "again"))[0].finite
    twice = flat((await policy.export("gradients"))["gradients"])
    assert np.allclose(twice, 2 * before, rtol=1e-5, atol=1e-7)


@MEMBERS
async def test_a_micro_batch_without_sampled_tokens_changes_nothing(
    ranks: Ranks, tiny_model: Path, members: list[int]
) -> None:
    policy = Policy(ranks, policy_config(tiny_model), tiny_model, members)
    await policy.bind()
    await policy.add(make_rows(6))
    before = flat((await policy.export("gradients"))["gradients"])
    silent = [Row([1, 2, 3], [], [], advantage=5.0) for _ in range(3)]
    replies = await policy.add(silent, "silent")
    assert all(reply.finite and reply.num_tokens == 0 for reply in replies)
    assert np.array_equal(before, flat((await policy.export("gradients"))["gradients"]))


async def test_one_row_on_two_ranks_runs_a_pass_of_weight_zero(
    ranks: Ranks, tiny_model: Path
) -> None:
    row = make_rows(1)
    sums = []
    for members in ([0], [0, 1]):
        policy = Policy(ranks, policy_config(tiny_model), tiny_model, members)
        await policy.bind()
        await policy.add(row)
        sums.append(flat((await policy.export("gradients"))["gradients"]))
    assert np.allclose(sums[0], sums[1], rtol=1e-5, atol=1e-7)


@MEMBERS
async def test_a_token_outside_of_the_vocabulary_is_refused_and_nothing_is_added(
    ranks: Ranks, tiny_model: Path, members: list[int]
) -> None:
    policy = Policy(ranks, policy_config(tiny_model), tiny_model, members)
    await policy.bind()
    await policy.add(make_rows(2))
    before = flat((await policy.export("gradients"))["gradients"])
    with pytest.raises(DomainError) as caught:
        await policy.add([Row([1], [7], [-1.0], advantage=1.0)], "mb-7")
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
    assert "mb-7" in caught.value.message
    assert np.array_equal(before, flat((await policy.export("gradients"))["gradients"]))


async def test_policies_that_take_turns_on_a_slot_never_touch_each_other(
    ranks: Ranks, tiny_model: Path
) -> None:
    """Both share one module; each alternating run must equal the run that had the slot alone."""
    config = policy_config(tiny_model, optimizer={"lr": 0.01})
    rows = {3: make_rows(8, seed=3), 4: make_rows(8, seed=4)}

    async def alone(seed: int) -> np.ndarray:
        policy = Policy(ranks, config, tiny_model, [0], seed=seed)
        await policy.bind()
        await policy.add(rows[seed][:4], "a")
        await policy.add(rows[seed][4:], "b")
        targets, _ = await policy.apply(10.0)
        return np.concatenate([flat(targets["master"]), flat(targets["moments"])])

    expected = {seed: await alone(seed) for seed in (3, 4)}
    policies = {seed: Policy(ranks, config, tiny_model, [0], seed=seed) for seed in (3, 4)}
    held = {}
    for seed, policy in policies.items():
        await policy.bind()
        held[seed] = await policy.export("master", "moments")
    for half in (slice(0, 4), slice(4, 8)):
        for seed, policy in policies.items():
            await policy.bind(saved(*held[seed].values()))
            await policy.add(rows[seed][half])
            held[seed] |= await policy.export("gradients")
            await policy.unbind()
    for seed, policy in policies.items():
        await policy.bind(saved(*held[seed].values()))
        targets, _ = await policy.apply(10.0)
        got = np.concatenate([flat(targets["master"]), flat(targets["moments"])])
        assert np.array_equal(got, expected[seed])


@MEMBERS
async def test_the_step_is_adamw_on_the_mean_clipped_gradient(
    ranks: Ranks, tiny_model: Path, members: list[int]
) -> None:
    optimizer = {"lr": 0.02, "betas": (0.9, 0.99), "weight_decay": 0.1, "decay": "all",
        "max_grad_norm": 0.05,
    }  # fmt: skip
    config = policy_config(tiny_model, optimizer=optimizer, trainer={"compute_dtype": "float64"})
    policy = Policy(ranks, config, tiny_model, members)
    await policy.bind()
    start = await policy.export("master", "moments")
    lm = reference.build(tiny_model, read(start["master"]), torch.float64)
    parameters = dict(lm.named_parameters())
    first = {name: torch.zeros_like(value) for name, value in parameters.items()}
    second = {name: torch.zeros_like(value) for name, value in parameters.items()}
    for update in range(3):
        rows = make_rows(8, seed=10 + update)
        tokens = sum(len(row.response) for row in rows)
        reference.gradient(lm, rows, aggregation="token_mean", entropy=0.0)
        for parameter in parameters.values():
            parameter.grad /= tokens
        norm = torch.cat([value.grad.ravel() for value in parameters.values()]).norm()
        with torch.no_grad():
            for name, value in parameters.items():  # arXiv 1711.05101, algorithm 2
                grad = value.grad * (0.05 / norm)
                first[name] = 0.9 * first[name] + 0.1 * grad
                second[name] = 0.99 * second[name] + 0.01 * grad**2
                mean = first[name] / (1 - 0.9 ** (update + 1))
                spread = (second[name] / (1 - 0.99 ** (update + 1))).sqrt() + 1e-8
                value -= 0.02 * (mean / spread + 0.1 * value)

        await policy.add(rows)
        targets, written = await policy.apply(tokens, num_updates=update)
        assert written.metrics["grad_norm"] > 0.05
        got = read(targets["master"])
        for name, parameter in parameters.items():
            assert np.allclose(got[name], parameter.detach().numpy(), rtol=1e-6, atol=1e-9), name
    assert written.weights_hash.startswith("sha256:")


@MEMBERS
async def test_a_gradient_whose_squares_are_beyond_float32_is_clipped_as_any_other(
    ranks: Ranks, tiny_model: Path, members: list[int]
) -> None:
    config = policy_config(tiny_model, optimizer={"kind": "adamw", "lr": 0.01})
    ends = []
    for factor in (1.0, 1e30):
        policy = Policy(ranks, config, tiny_model, members)
        await policy.bind()
        await policy.add([replace(row, advantage=factor * row.advantage) for row in make_rows(8)])
        targets, written = await policy.apply(1e-3)
        assert 10 * factor < written.metrics["grad_norm"] < math.inf
        ends.append(flat(targets["master"]))
    assert np.allclose(ends[0], ends[1], rtol=1e-4, atol=1e-6)


@MEMBERS
async def test_a_sum_that_overflows_is_refused_and_published_nowhere(
    ranks: Ranks, tiny_model: Path, members: list[int]
) -> None:
    policy = Policy(ranks, policy_config(tiny_model), tiny_model, members)
    await policy.bind()
    state = await policy.export("master", "moments")
    huge = [replace(row, advantage=2e31 * row.advantage) for row in make_rows(8)]
    await policy.add(huge)
    gradients = (await policy.export("gradients"))["gradients"]
    values = np.fromfile(gradients.path, "<f4")  # as if it had grown to the largest that there are
    np.copysign(np.finfo("<f4").max, values).tofile(gradients.path)
    await policy.bind(saved(*state.values(), gradients))
    assert (await policy.add(huge))[0].finite
    with pytest.raises(DomainError, match="those of its micro-batches are not") as caught:
        await policy.apply(1.0)
    assert caught.value.reason is ErrorReason.NON_FINITE
    await policy.bind(saved(*state.values()))
    assert np.array_equal(flat((await policy.export("master"))["master"]), flat(state["master"]))


@MEMBERS
async def test_updates_go_on_after_a_resume_as_if_nothing_had_been(
    ranks: Ranks, tiny_model: Path, members: list[int]
) -> None:
    """N updates are bit for bit k updates, a save, a load elsewhere, and N - k more."""
    config = policy_config(
        tiny_model,
        optimizer={
            "lr": 0.02, "schedule": "cosine", "warmup_updates": 2, "total_updates": 6,
            "weight_decay": 0.1,
        },
        loss={"entropy": {"start": 0.2, "end": 0.0, "until": 4}, "kl": {"coefficient": 0.1}},
    )  # fmt: skip
    ends = []
    for resumes in ((), (1, 3)):
        policy = Policy(ranks, config, tiny_model, members)
        await policy.bind()
        for update in range(5):
            rows = make_rows(8, seed=20 + update)
            await policy.add(rows[:5], num_updates=update)
            await policy.add(rows[5:], num_updates=update)
            targets, _ = await policy.apply(8.0, num_updates=update)
            if update in resumes:
                await Policy(ranks, config, tiny_model, members, seed=99).bind()  # another policy
                await policy.bind(saved(targets["master"], targets["moments"]))
        ends.append(np.concatenate([flat(targets["master"]), flat(targets["moments"])]))
    assert np.array_equal(*ends)


@MEMBERS
async def test_lion_steps_by_signs_and_keeps_one_moment(
    ranks: Ranks, tiny_model: Path, members: list[int]
) -> None:
    pytest.importorskip("lion_pytorch", reason="Lion needs lion-pytorch, of the extra 'trainer'")
    optimizer = {
        "kind": "lion", "lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1, "decay": "all",
    }  # fmt: skip
    config = policy_config(tiny_model, optimizer=optimizer, trainer={"compute_dtype": "float64"})
    policy = Policy(ranks, config, tiny_model, members)
    await policy.bind()
    held = await policy.export("master", "moments")
    assert len(read(held["moments"])) == len(read(held["master"]))
    for update in range(2):
        before, moments = read(held["master"]), read(held["moments"])
        await policy.bind(saved(held["master"], held["moments"]))
        await policy.add(make_rows(8, seed=update))
        gradients = read((await policy.export("gradients"))["gradients"])
        held, _ = await policy.apply(1e6, num_updates=update)  # too small to be clipped
        after, moved = read(held["master"]), read(held["moments"])
        for name, start in before.items():  # arXiv 2302.06675, algorithm 2
            gradient, moment = gradients[name] / 1e6, moments["exp_avg." + name]
            step = np.sign(0.9 * moment + 0.1 * gradient) + 0.1 * start
            expected = start - 0.01 * step
            assert np.allclose(after[name], expected, rtol=1e-9, atol=1e-12), name
            mixed = 0.99 * moment + 0.01 * gradient
            assert np.allclose(moved["exp_avg." + name], mixed, rtol=1e-9, atol=1e-18), name


async def test_norms_and_biases_do_not_decay_unless_told_to(ranks: Ranks, tiny_model: Path) -> None:
    moved = {}
    for decay in ("matrices", "all"):
        optimizer = {"lr": 0.1, "weight_decay": 0.5, "decay": decay}
        policy = Policy(ranks, policy_config(tiny_model, optimizer=optimizer), tiny_model, [0])
        await policy.bind()
        start = read((await policy.export("master"))["master"])
        await policy.add([replace(row, advantage=0.0) for row in make_rows(2)])
        end = read((await policy.apply(1.0))[0]["master"])
        moved[decay] = {name: not np.array_equal(start[name], end[name]) for name in start}
    norms = {name for name in moved["all"] if "norm" in name}
    assert norms
    assert all(moved["all"].values())
    assert {name for name, did in moved["matrices"].items() if not did} == norms


async def test_a_loss_of_the_runs_package_trains(
    ranks: Ranks, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "def loss(inputs, config):\n    return -inputs.advantage * inputs.log_ratio.exp()\n"
    )
    sums = []
    for kind in ("ppo_clip", "mine:loss"):
        config = policy_config(tiny_model, loss={"kind": kind})
        policy = Policy(ranks, config, tiny_model, [0, 1], package=str(tmp_path))
        await policy.bind()
        assert (await policy.add(make_rows(8)))[0].finite
        sums.append(flat((await policy.export("gradients"))["gradients"]))
    assert np.allclose(sums[0], sums[1], rtol=1e-5, atol=1e-7)
    broken = policy_config(tiny_model, loss={"kind": "mine:missing"})
    with pytest.raises(DomainError, match="mine has no function missing") as caught:
        await Policy(ranks, broken, tiny_model, [0], package=str(tmp_path)).bind()
    assert caught.value.reason is ErrorReason.WORKFLOW_IMPORT_FAILED


@MEMBERS
async def test_a_loss_that_raises_leaves_no_weights_for_whoever_comes_next(
    ranks: Ranks, tiny_model: Path, tmp_path: Path, members: list[int]
) -> None:
    """It raises between forward and backward, with weights gathered in a module that both share."""
    (tmp_path / "mine.py").write_text("def loss(inputs, config):\n    return inputs.nothing\n")
    config = policy_config(tiny_model)
    following = Policy(ranks, config, tiny_model, members, seed=1)
    await following.bind()
    await following.add(make_rows(6))
    expected = flat((await following.export("gradients"))["gradients"])
    broken = policy_config(tiny_model, loss={"kind": "mine:loss"})
    policy = Policy(ranks, broken, tiny_model, members, seed=2, package=str(tmp_path))
    await policy.bind()
    with pytest.raises(DomainError, match="mine:loss") as caught:
        await policy.add(make_rows(6))
    assert caught.value.reason is ErrorReason.LOSS_RAISED
    await following.bind()
    await following.add(make_rows(6))
    assert np.array_equal(flat((await following.export("gradients"))["gradients"]), expected)


async def test_an_apply_of_nothing_leaves_the_weights(ranks: Ranks, tiny_model: Path) -> None:
    policy = Policy(ranks, policy_config(tiny_model), tiny_model, [0])
    await policy.bind()
    start = await policy.export("master", "moments")
    targets, written = await policy.apply(0.0)
    assert written.metrics["skipped"] == 1.0
    assert np.array_equal(flat(targets["master"]), flat(start["master"]))


async def test_random_weights_are_the_librarys_own_draw_and_follow_the_seed(
    ranks: Ranks, tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = write_model(tmp_path / "m", tie_word_embeddings=False)
    policy = Policy(ranks, policy_config(model), model, [0], seed=11)
    await policy.bind()
    got = read((await policy.export("master"))["master"])
    torch.manual_seed(11)
    lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    expected = {name: value.detach().numpy() for name, value in lm.named_parameters()}
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(got[name], value), name
    await replace(policy, seed=12).bind()
    assert not np.array_equal(flat((await policy.export("master"))["master"]), flat_of(expected))


def flat_of(tensors: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([value.ravel() for _, value in sorted(tensors.items())])


async def test_pretrained_weights_come_from_the_folder(ranks: Ranks, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = write_model(tmp_path / "m")
    torch.manual_seed(5)
    lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    lm.save_pretrained(model)
    config = policy_config(model, model={"path": str(model), "init": "pretrained"})
    policy = Policy(ranks, config, model, [1, 0])
    await policy.bind()
    got = read((await policy.export("master"))["master"])
    for name, value in lm.named_parameters():
        assert np.array_equal(got[name], value.detach().numpy()), name


def rewrite(weights: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(weights)
    change(tensors)
    save_file(tensors, weights, metadata={"format": "pt"})


def own_code(model: Path) -> None:
    classes = {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    (model / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": classes}))
    (model / "mine.py").write_text(f"open({str(model / 'was-run')!r}, 'w')")


def index(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text("{}")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "no readable config.json"),
    "no weights": (lambda model: (model / "model.safetensors").unlink(), "no file named"),
    "not json": (lambda model: (model / "config.json").write_text("{"), "not a valid JSON"),
    "no object": (lambda model: (model / "config.json").write_text("null"), "config.json: "),
    "no language model": (
        lambda model: (model / "config.json").write_text('{"model_type": "vit"}'),
        "no causal language model can be made of it .vit.",
    ),
    "code of its own": (own_code, "needs code of its own, and none is run"),
    "another type": (lambda model: write_model(model, hidden_size="32"), "hidden_size"),
    "no such activation": (lambda model: write_model(model, hidden_act="none"), "'none'"),
    "no heads": (lambda model: write_model(model, num_attention_heads=0), "config.json: Zero"),
    "odd heads": (
        lambda model: write_model(model, num_key_value_heads=3),
        "2 attention heads cannot share 3",
    ),
    "no layers": (lambda model: write_model(model, num_hidden_layers=0), "no layers to shard"),
    "corrupt": (
        lambda model: os.truncate(model / "model.safetensors", 1000),
        "SafetensorError",
    ),
    "index": (index, "weights cannot be read"),
    "vocabulary": (lambda model: write_model(model, vocab_size=9), "mismatched"),
    "lacks": (lambda model: write_model(model, num_hidden_layers=3), r"lack 9 parameter\(s\)"),
    "not finite": (
        lambda model: rewrite(
            model / "model.safetensors", lambda held: held["model.norm.weight"][3:4].fill_(math.nan)
        ),
        "hold NaN or infinity, in model.norm.weight",
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
async def test_a_bad_model_folder_is_named(ranks: Ranks, tmp_path: Path, broken: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = write_model(tmp_path / "bad-model")
    lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    lm.save_pretrained(model)
    write_model(model)
    harm, says = BROKEN[broken]
    harm(model)
    config = policy_config(model, model={"path": str(model), "init": "pretrained"})
    with pytest.raises(DomainError, match=f"(bad-model|LlamaForCausalLM).*{says}") as caught:
        await Policy(ranks, config, model, [0]).bind()
    assert caught.value.reason is ErrorReason.MODEL_INVALID
    assert not (model / "was-run").exists()


async def test_a_frozen_policy_only_gives_weights(ranks: Ranks, tiny_model: Path) -> None:
    trained = Policy(ranks, policy_config(tiny_model), tiny_model, [0])
    await trained.bind()
    expected = flat((await trained.export("weights"))["weights"])
    frozen = Policy(ranks, policy_config(tiny_model, kind="frozen"), tiny_model, [0])
    await frozen.bind()
    assert np.array_equal(flat((await frozen.export("weights"))["weights"]), expected)


async def test_an_external_policy_has_a_mark_in_place_of_weights(
    ranks: Ranks, tiny_model: Path
) -> None:
    marks = []
    for model in ("m", "m", "n"):
        rollout = {"engine": "external", "external": {"url": "http://h", "model": model}}
        # Weights are not looked for: the folder holds a tokenizer, not the server's model.
        settings = {"kind": "frozen", "rollout": rollout, "model": {"path": str(tiny_model)}}
        external = Policy(ranks, policy_config(tiny_model, **settings), tiny_model, [0])
        await external.bind()
        marks.append(flat((await external.export("weights"))["weights"]).tobytes())
    assert marks[0] == marks[1] != marks[2]


async def test_bfloat16_compute_keeps_float32_masters_and_finite_gradients(
    ranks: Ranks, tiny_model: Path
) -> None:
    sums = {}
    for dtype in ("float32", "bfloat16"):
        config = policy_config(tiny_model, trainer={"compute_dtype": dtype})
        policy = Policy(ranks, config, tiny_model, [0, 1])
        await policy.bind()
        assert (await policy.add(make_rows(16)))[0].finite
        sums[dtype] = flat((await policy.export("gradients"))["gradients"])
    gap = np.linalg.norm(sums["bfloat16"] - sums["float32"]) / np.linalg.norm(sums["float32"])
    assert 1e-6 < gap < 0.1


@MEMBERS
async def test_weights_say_what_they_answer_to_the_probe_where_an_engine_cannot_be_read_back(
    ranks: Ranks, tiny_model: Path, members: list[int]
) -> None:
    silent = Policy(ranks, policy_config(tiny_model), tiny_model, members)
    await silent.bind()
    assert not (await silent.apply(0.0))[1].probe_logprobs
    await silent.unbind()
    config = policy_config(tiny_model, rollout={"engine": "vllm"})
    policy = Policy(ranks, config, tiny_model, members)
    await policy.bind()
    answers = []
    for update in range(3):
        await policy.add(make_rows(6), f"m{update}")
        targets, written = await policy.apply(10.0, update)
        answers.append(list(written.probe_logprobs))
        model = reference.build(tiny_model, read(targets["weights"]), torch.float32)
        prompt = probe_prompt(model.config.vocab_size)
        expected = reference.logprobs(model, Row(prompt[:1], prompt[1:], [], advantage=0.0))
        assert answers[-1] == pytest.approx(expected, abs=1e-5)
    assert answers[0] != answers[1] != answers[2]

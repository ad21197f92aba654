"""An adapter: trained, swapped and saved alone; published merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_model
from trainer import reference
from trainer.harness import Policy, Ranks, make_rows, policy_config, read, saved, write_model
from transformers import AutoConfig, AutoModelForCausalLM

from flexmarl.core.errors import DomainError, ErrorReason

pytest.importorskip("peft", reason="adapters need peft, of the extra 'trainer'")

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

SCALE = 16.0 / 3
TARGETS = ["q_proj", "down_proj"]


def adapted(folder: Path, **sections: Any) -> Any:
    lora = {"rank": 3, "alpha": 16, "targets": TARGETS}
    return policy_config(folder, lora=lora, optimizer={"lr": 0.05}, **sections)


def split(adapter: dict[str, np.ndarray], weight: str) -> tuple[np.ndarray, np.ndarray]:
    layer = weight.removesuffix(".weight")
    return adapter[f"{layer}.lora_A.default.weight"], adapter[f"{layer}.lora_B.default.weight"]


@pytest.mark.parametrize("members", [[0], [1, 0]], ids=["one_rank", "two_ranks"])
async def test_the_gradient_is_that_of_the_merged_weights(
    ranks: Ranks, tiny_model: Path, members: list[int]
) -> None:
    float64 = {"trainer": {"compute_dtype": "float64"}, "rollout": {"dtype": "float64"}}
    plain = Policy(ranks, policy_config(tiny_model, **float64), tiny_model, members)
    await plain.bind()
    base = read((await plain.export("weights"))["weights"])

    config = adapted(tiny_model, loss={"entropy": 0.1}, **float64)
    policy = Policy(ranks, config, tiny_model, members)
    await policy.bind()
    first = await policy.export("weights", "master")
    published = read(first["weights"])
    assert published.keys() == base.keys()
    assert all(np.array_equal(published[name], base[name]) for name in base)  # B is zero
    adapter = read(first["master"])
    assert {name.split(".")[-3] for name in adapter} == {"lora_A", "lora_B"}
    assert all("q_proj" in name or "down_proj" in name for name in adapter)

    await policy.add(make_rows(8, seed=1))
    moved, _ = await policy.apply(8.0)
    adapter, merged = read(moved["master"]), read(moved["weights"])
    changed = {name for name in base if not np.array_equal(merged[name], base[name])}
    assert {name.split(".")[-2] for name in changed} == set(TARGETS)
    for name in changed:
        low, high = split(adapter, name)
        assert np.allclose(merged[name], base[name] + SCALE * high @ low, rtol=1e-12, atol=1e-12)

    # Suspended, and bound again: the sum goes on where it was.
    rows = make_rows(14, seed=2)
    await policy.add(rows[:5])
    gradients = (await policy.export("gradients"))["gradients"]
    await policy.unbind()
    await policy.bind(saved(moved["master"], moved["moments"], gradients))
    await policy.add(rows[5:])
    got = read((await policy.export("gradients"))["gradients"])

    lm = reference.build(tiny_model, merged, torch.float64)
    reference.gradient(lm, rows, aggregation="token_mean", entropy=0.1)
    weights = dict(lm.named_parameters())
    for name in changed:
        low, high = split(adapter, name)
        to_low, to_high = split(got, name)
        whole = weights[name].grad.numpy()
        assert np.allclose(to_low, SCALE * high.T @ whole, rtol=1e-9, atol=1e-12)
        assert np.allclose(to_high, SCALE * whole @ low.T, rtol=1e-9, atol=1e-12)


async def test_two_ranks_draw_and_publish_what_one_does(ranks: Ranks, tiny_model: Path) -> None:
    published = []
    for members in ([0], [1, 0]):
        policy = Policy(ranks, adapted(tiny_model), tiny_model, members)
        await policy.bind()
        await policy.add(make_rows(8))
        _, written = await policy.apply(8.0)
        published.append(written)
    assert published[0].metrics["grad_norm"] == pytest.approx(published[1].metrics["grad_norm"])


async def test_a_divergence_is_measured_from_the_base(ranks: Ranks, tiny_model: Path) -> None:
    config = adapted(tiny_model, loss={"kl": {"coefficient": 0.1}})
    policy = Policy(ranks, config, tiny_model, [0])
    await policy.bind()
    assert (await policy.add(make_rows(8)))[0].sums["kl"] == pytest.approx(0.0, abs=1e-5)
    moved, _ = await policy.apply(8.0)
    await policy.bind(saved(moved["master"], moved["moments"]))
    assert (await policy.add(make_rows(8)))[0].sums["kl"] > 1e-4


async def test_bfloat16_bases_train_float32_adapters(ranks: Ranks, tiny_model: Path) -> None:
    config = adapted(tiny_model, trainer={"compute_dtype": "bfloat16"})
    policy = Policy(ranks, config, tiny_model, [0, 1])
    await policy.bind()
    assert {item.dtype for item in policy.parameters} == {"F32"}
    assert (await policy.add(make_rows(8)))[0].finite


@pytest.mark.parametrize("target", ["c_attn", "lm_head"])
async def test_a_target_that_is_not_there_is_named(
    ranks: Ranks, tiny_model: Path, target: str
) -> None:
    config = policy_config(tiny_model, lora={"targets": ["q_proj", target]})
    with pytest.raises(DomainError, match=f"no linear layer '{target}' .*: .*q_proj") as caught:
        await Policy(ranks, config, tiny_model, [0]).bind()
    assert caught.value.reason is ErrorReason.MODEL_INVALID


async def test_other_content_of_a_models_folder_is_another_base(
    ranks: Ranks, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model")
    config = adapted(folder, model={"path": str(folder), "init": "pretrained"})
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
        policy = Policy(ranks, config, folder, [0], model_hash=str(seed))
        await policy.bind()
        published = read((await policy.export("weights"))["weights"])
        await policy.unbind()
        base = model.state_dict()
        assert all(np.allclose(value, base[name].numpy()) for name, value in published.items())

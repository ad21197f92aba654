"""A policy with an adapter over the service: swapped and saved alone, published merged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer.harness import make_rows
from trainer.service_harness import Cluster

from flexmarl.client.policies import export_policy

pytest.importorskip("peft", reason="adapters need peft, of the extra 'trainer'")

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
    pytest.mark.real,
]

LORA = {"rank": 2, "alpha": 8, "targets": ["q_proj", "up_proj"]}


async def test_only_the_adapter_is_trained_swapped_and_saved_and_merged_weights_are_published(
    cluster: Cluster, tiny_model: Path
) -> None:
    adapted = {"lora": LORA, "optimizer": {"lr": 0.05}}
    run = await cluster.make_run(
        {"adapted": adapted, "plain": {}}, dict.fromkeys(("adapted", "plain"), tiny_model)
    )
    await run.first_commit("adapted", "plain")
    assert run.manifest is not None
    first = run.manifest.policies["adapted"]
    base = await run.tensors(first.weights)
    plain = await run.tensors(run.manifest.policies["plain"].weights)
    assert {name: w.shape for name, w in base.items()} == {n: w.shape for n, w in plain.items()}

    records = [
        await run.micro_batch("adapted", make_rows(5, seed=seed), batch=0) for seed in (1, 2)
    ]
    ids = [record.micro_batch_id for record in records]
    await run.bind("adapted", ["slot0"])
    await run.compute(records[0])
    state = (await run.suspend("adapted")).state
    assert all(".lora_" in name for name in await run.tensors(state.gradients))
    await run.bind("plain", ["slot0"])  # takes the adapter's place in the worker's memory
    await run.suspend("plain")
    await run.bind("adapted", ["slot1", "slot0"])
    await run.compute(records[1])
    state = (await run.apply("adapted", 0, ids)).state
    await run.suspend("adapted")
    await run.commit(state)

    adapter, merged = await run.tensors(state.master), await run.tensors(state.weights)
    assert state.master.size_bytes < state.weights.size_bytes / 3
    for name, weight in base.items():
        layer = name.removesuffix(".weight")
        expected = weight
        if layer.rpartition(".")[2] in LORA["targets"]:
            low, high = (adapter[f"{layer}.lora_{part}.default.weight"] for part in "AB")
            expected = weight + 4.0 * high @ low
            assert not np.array_equal(merged[name], weight), name
        assert np.allclose(merged[name], expected, rtol=1e-5, atol=1e-6), name


async def test_an_export_has_the_adapter_as_peft_loads_it(
    cluster: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = shutil.copytree(tiny_model, tmp_path / "base")
    first = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    first.save_pretrained(folder)
    adapted = {
        "lora": LORA,
        "optimizer": {"lr": 0.05},
        "model": {"path": str(folder), "init": "pretrained"},
    }
    run = await cluster.make_run({"p": adapted}, {"p": folder})
    await run.first_commit("p")
    record = await run.micro_batch("p", make_rows(5), batch=0)
    await run.bind("p", ["slot1", "slot0"])  # each rank writes its rows of the adapter
    await run.compute(record)
    await run.commit((await run.apply("p", 0, [record.micro_batch_id])).state)
    await run.suspend("p")

    out = tmp_path / "out"
    await export_policy(cluster.store, run.run_id, "p", out=out, cache_dir=tmp_path / "cache")

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=torch.arange(6)[None]).logits

    def loaded(folder: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)

    base, merged = loaded(folder), loaded(out)
    plain = logits(base)
    over = logits(PeftModel.from_pretrained(base, out / "adapter"))
    assert torch.allclose(over, logits(merged), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(over, plain, rtol=1e-3, atol=1e-3)

"""No name, link or folder that somebody prepared leads what is exported anywhere else."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from meg_store.store_harness import RUN, a_run, serving
from safetensors import safe_open

from flexmarl.api.meg_store.v1 import graph_pb2 as graph
from flexmarl.client.buffers import Buffer, BufferSpec
from flexmarl.client.bundle import folder_hash
from flexmarl.client.checkpoints import write_checkpoint
from flexmarl.client.errors import FlexMarlError
from flexmarl.client.export import write_hf_folder
from flexmarl.client.policies import export_policy
from flexmarl.client.tensor_files import TensorBytes
from flexmarl.client.trajectories import export_trajectories
from flexmarl.core.checkpoints import CheckpointRule
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ids import check_name
from flexmarl.runtime.config import ConfigError, load_config
from flexmarl.runtime.run_config import RunConfig

TENSORS = [TensorBytes("w", "F32", (4,), memoryview(bytes(16)))]
LEADS_OUT = ["..", "../evil", "../../evil", "/tmp/evil", "a/../../evil", "a/evil", "evil\0", ""]
QUICKSTART = Path(__file__).parents[2] / "examples/quickstart/config.toml"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder of somebody else's, with a file in it."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "mine").write_text("keep")
    return folder


def content(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in below(folder) if p.is_file()}


def below(folder: Path) -> list[Path]:
    return list(folder.rglob("*"))


async def prepared(store, base: Path) -> Callable[[str], Awaitable[None]]:
    """Make a run with weights; returns what commits them under a policy's name."""
    model = graph.ModelRef(path=str(base), content_hash=folder_hash(base))
    await store.create_run(a_run(models={"p": model}))
    term = await store.acquire_term(RUN, "orchestrator", holder="test")
    data = Buffer(BufferSpec("w", "F32", (4,)), memoryview(bytes(16)))
    weights = await store.set(RUN, "w0", [data])

    async def commit(policy: str) -> None:
        policies = {policy: graph.PolicyManifest(weights=weights)}
        manifest = graph.Manifest(version=0, term=term, policies=policies)
        await store.commit(RUN, manifest, expected_version=None)

    return commit


async def test_names_that_lead_out_are_refused_wherever_they_come_from(
    base: Path, tmp_path: Path
) -> None:
    cache, out = tmp_path / "cache", tmp_path / "out/inner/folder"
    rule = CheckpointRule(every=1, keep=1)
    async with serving(tmp_path / "store", backend="memory") as (store, _):
        commit = await prepared(store, base)
        for name in LEADS_OUT:
            with pytest.raises(FlexMarlError) as refused:
                await commit(name)
            assert refused.value.reason is ErrorReason.INVALID_ARGUMENT
            with pytest.raises(ValueError, match="policy"):
                await write_checkpoint(
                    store, RUN, 0, policies=[name], folder=out, cache_dir=cache, rule=rule
                )
        await commit("p")
        for name in LEADS_OUT:
            for run_id, policy in ((name, "p"), (RUN, name)):
                with pytest.raises((DomainError, FlexMarlError)):
                    await export_policy(store, run_id, policy, out=out, cache_dir=cache)
            with pytest.raises((DomainError, FlexMarlError)):
                await export_trajectories(
                    store, name, out=out, format_="jsonl", decode=lambda *_: ""
                )
        assert content(tmp_path / "out") == {}
        assert not [path for path in below(tmp_path) if "evil" in path.name]
        assert await export_policy(store, RUN, "p", out=out, cache_dir=cache) == 0


@pytest.mark.parametrize("name", LEADS_OUT)
def test_a_stored_run_names_no_policy_or_agent_that_leads_out(name: str) -> None:
    stored = load_config(RunConfig, path=QUICKSTART).model_dump(mode="json")
    for table, one in (("policies", "policy"), ("agents", "agent")):
        changed = json.loads(json.dumps(stored))
        changed[table][name] = changed[table]["merger"]
        with pytest.raises(ConfigError, match=rf"{one} .*use letters|^{table}: .*NUL"):
            load_config(RunConfig, stored_json=json.dumps(changed).encode())


@pytest.mark.parametrize("name", LEADS_OUT)
def test_no_name_of_ours_is_a_path(name: str) -> None:
    with pytest.raises(ValueError, match="use letters, digits"):
        check_name(name, what="run id")


@pytest.mark.parametrize("there", [True, False], ids=["link", "link-to-nowhere"])
def test_a_link_in_the_place_of_the_folder_is_not_followed(
    base: Path, elsewhere: Path, tmp_path: Path, there: bool
) -> None:
    out, target = tmp_path / "out", elsewhere if there else tmp_path / "nowhere"
    out.symlink_to(target)
    with pytest.raises(DomainError, match="exists already"):
        write_hf_folder(TENSORS, base_model=base, out=out)
    assert out.is_symlink()
    # Told to replace, it replaces the link, not what is behind it.
    write_hf_folder(TENSORS, base_model=base, out=out, replace=True)
    assert not out.is_symlink()
    with safe_open(out / "model.safetensors", "np") as file:
        assert list(file.keys()) == ["w"]
    assert content(elsewhere) == {"mine": "keep"}
    assert not (tmp_path / "nowhere").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "elsewhere", "out"]


async def test_a_link_in_the_place_of_tables_is_not_followed(
    elsewhere: Path, tmp_path: Path
) -> None:
    for target in (elsewhere, tmp_path / "nowhere"):
        out = tmp_path / f"to-{target.name}"
        out.symlink_to(target)
        async with serving(tmp_path / "store", backend="memory") as (store, _):
            await store.create_run(a_run())
            with pytest.raises(DomainError, match="exists already"):
                await export_trajectories(
                    store, RUN, out=out, format_="jsonl", decode=lambda *_: ""
                )
    assert content(elsewhere) == {"mine": "keep"}
    assert not (tmp_path / "nowhere").exists()

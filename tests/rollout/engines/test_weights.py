"""Weights are taken over whole, checked first, or not at all."""

import pytest
import torch
from rollout.engines.engine_kit import (
    drain,
    make_engine,
    make_model_folder,
    reference_logprobs,
    reference_model,
    request,
    write_segment,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def old(folder):
    return reference_model(folder, seed=1)


@pytest.fixture
def engine(folder, old, tmp_path):
    engine = make_engine(folder)
    engine.load(write_segment(tmp_path / "old", old, version=0))
    return engine


def serves(engine, model, *, version: int) -> bool:
    engine.submit([request("probe", [1, 2, 3], version=version, seed=version)])
    result = drain(engine)["probe"]
    assert not result.HasField("failure"), result
    expected = reference_logprobs(model, [1, 2, 3], list(result.tokens))
    return list(result.logprobs) == pytest.approx(expected, abs=1e-5)


def test_new_weights_are_served_under_their_version_and_hash(engine, folder, old, tmp_path):
    new = reference_model(folder, seed=2)
    load = write_segment(tmp_path / "new", new, version=1)
    loaded = engine.load(load)
    assert (loaded.load_id, loaded.version) == ("load1", 1)
    assert loaded.weights_hash == load.weights_hash
    assert serves(engine, new, version=1) and not serves(engine, old, version=1)


def test_other_content_than_named_keeps_the_old_weights(engine, folder, old, tmp_path):
    load = write_segment(tmp_path / "new", reference_model(folder, seed=2), version=1)
    with (tmp_path / "new").open("r+b") as file:
        file.seek(100)
        file.write(b"\x77")
    loaded = engine.load(load)
    assert loaded.failure.reason == "CHECKSUM_MISMATCH" and loaded.version == 0
    assert serves(engine, old, version=0)


def _drop(load):
    del load.buffers[3]


def _rename(load):
    load.buffers[3].name = "model.layers.9.strange"


@pytest.mark.parametrize("damage", [_drop, _rename])
def test_other_names_than_the_models_keep_the_old_weights(
    engine, folder, old, tmp_path, damage, monkeypatch
):
    load = write_segment(tmp_path / "new", reference_model(folder, seed=2), version=1)
    damage(load)
    monkeypatch.setattr(
        "flexmarl.rollout.engines.segment.content_hash", lambda _: load.weights_hash
    )
    loaded = engine.load(load)
    assert loaded.failure.reason == "WEIGHTS_MISMATCH"
    assert serves(engine, old, version=0)


def test_another_shape_is_named(engine, folder, old, tmp_path):
    other = make_model_folder(tmp_path / "other", vocab_size=30)
    load = write_segment(tmp_path / "new", reference_model(other), version=1)
    loaded = engine.load(load)
    assert loaded.failure.reason == "WEIGHTS_MISMATCH"
    assert "[30, 32]" in loaded.failure.message and "[24, 32]" in loaded.failure.message
    assert serves(engine, old, version=0)


def test_another_dtype_is_named(engine, folder, old, tmp_path):
    new = reference_model(folder, seed=2, dtype=torch.bfloat16)
    loaded = engine.load(write_segment(tmp_path / "new", new, version=1))
    assert loaded.failure.reason == "WEIGHTS_MISMATCH" and "BF16" in loaded.failure.message


def test_a_segment_that_is_not_there_is_named(engine, folder, old, tmp_path):
    load = write_segment(tmp_path / "new", reference_model(folder, seed=2), version=1)
    (tmp_path / "new").unlink()
    assert engine.load(load).failure.reason == "SEGMENT_NOT_FOUND"
    assert serves(engine, old, version=0)


def test_the_same_content_only_moves_the_version(engine, folder, old, tmp_path):
    load = write_segment(tmp_path / "same", old, version=1)
    (tmp_path / "same").unlink()  # it is not even opened
    engine.submit([request("running", [1, 2], max_tokens=8)])
    engine.step()
    loaded = engine.load(load)
    assert not loaded.HasField("failure") and loaded.version == 1
    # What runs goes on, under the version that it was sent under (C1, C2).
    result = drain(engine)["running"]
    assert (len(result.tokens), result.version) == (8, 0)
    assert [(run.version, run.num_tokens) for run in result.version_runs] == [(0, 8)]
    assert serves(engine, old, version=1)


def test_other_weights_cut_what_runs(engine, folder, tmp_path):
    engine.submit([request(f"a{i}", [1, 2], max_tokens=20) for i in range(20)])
    engine.step()
    new = reference_model(folder, seed=2)
    engine.load(write_segment(tmp_path / "new", new, version=1))
    results = drain(engine)
    assert len(results) == 20
    assert all(
        r.failure.reason == "WEIGHTS_MISMATCH" and r.infrastructure for r in results.values()
    )
    assert serves(engine, new, version=1)


@pytest.mark.parametrize("tied_twice", [False, True])
def test_tied_parameters_come_once_or_equal(tmp_path, tied_twice):
    folder = make_model_folder(tmp_path / "tied", tied=True)
    model = reference_model(folder)
    engine = make_engine(folder)
    load = write_segment(tmp_path / "w", model, version=0, tied_twice=tied_twice)
    assert sum(b.name == "lm_head.weight" for b in load.buffers) == tied_twice
    assert not engine.load(load).HasField("failure")
    assert serves(engine, model, version=0)


def test_tied_parameters_that_differ_are_refused(tmp_path):
    folder = make_model_folder(tmp_path / "tied", tied=True)
    untied = reference_model(make_model_folder(tmp_path / "untied"))
    loaded = make_engine(folder).load(write_segment(tmp_path / "w", untied, version=0))
    assert loaded.failure.reason == "WEIGHTS_MISMATCH" and "tied" in loaded.failure.message

"""The embedded engine against plain full forward passes of the same model."""

import random

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

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.sampling import uniform
from flexmarl.rollout.engines.draw import draw, row_sampling


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder):
    return reference_model(folder)


@pytest.fixture
def engine(folder, model, tmp_path):
    engine = make_engine(folder)
    loaded = engine.load(write_segment(tmp_path / "w0", model, version=0))
    assert not loaded.HasField("failure"), loaded
    return engine


def random_requests(n: int, *, seed: int = 1):
    rng = random.Random(seed)
    return [
        request(
            f"a{i}",
            [rng.randrange(24) for _ in range(rng.randint(1, 20))],
            max_tokens=rng.randint(1, 15),
            seed=rng.getrandbits(63),
            temperature=rng.choice([0.7, 1.0, 1.3]),
            stop=(5,),
        )
        for i in range(n)
    ]


def run_staggered(engine, requests, *, seed: int):
    """Submit in small random pieces, so that requests join while others decode."""
    rng, waiting, results = random.Random(seed), list(requests), {}
    while waiting or engine.due_in_s is not None:
        count = rng.randint(0, 4)
        engine.submit(waiting[:count])
        del waiting[:count]
        results.update((result.attempt_id, result) for result in engine.step())
    return results


def test_logprobs_equal_a_plain_full_pass_whatever_the_batch(engine, model):
    requests = random_requests(60)
    results = run_staggered(engine, requests, seed=3)
    assert len(results) == 60
    reasons = set()
    for asked in requests:
        result = results[asked.attempt_id]
        assert not result.HasField("failure")
        tokens, reasons = list(result.tokens), reasons | {result.finish_reason}
        expected = reference_logprobs(
            model, list(asked.prompt_tokens), tokens, asked.sampling.temperature
        )
        assert list(result.logprobs) == pytest.approx(expected, abs=1e-5)
        assert [(run.version, run.num_tokens) for run in result.version_runs] == [(0, len(tokens))]
        if result.finish_reason == "stop":
            assert tokens[-1] == 5 and 5 not in tokens[:-1]
        else:
            assert len(tokens) == asked.sampling.max_tokens and 5 not in tokens
    assert reasons == {"stop", "length"}


def test_tokens_are_the_counter_based_draws_of_the_plain_pass(engine, model):
    prompt, seed = [1, 2, 3, 4], 77
    engine.submit([request("a", prompt, max_tokens=8, seed=seed)])
    tokens = list(drain(engine)["a"].tokens)
    for t in range(8):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + tokens[:t]])).logits[:, -1]
        row = row_sampling(temperature=1.0, top_k=0, top_p=1.0)
        assert draw(logits, [row], [uniform(seed, t)]).tokens == [tokens[t]]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_draws_do_not_depend_on_the_batch(folder, tmp_path, dtype):
    model = reference_model(folder, dtype=getattr(torch, dtype))
    load = write_segment(tmp_path / "w", model, version=0)
    requests = random_requests(40, seed=9)
    outcomes = []
    for concurrency, order_seed in ((16, 1), (3, 2), (1, 3)):
        engine = make_engine(folder, dtype=dtype, max_concurrency=concurrency)
        engine.load(load)
        shuffled = requests[:]
        random.Random(order_seed).shuffle(shuffled)
        results = run_staggered(engine, shuffled[:4], seed=order_seed)
        for start in range(4, 40, 4 * concurrency):
            engine.submit(shuffled[start : start + 4 * concurrency])
            results |= drain(engine)
        outcomes.append({name: list(result.tokens) for name, result in results.items()})
    assert len(outcomes[0]) == 40
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_greedy_is_the_argmax_of_the_plain_pass(engine, model):
    engine.submit([request("a", [3, 1], max_tokens=10, temperature=0.0)])
    tokens = list(drain(engine)["a"].tokens)
    made: list[int] = []
    for _ in range(10):
        with torch.no_grad():
            made.append(int(model(input_ids=torch.tensor([[3, 1, *made]])).logits[0, -1].argmax()))
    assert tokens == made


def test_no_request_runs_before_weights_of_a_named_version(folder):
    engine = make_engine(folder)
    engine.submit([request("a", [1, 2])])
    result = drain(engine)["a"]
    assert result.failure.reason == "WEIGHTS_MISMATCH" and result.infrastructure
    assert not result.tokens


def test_another_version_than_served_is_refused(engine):
    engine.submit([request("old", [1, 2], version=3), request("right", [1, 2])])
    results = drain(engine)
    assert results["old"].failure.reason == "WEIGHTS_MISMATCH" and results["old"].infrastructure
    assert len(results["right"].tokens) == 6


def test_prompts_and_responses_keep_to_the_context(folder, model, tmp_path):
    engine = make_engine(folder, max_context=10)
    engine.load(write_segment(tmp_path / "w0", model, version=0))
    assert engine.ready().max_context == 10
    engine.submit([request("long", [1] * 10), request("tight", [1] * 8, max_tokens=9)])
    results = drain(engine)
    assert results["long"].failure.reason == "PROMPT_TOO_LONG"
    assert not results["long"].infrastructure
    assert (len(results["tight"].tokens), results["tight"].finish_reason) == (2, "length")


@pytest.mark.parametrize(
    "bad",
    [
        request("bad", []),
        request("bad", [24]),
        request("bad", [1], max_tokens=0),
        request("bad", [1], temperature=-1.0),
    ],
)
def test_malformed_requests_are_refused_as_the_requests_fault(engine, bad):
    engine.submit([bad])
    result = drain(engine)["bad"]
    assert result.failure.reason == "INVALID_ARGUMENT" and not result.infrastructure


def test_abort_keeps_what_was_drawn_and_disturbs_nobody(engine, model):
    requests = [request(f"a{i}", [i + 1, 2], max_tokens=12, seed=i) for i in range(6)]
    engine.submit(requests)
    for _ in range(4):
        engine.step()
    engine.abort(["a0", "a3", "unknown"])
    results = drain(engine)
    assert len(results) == 6
    for i in range(6):
        result = results[f"a{i}"]
        tokens = list(result.tokens)
        assert result.finish_reason == ("abort" if i in (0, 3) else "length")
        assert len(tokens) == (5 if i in (0, 3) else 12)
        expected = reference_logprobs(model, [i + 1, 2], tokens)
        assert list(result.logprobs) == pytest.approx(expected, abs=1e-5)


def test_what_waits_for_a_slot_can_be_aborted(folder, model, tmp_path):
    engine = make_engine(folder, max_concurrency=1)
    engine.load(write_segment(tmp_path / "w0", model, version=0))
    engine.submit([request("first", [1], max_tokens=4), request("second", [2])])
    engine.step()
    engine.abort(["second"])
    results = drain(engine)
    assert results["second"].finish_reason == "abort" and not results["second"].tokens
    assert len(results["first"].tokens) == 4


def test_more_than_may_wait_is_pushed_back(folder, model, tmp_path):
    engine = make_engine(folder, max_concurrency=2)
    engine.load(write_segment(tmp_path / "w0", model, version=0))
    engine.submit([request(f"a{i}", [1, 2], max_tokens=2) for i in range(12)])
    results = drain(engine)
    refused = [r for r in results.values() if r.HasField("failure")]
    assert len(results) == 12 and len(refused) == 4
    assert all(r.failure.reason == "QUEUE_FULL" and r.infrastructure for r in refused)


def test_a_small_cache_serves_everything_a_few_at_a_time(folder, model, tmp_path):
    engine = make_engine(folder, kv_cache_bytes=1)
    engine.load(write_segment(tmp_path / "w0", model, version=0))
    requests = random_requests(8, seed=4)
    engine.submit(requests)
    results = drain(engine)
    for asked in requests:
        result = results[asked.attempt_id]
        expected = reference_logprobs(
            model, list(asked.prompt_tokens), list(result.tokens), asked.sampling.temperature
        )
        assert list(result.logprobs) == pytest.approx(expected, abs=1e-5)


def test_bfloat16_serves_its_own_weights(folder, tmp_path):
    model = reference_model(folder, dtype=torch.bfloat16)
    engine = make_engine(folder, dtype="bfloat16")
    assert not engine.load(write_segment(tmp_path / "w", model, version=0)).HasField("failure")
    engine.submit([request("a", [1, 2, 3])])
    result = drain(engine)["a"]
    expected = reference_logprobs(model, [1, 2, 3], list(result.tokens))
    assert list(result.logprobs) == pytest.approx(expected, abs=0.2)


def test_weights_that_are_not_finite_fail_the_request_and_not_the_next_weights(
    folder, engine, model, tmp_path
):
    broken = reference_model(folder, seed=5)
    with torch.no_grad():
        broken.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    engine.load(write_segment(tmp_path / "w1", broken, version=1))
    engine.submit([request("a", [1, 2], version=1)])
    result = drain(engine)["a"]
    assert result.failure.reason == "NON_FINITE" and not result.infrastructure
    engine.load(write_segment(tmp_path / "w2", model, version=2))
    engine.submit([request("b", [1, 2], version=2), request("c", [1] * 9, version=2)])
    results = drain(engine)
    assert list(results["b"].logprobs) == pytest.approx(
        reference_logprobs(model, [1, 2], list(results["b"].tokens)), abs=1e-5
    )


def test_an_attempt_that_goes_on_from_kept_tokens_draws_what_it_would_have_drawn(tmp_path):
    # A move changes no token: neither where it happens nor how often.
    folder = make_model_folder(tmp_path / "model")
    load = write_segment(tmp_path / "w", reference_model(folder, dtype=torch.float64), version=0)
    engine = make_engine(folder, dtype="float64")
    assert not engine.load(load).HasField("failure")
    prompt, seed = [1, 2, 3], 77
    engine.submit([request("whole", prompt, max_tokens=20, seed=seed)])
    whole = drain(engine)["whole"]
    assert len(whole.tokens) == 20
    for num_kept in (1, 7, 19):
        kept = list(whole.tokens[:num_kept])
        rest = request("rest", prompt + kept, max_tokens=20 - num_kept, seed=seed)
        rest.num_kept = num_kept
        engine.submit([rest])
        result = drain(engine)["rest"]
        assert kept + list(result.tokens) == list(whole.tokens)
        assert list(result.logprobs) == pytest.approx(list(whole.logprobs)[num_kept:], abs=1e-9)
        assert result.finish_reason == whole.finish_reason


def test_an_aborted_attempt_gives_back_what_it_has_drawn(tmp_path):
    folder = make_model_folder(tmp_path / "model")
    engine = make_engine(folder)
    engine.load(write_segment(tmp_path / "w", reference_model(folder), version=0))
    engine.submit([request("a", [1, 2], max_tokens=30, seed=5)])
    for _ in range(4):
        assert engine.step() == []
    engine.abort(["a"])
    (result,) = engine.step()
    assert (result.finish_reason, len(result.tokens), len(result.logprobs)) == ("abort", 5, 5)
    assert not result.HasField("failure")


@pytest.mark.parametrize(
    "config",
    [
        "null",
        '{"model_type": "llama", "hidden_size": "32"}',
        '{"model_type": "llama", "hidden_act": "none"}',
        '{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}',
    ],
)
def test_a_folder_that_is_no_model_is_named_and_its_code_is_not_run(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')")
    with pytest.raises(DomainError, match=str(tmp_path)) as caught:
        make_engine(tmp_path)
    assert caught.value.reason is ErrorReason.MODEL_INVALID
    assert not (tmp_path / "was-run").exists()

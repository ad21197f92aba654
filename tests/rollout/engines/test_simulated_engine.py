"""The latency model of the simulated engine, on a clock that the test moves."""

from __future__ import annotations

import json
import math

import pytest
from rollout.engines.engine_kit import make_engine, request

from flexmarl.api.rollout.v1.engine_pb2 import (
    EngineLoad,
    EngineOptions,
    SimulatedOptions,
    SimulatedPolicy,
)
from flexmarl.core.errors import DomainError
from flexmarl.rollout.engines.admission import Admission
from flexmarl.rollout.engines.simulated_engine import SimulatedEngine


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


def make(clock: Clock, *, max_concurrency: int = 2, time_scale: float = 0.5) -> SimulatedEngine:
    options = SimulatedOptions(
        time_scale=time_scale,
        prefill_tokens_per_s=100,
        policies={
            "p": SimulatedPolicy(decode_tokens_per_s=10, load_s=4, move_s=6),
            "q": SimulatedPolicy(decode_tokens_per_s=20, load_s=8, move_s=12),
        },
    )
    engine = SimulatedEngine(
        options,
        admission=Admission(max_context=1000, vocab_size=50, max_waiting=8),
        max_concurrency=max_concurrency,
        clock=clock,
        sleep=clock.sleep,
    )
    engine.load(load(0, "h0"))
    return engine


def load(version: int, weights_hash: str, policy: str = "p") -> EngineLoad:
    return EngineLoad(load_id="l", policy=policy, version=version, weights_hash=weights_hash)


def ask(name: str, *, prompt: int = 50, output: int = 20, tool_s: float = 0.0, **more):
    asked = request(name, [1] * prompt, max_tokens=400, **more)
    asked.sampling.simulated.output_tokens = output
    asked.sampling.simulated.tool_ms = int(tool_s * 1e3)
    return asked


def ends(engine: SimulatedEngine, clock: Clock) -> dict[str, float]:
    """Time of each end, the engine woken whenever it is due."""
    found: dict[str, float] = {}
    while (due_in_s := engine.due_in_s) is not None:
        clock.now += due_in_s + 1e-9
        found.update({result.attempt_id: clock.now - 100 for result in engine.step()})
    return found


def test_a_request_takes_tool_prefill_and_decode_time(clock):
    engine = make(clock)
    start = clock.now - 100
    engine.submit([ask("a", prompt=50, output=20, tool_s=1.5)])
    # (1.5 + 50/100 + 20/10) emulated seconds, each half a second of wall time
    assert ends(engine, clock) == {"a": pytest.approx(start + 2.0)}


def test_slots_are_held_whatever_else_runs_and_the_rest_waits_in_order(clock):
    engine = make(clock, max_concurrency=2)
    start = clock.now - 100
    engine.submit([ask("a", output=20), ask("b", output=40), ask("c", output=20)])
    assert ends(engine, clock) == {
        "a": pytest.approx(start + 1.25),
        "b": pytest.approx(start + 2.25),
        "c": pytest.approx(start + 2.5),
    }


def test_lengths_are_the_calls_own_and_the_limit_cuts_them(clock):
    engine = make(clock)
    engine.submit([ask("a", output=7, seed=5), ask("b", output=900), ask("c", output=0)])
    results = {}
    while (due_in_s := engine.due_in_s) is not None:
        clock.now += due_in_s + 1e-9
        results.update({result.attempt_id: result for result in engine.step()})
    assert (len(results["a"].tokens), results["a"].finish_reason) == (7, "stop")
    assert (len(results["b"].tokens), results["b"].finish_reason) == (400, "length")
    assert (len(results["c"].tokens), results["c"].finish_reason) == (400, "length")
    assert set(results["a"].logprobs) == {-math.log(50)}
    assert max(results["b"].tokens) < 50


def test_an_aborted_request_has_the_tokens_of_its_time_and_the_same_as_undisturbed(clock):
    engine = make(clock)
    engine.submit([ask("whole", output=20, seed=3), ask("cut", output=20, seed=3)])
    clock.now += 0.5 * (0.5 + 1.25)  # prefill, then 12.5 tokens
    engine.abort(["cut"])
    (cut,) = engine.step()
    assert cut.finish_reason == "abort" and len(cut.tokens) == 12
    clock.now += 10
    (whole,) = engine.step()
    assert list(whole.tokens[:12]) == list(cut.tokens)


def test_loads_and_moves_take_their_time_and_a_label_takes_none(clock):
    engine = make(clock)
    assert clock.now == pytest.approx(102)
    engine.load(load(1, "h1"))
    assert clock.now == pytest.approx(104)
    engine.load(load(2, "h1"))
    assert clock.now == pytest.approx(104)
    engine.load(load(2, "hq", "q"))
    assert clock.now == pytest.approx(110)
    engine.submit([ask("a", output=20, version=2)])
    assert ends(engine, clock) == {"a": pytest.approx(10 + 0.5 * (0.5 + 1.0))}


def test_a_policy_without_times_is_refused_and_the_old_one_served(clock):
    engine = make(clock)
    refused = engine.load(load(1, "h1", "stranger"))
    assert refused.failure.reason == "WEIGHTS_MISMATCH"
    assert (refused.version, refused.weights_hash) == (0, "h0")
    engine.submit([ask("a")])
    assert "a" in ends(engine, clock)


def test_the_vocabulary_is_the_model_folders(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"vocab_size": 31, "max_position_embeddings": 77})
    )
    model = SimulatedOptions(time_scale=1, prefill_tokens_per_s=1)
    options = EngineOptions(simulated=model).SerializeToString().hex()
    ready = make_engine(tmp_path, engine="simulated", options=options).ready()
    assert (ready.vocab_size, ready.max_context) == (31, 77)


def test_without_a_latency_model_it_does_not_start(tmp_path):
    with pytest.raises(DomainError, match=r"rollout\.simulated"):
        make_engine(tmp_path, engine="simulated")

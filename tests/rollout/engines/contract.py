"""What every engine must do, as a class of tests that each engine's subject runs through.

A subject builds the engine and makes weights for it. The suite drives the engine as its process
does, by `submit`, `abort`, `load` and `step`, and knows nothing else of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

import pytest
from rollout.engines.engine_kit import request

from flexmarl.api.rollout.v1.engine_pb2 import EngineLoad, EngineLoaded, GenerateResult
from flexmarl.rollout.engines.base import Engine


class Subject(Protocol):
    """An engine under test.

    Attributes:
        engine: Without weights.
        instant: Whether it answers at submission: nothing ever runs that could be cut.
        checks_content: Whether it refuses weights whose bytes are not what their hash says.
        repeats_draws: Whether the same seed draws the same tokens.
    """

    engine: Engine
    instant: bool
    checks_content: bool
    repeats_draws: bool

    def weights(self, version: int, *, content: int = 0, broken: bool = False) -> EngineLoad: ...

    def hold(self) -> None:
        """Has responses grow to 10 tokens and no further, where they grow while nobody looks."""
        ...


def collect(engine: Engine, names: Iterable[str], *, timeout_s: float = 30.0):
    """Drive the engine until these attempts have ended; each ends once."""
    wanted, results = set(names), {}
    deadline = time.monotonic() + timeout_s
    while wanted - results.keys():
        assert time.monotonic() < deadline, f"no result of {sorted(wanted - results.keys())}"
        due_in_s = engine.due_in_s
        time.sleep(min(0.005 if due_in_s is None else due_in_s, 0.005))
        for result in engine.step():
            assert result.attempt_id not in results, "an attempt ended twice"
            results[result.attempt_id] = result
    return results


def serve(subject: Subject, version: int = 0, *, content: int = 0) -> EngineLoaded:
    loaded = subject.engine.load(subject.weights(version, content=content))
    assert not loaded.HasField("failure"), loaded
    return loaded


def check_whole(result: GenerateResult, *, version: int, weights_hash: str) -> None:
    """D1: as many log-probs as tokens; C1: every token has a version, the pinned one."""
    assert not result.HasField("failure"), result
    assert len(result.logprobs) == len(result.tokens)
    assert all(logprob <= 0 for logprob in result.logprobs)
    assert sum(run.num_tokens for run in result.version_runs) == len(result.tokens)
    assert {run.version for run in result.version_runs} <= {version}
    assert (result.version, result.weights_hash) == (version, weights_hash)
    assert result.started_unix_ns <= result.finished_unix_ns


class EngineContract:
    """Subclasses define the fixture `subject`."""

    def test_it_says_what_it_is(self, subject):
        ready = subject.engine.ready()
        assert ready.max_context >= 64 and ready.vocab_size >= 24
        assert not ready.HasField("failure")

    def test_nothing_runs_before_weights_of_a_named_version(self, subject):
        subject.engine.submit([request("a", [1, 2])])
        result = collect(subject.engine, ["a"])["a"]
        assert result.failure.reason == "WEIGHTS_MISMATCH" and result.infrastructure
        assert not result.tokens

    def test_responses_carry_their_version_content_and_log_probs(self, subject):
        loaded = serve(subject, 3)
        assert loaded.version == 3
        names = [f"a{i}" for i in range(5)]
        subject.engine.submit(
            [request(n, [1, 2 + i], version=3, seed=i) for i, n in enumerate(names)]
        )
        results = collect(subject.engine, names)
        for name in names:
            check_whole(results[name], version=3, weights_hash=loaded.weights_hash)
            assert len(results[name].tokens) == 6 and results[name].finish_reason == "length"

    def test_another_version_than_served_is_refused(self, subject):
        serve(subject, 1)
        subject.engine.submit([request("old", [1, 2]), request("right", [1, 2], version=1)])
        results = collect(subject.engine, ["old", "right"])
        assert results["old"].failure.reason == "WEIGHTS_MISMATCH" and results["old"].infrastructure
        assert len(results["right"].tokens) == 6

    @pytest.mark.parametrize(
        ("asked", "reason"),
        [
            (request("bad", []), "INVALID_ARGUMENT"),
            (request("bad", [1 << 31]), "INVALID_ARGUMENT"),
            (request("bad", [1], max_tokens=0), "INVALID_ARGUMENT"),
            (request("bad", [1], temperature=-1.0), "INVALID_ARGUMENT"),
            (request("bad", [1] * 64), "PROMPT_TOO_LONG"),
            (request("bad", [1], min_p=1.0), "INVALID_ARGUMENT"),
        ],
        ids=["empty", "no token", "no room", "temperature", "long", "min-p"],
    )
    def test_malformed_requests_are_refused_as_the_requests_fault(self, subject, asked, reason):
        serve(subject)
        subject.engine.submit([asked])
        result = collect(subject.engine, ["bad"])["bad"]
        assert result.failure.reason == reason and not result.infrastructure

    def test_the_context_ends_a_response(self, subject):
        serve(subject)
        subject.engine.submit([request("tight", [1] * 60, max_tokens=30)])
        result = collect(subject.engine, ["tight"])["tight"]
        assert (len(result.tokens), result.finish_reason) == (4, "length")

    def test_an_aborted_attempt_ends_with_what_it_has(self, subject):
        loaded = serve(subject)
        subject.hold()
        subject.engine.submit([request("long", [1], max_tokens=60), request("short", [2])])
        subject.engine.abort(["long", "unknown"])
        results = collect(subject.engine, ["long", "short"])
        check_whole(results["long"], version=0, weights_hash=loaded.weights_hash)
        if not subject.instant:
            assert results["long"].finish_reason == "abort"
            assert len(results["long"].tokens) < 60
        assert len(results["short"].tokens) == 6

    def test_a_label_alone_disturbs_nothing_and_relabels_nothing(self, subject):
        """C2: a new label aborts nothing. C1: what was sent under the old one keeps it."""
        loaded = serve(subject, 0)
        subject.engine.submit([request("before", [1], max_tokens=40)])
        same = EngineLoad(load_id="l", policy="p", version=1, weights_hash=loaded.weights_hash)
        moved = subject.engine.load(same)
        assert (moved.version, moved.weights_hash) == (1, loaded.weights_hash)
        subject.engine.submit([request("after", [1], version=1)])
        results = collect(subject.engine, ["before", "after"])
        check_whole(results["before"], version=0, weights_hash=loaded.weights_hash)
        assert len(results["before"].tokens) == 40
        check_whole(results["after"], version=1, weights_hash=loaded.weights_hash)

    def test_other_weights_cut_what_runs(self, subject):
        """I4: nothing goes on under weights that it was not sent under."""
        serve(subject, 0)
        other = subject.weights(1, content=1)  # made before: it may take longer than the request
        subject.engine.submit([request("cut", [1], max_tokens=60)])
        loaded = subject.engine.load(other)
        assert not loaded.HasField("failure"), loaded
        subject.engine.submit([request("new", [1], version=1)])
        results = collect(subject.engine, ["cut", "new"])
        if not subject.instant:
            assert results["cut"].failure.reason == "WEIGHTS_MISMATCH"
            assert results["cut"].infrastructure and not results["cut"].tokens
        check_whole(results["new"], version=1, weights_hash=loaded.weights_hash)

    def test_a_refused_load_keeps_what_was_served(self, subject):
        if not subject.checks_content:
            pytest.skip("reads no content")
        loaded = serve(subject, 0)
        refused = subject.engine.load(subject.weights(1, content=1, broken=True))
        assert refused.failure.reason == "CHECKSUM_MISMATCH"
        assert (refused.version, refused.weights_hash) == (0, loaded.weights_hash)
        subject.engine.submit([request("a", [1, 2])])
        result = collect(subject.engine, ["a"])["a"]
        check_whole(result, version=0, weights_hash=loaded.weights_hash)

    def test_a_repeated_attempt_draws_the_same_tokens(self, subject):
        if not subject.repeats_draws:
            pytest.skip("draws from a generator of its own")
        serve(subject)
        subject.engine.submit(
            [request("a#1", [1, 2], seed=9), request("a#2", [1, 2], seed=9), request("b", [1, 2])]
        )
        results = collect(subject.engine, ["a#1", "a#2", "b"])
        assert list(results["a#1"].tokens) == list(results["a#2"].tokens)
        assert list(results["a#1"].tokens) != list(results["b"].tokens)

    def test_it_can_be_asked_for_a_sign_of_life(self, subject):
        serve(subject)
        subject.engine.submit([request("a", [1], max_tokens=20)])
        subject.engine.check()
        assert len(collect(subject.engine, ["a"])["a"].tokens) == 20

    def test_more_than_there_are_slots_all_end(self, subject):
        serve(subject)
        names = [f"a{i}" for i in range(12)]
        subject.engine.submit([request(n, [1, 2], max_tokens=3, seed=1) for n in names])
        results = collect(subject.engine, names)
        assert all(len(results[name].tokens) == 3 for name in names)

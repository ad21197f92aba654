"""The engines whose tokens a server makes, on a server that computes nothing."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rollout.engines.completion_server import CompletionServer
from rollout.engines.contract import EngineContract, collect, serve
from rollout.engines.engine_kit import (
    make_engine,
    make_model_folder,
    reference_model,
    request,
    write_segment,
)
from tokenizers import Tokenizer, models, pre_tokenizers

from flexmarl.api.rollout.v1.engine_pb2 import EngineLoad, EngineOptions, StructuredOutput
from flexmarl.core.errors import DomainError
from flexmarl.core.weights_probe import probe_prompt
from flexmarl.rollout.engines.admission import Admission
from flexmarl.rollout.engines.base import EngineBrokenError
from flexmarl.rollout.engines.http_json import HttpServer
from flexmarl.rollout.engines.remote_engine import RemoteEngine
from flexmarl.rollout.engines.vllm_engine import VllmBackend
from flexmarl.rollout.engines.vllm_process import new_socket_path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_model_folder(tmp_path_factory.mktemp("model"))
    letters = {chr(97 + i): i for i in range(24)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@dataclass
class Subject:
    engine: RemoteEngine
    server: CompletionServer
    folder: object
    scratch: object
    checks_content: bool
    woken: threading.Event = field(default_factory=threading.Event)
    instant: bool = False
    repeats_draws: bool = True

    def weights(self, version: int, *, content: int = 0, broken: bool = False) -> EngineLoad:
        path = self.scratch / f"w{version}.{content}"
        load = write_segment(path, reference_model(self.folder, seed=content), version=version)
        if broken:
            data = bytearray(path.read_bytes())
            data[17] ^= 1
            path.write_bytes(data)
        return load

    def hold(self) -> None:
        self.server.most_tokens = 10


def vllm_subject(folder, scratch) -> Subject:
    server = CompletionServer(scratch / "s")
    backend = VllmBackend(HttpServer(server.base), vocab_size=24, dtype="float32", seeded=True)
    backend.prepare()
    woken = threading.Event()
    engine = RemoteEngine(
        backend,
        admission=Admission(max_context=64, vocab_size=24, max_waiting=16),
        max_concurrency=4,
        wake=woken.set,
    )
    return Subject(engine, server, folder, scratch, checks_content=True, woken=woken)


class TestVllm(EngineContract):
    @pytest.fixture
    def subject(self, folder, tmp_path):
        subject = vllm_subject(folder, tmp_path)
        yield subject
        subject.server.close()


class TestExternal(EngineContract):
    @pytest.fixture(params=[True, False], ids=["token ids", "text"])
    def subject(self, request, folder, tmp_path):
        server = CompletionServer(own_weights=True, ids=request.param)
        options = EngineOptions()
        options.external.url, options.external.model = server.base, "m"
        engine = make_engine(
            folder,
            engine="external",
            max_context=64,
            max_concurrency=4,
            options=options.SerializeToString().hex(),
        )
        yield Subject(engine, server, folder, tmp_path, checks_content=False)
        server.close()


@pytest.fixture
def vllm(folder, tmp_path):
    subject = vllm_subject(folder, tmp_path)
    yield subject
    subject.server.close()


def test_other_weights_go_through_the_four_phases_and_caches_are_reset(vllm):
    serve(vllm, 1, content=1)
    calls = vllm.server.calls
    for path in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
        assert calls[path] == 1
    assert calls["/init_weight_transfer_engine"] == calls["/reset_prefix_cache"] == 1
    assert calls["/pause?mode=abort"] == calls["/resume"] == 1


def test_a_label_alone_calls_nothing_that_could_touch_requests(vllm):
    loaded = serve(vllm, 1)
    before = vllm.server.calls.copy()
    vllm.engine.load(EngineLoad(load_id="l", version=2, weights_hash=loaded.weights_hash))
    assert vllm.server.calls - before == {"/update_weight_version": 1}
    assert vllm.server.label == f"2/{loaded.weights_hash}"


def test_requests_are_salted_by_the_weights_they_run_under(vllm):
    hashes = []
    for version in (1, 2):
        hashes.append(serve(vllm, version, content=version).weights_hash)
        vllm.engine.submit([request(f"a{version}", [1, 2], version=version, seed=7)])
        collect(vllm.engine, [f"a{version}"])
    salts = [body["cache_salt"] for body in vllm.server.bodies if "request_id" in body]
    assert salts == hashes and len(set(hashes)) == 2


def test_a_server_that_computes_as_before_is_not_served(vllm):
    """F1: it said that it took the weights, and serves the ones it started with."""
    vllm.server.stuck = True
    with pytest.raises(EngineBrokenError, match="random weights"):
        vllm.engine.load(vllm.weights(0))


def test_weights_that_answer_otherwise_than_the_trainer_said_are_not_served(vllm):
    load = vllm.weights(0)
    load.probe_logprobs.extend([-1.0] * (len(probe_prompt(24)) - 1))
    with pytest.raises(EngineBrokenError, match="other weights than it was given"):
        vllm.engine.load(load)


def test_a_load_that_fails_half_way_ends_the_engine(vllm):
    serve(vllm, 0)
    vllm.server.fail_with = 500
    with pytest.raises(EngineBrokenError, match="version 1"):
        vllm.engine.load(vllm.weights(1, content=1))


def test_keep_freezes_and_resume_goes_on(vllm):
    serve(vllm, 0)
    backend = VllmBackend(HttpServer(vllm.server.base), vocab_size=24, dtype="float32", seeded=True)
    vllm.server.most_tokens = 5
    vllm.engine.submit([request("a", [1], max_tokens=40)])
    end = time.monotonic() + 20
    while 5 not in vllm.server.drawn.values():  # in the middle of it
        assert time.monotonic() < end
        time.sleep(0.005)
    backend.pause(mode="keep")
    vllm.server.most_tokens = 40
    time.sleep(0.2)
    assert not vllm.engine.step()
    backend.resume()
    assert len(collect(vllm.engine, ["a"])["a"].tokens) == 40


def test_results_wake_the_engines_loop(vllm):
    serve(vllm, 0)
    vllm.engine.submit([request("a", [1])])
    assert vllm.woken.wait(10)
    assert vllm.engine.due_in_s == 0.0


def test_refusals_of_the_server_are_the_requests_fault_and_its_absence_is_not(vllm):
    serve(vllm, 0)
    vllm.engine._admission = Admission(max_context=64, vocab_size=99, max_waiting=9)
    vllm.engine.submit([request("bad", [50])])
    bad = collect(vllm.engine, ["bad"])["bad"]
    assert bad.failure.reason == "INVALID_ARGUMENT" and not bad.infrastructure
    vllm.server.close()
    vllm.engine.submit([request("lost", [1])])
    lost = collect(vllm.engine, ["lost"])["lost"]
    assert lost.failure.reason == "UNAVAILABLE" and lost.infrastructure


@pytest.mark.parametrize(
    ("field", "value"), [("json_schema", "true"), ("regex", "\u00e4"), ("choices", ["\u00e4"])]
)
def test_a_form_on_which_vllm_fails_is_the_requests_fault_and_is_named(vllm, field, value):
    serve(vllm, 0)
    vllm.engine._admission = Admission(
        max_context=64, vocab_size=24, max_waiting=9, knows_text=True
    )
    plain, formed = request("plain", [1]), request("formed", [1])
    formed.sampling.structured.MergeFrom(StructuredOutput(**{field: value}))
    for answer, fault in (
        (500, True),
        (503, False),
        ((500, {"error": {"message": "EngineCore encountered an issue. See"}}), False),
    ):
        vllm.server.says = answer
        vllm.engine.submit([plain, formed])
        results = collect(vllm.engine, ["plain", "formed"])
        assert results["plain"].infrastructure
        failure = results["formed"].failure
        assert results["formed"].infrastructure != fault
        assert failure.reason == ("INVALID_ARGUMENT" if fault else "UNAVAILABLE")
        assert (f"structured.{field}" in failure.message) == fault


def said(*tokens: float, logprobs: list[object] | None = None) -> dict:
    logprobs = [-1.0] * len(tokens) if logprobs is None else logprobs
    choice = {"token_ids": tokens, "logprobs": {"token_logprobs": logprobs}}
    return {"choices": [choice | {"text": "a", "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    "answer",
    [
        [], {}, {"choices": None}, {"choices": []}, {"choices": [None]}, {"choices": ["x"]},
        {"choices": [{}]}, said(-1), said(24), said(float("inf")), said(1 << 40),
        said(1, 2, logprobs=[-1.0]), said(1, logprobs=[]), said(1, logprobs=["x"]),
        said(1, logprobs=[None]), said(1, 2, 3, 4, 5),
    ],
)  # fmt: skip
def test_whatever_a_server_says_ends_the_attempt_for_another_try(vllm, answer):
    serve(vllm, 0)
    vllm.server.says = answer
    vllm.engine.submit([request("a", [1], max_tokens=4)])
    result = collect(vllm.engine, ["a"])["a"]
    assert (result.failure.reason, result.infrastructure) == ("UNAVAILABLE", True)
    vllm.server.says = None
    vllm.engine.submit([request("b", [1], max_tokens=4)])
    assert len(collect(vllm.engine, ["b"])["b"].tokens) == 4


def test_an_external_server_needs_the_key_that_the_config_names(folder):
    options = EngineOptions()
    options.external.url, options.external.model = "http://localhost:1", "m"
    options.external.api_key_variable = "FLEXMARL_TEST_NO_SUCH_KEY"
    with pytest.raises(DomainError, match="FLEXMARL_TEST_NO_SUCH_KEY"):
        make_engine(folder, engine="external", options=options.SerializeToString().hex())


def test_folders_of_killed_servers_are_removed_and_living_ones_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, alive, young = (Path(new_socket_path()) for _ in range(3))
    server = CompletionServer(alive)
    for path in (dead, alive):
        os.utime(path.parent, (0, 0))
    new_socket_path()
    assert (dead.parent.exists(), alive.parent.exists(), young.parent.exists()) == (
        False, True, True,
    )  # fmt: skip
    server.close()


def test_rules_of_a_call_reach_the_server_in_its_words(vllm):
    serve(vllm, 0)
    asked = request("a", [1, 2], top_k=5, min_p=0.1, stop=(3,))
    asked.sampling.stop.append("x")
    asked.sampling.structured.regex = "a+"
    vllm.engine._admission = Admission(
        max_context=64, vocab_size=24, max_waiting=9, knows_text=True
    )
    vllm.engine.submit([asked])
    collect(vllm.engine, ["a"])
    body = vllm.server.bodies[-1]
    assert (body["top_k"], body["min_p"], body["stop_token_ids"]) == (5, 0.1, [3])
    assert (body["stop"], body["structured_outputs"]) == (["x"], {"regex": "a+"})


def test_rules_about_texts_are_refused_by_an_engine_that_knows_tokens_only(vllm):
    serve(vllm, 0)
    asked = request("a", [1, 2])
    asked.sampling.stop.append("x")
    vllm.engine.submit([asked])
    result = collect(vllm.engine, ["a"])["a"]
    assert result.failure.reason == "INVALID_ARGUMENT" and not result.infrastructure

"""The vLLM engine on a real vLLM server: the contract suite, and equality with Hugging Face."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from rollout.engines.contract import EngineContract, collect, serve
from rollout.engines.engine_kit import (
    reference_logprobs,
    reference_model,
    request,
    write_segment,
)
from rollout.vllm.vllm_kit import PYTHON, make_vllm_folder, needs_vllm

from flexmarl.api.rollout.v1.engine_pb2 import EngineLoad, VllmOptions
from flexmarl.core.weights_probe import probe_prompt
from flexmarl.rollout.engines.admission import Admission
from flexmarl.rollout.engines.base import EngineBrokenError, EngineSettings
from flexmarl.rollout.engines.remote_engine import RemoteEngine
from flexmarl.rollout.engines.vllm_engine import VllmBackend
from flexmarl.rollout.engines.vllm_process import VllmProcess, command_line, new_socket_path

pytestmark = [pytest.mark.real, pytest.mark.timeout(600), needs_vllm]

MAX_CONTEXT = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Its head is its embeddings, under one name: what packs weights must pack both."""
    return make_vllm_folder(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module")
def backend(folder):
    settings = EngineSettings(
        engine="vllm",
        instance_id="i0",
        model_path=str(folder),
        dtype="float32",
        max_context=MAX_CONTEXT,
        max_concurrency=4,
        kv_cache_bytes=64 << 20,
        vllm_python=PYTHON,
    )
    socket = new_socket_path()
    command = command_line(settings, VllmOptions(enforce_eager=True), socket=socket)
    process = VllmProcess(command, socket=socket, on_exit=lambda code: None)
    try:
        process.wait_ready()
        backend = VllmBackend(process.server, vocab_size=24, dtype="float32", seeded=True)
        backend.prepare()
        yield backend
    finally:
        process.close()


@dataclass
class Subject:
    engine: RemoteEngine
    folder: Path
    scratch: Path
    instant: bool = False
    checks_content: bool = True
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
        """Nothing: sixty steps of a server take longer than to ask it for an end."""


@pytest.fixture
def subject(backend, folder, tmp_path):
    engine = RemoteEngine(
        backend,
        admission=Admission(
            max_context=MAX_CONTEXT, vocab_size=24, max_waiting=64, knows_text=True
        ),
        max_concurrency=4,
        wake=lambda: None,
    )
    return Subject(engine, folder, tmp_path)


class TestVllm(EngineContract):
    """One server for all: each test has an engine in front of it that has loaded nothing."""


def check_against_reference(subject: Subject, results, asked, *, content: int) -> None:
    model = reference_model(subject.folder, seed=content)
    for wanted in asked:
        result = results[wanted.attempt_id]
        assert not result.HasField("failure"), result
        expected = reference_logprobs(
            model, list(wanted.prompt_tokens), list(result.tokens), wanted.sampling.temperature
        )
        assert list(result.logprobs) == pytest.approx(expected, abs=2e-5)


def some_requests(version: int) -> list:
    return [
        request(
            f"v{version}.{i}", [1 + i, 2, 3 + i], version=version, max_tokens=20, seed=i,
            temperature=(0.7, 1.0, 1.3)[i % 3], stop=(5,),
        )
        for i in range(12)
    ]  # fmt: skip


def test_log_probs_equal_hugging_face_at_every_version(subject):
    reasons = set()
    for version, content in ((1, 11), (2, 12), (3, 11)):
        serve(subject, version, content=content)
        asked = some_requests(version)
        subject.engine.submit(asked)
        results = collect(subject.engine, [r.attempt_id for r in asked])
        check_against_reference(subject, results, asked, content=content)
        for result in results.values():
            reasons.add(result.finish_reason)
            if result.finish_reason == "stop":  # D5: the sampled end token keeps its log-prob
                assert result.tokens[-1] == 5 and 5 not in result.tokens[:-1]
    assert reasons == {"stop", "length"}


def test_the_probe_is_what_hugging_face_computes_with_the_weights(subject):
    prompt = probe_prompt(24)
    for content, said, served in ((11, 11, True), (12, 11, False), (12, 12, True)):
        model = reference_model(subject.folder, seed=said)
        load = subject.weights(1 + content, content=content)
        load.probe_logprobs.extend(reference_logprobs(model, prompt[:1], prompt[1:], 1.0))
        if served:
            assert not subject.engine.load(load).HasField("failure")
        else:
            with pytest.raises(EngineBrokenError, match="other weights than it was given"):
                subject.engine.load(load)


def test_a_repeated_prompt_is_not_answered_from_the_cache_of_other_weights(subject):
    """C8: the same long prompt over several updates; what was cached belongs to older weights."""
    prompt = [(3 * i) % 24 for i in range(50)]
    for version in range(1, 5):
        serve(subject, version, content=20 + version)
        asked = [request(f"c{version}.{i}", prompt, version=version, seed=i) for i in range(3)]
        for one in asked:  # one after the other: the second finds the first one's cache
            subject.engine.submit([one])
            results = collect(subject.engine, [one.attempt_id])
            check_against_reference(subject, results, [one], content=20 + version)


def test_responses_keep_to_a_form_and_end_at_a_text(subject):
    """With a form or a stop text the server looks at the text; tokens and log-probs stay whole."""
    serve(subject, 1, content=41)
    formed = request("formed", [1, 2], version=1, max_tokens=20)
    formed.sampling.structured.regex = "[ab]{5}"
    formed.sampling.stop_token_ids.append(23)
    stopped = request("stopped", [1, 2], version=1, max_tokens=60)
    stopped.sampling.stop.extend(["c", "d", "e", "f"])
    subject.engine.submit([formed, stopped])
    results = collect(subject.engine, ["formed", "stopped"])
    tokens = list(results["formed"].tokens)
    assert set(tokens[:5]) <= {0, 1} and tokens[5:] in ([], [23])
    last = results["stopped"]
    assert last.finish_reason == "stop" and last.tokens[-1] in (2, 3, 4, 5)
    assert not set(last.tokens[:-1]) & {2, 3, 4, 5}
    for result in results.values():
        assert len(result.logprobs) == len(result.tokens)


def test_a_form_that_no_token_can_write_fails_its_request_alone_and_by_name(subject):
    serve(subject, 1, content=42)
    formed, plain = (request(name, [1, 2], version=1, max_tokens=8) for name in ("formed", "plain"))
    formed.sampling.structured.choices.extend(["ABBA", "ACDC"])  # its tokens are small letters
    subject.engine.submit([formed, plain])
    results = collect(subject.engine, ["formed", "plain"])
    refused = results["formed"]
    assert refused.failure.reason == "INVALID_ARGUMENT" and not refused.infrastructure
    assert "structured.choices" in refused.failure.message
    assert len(results["plain"].tokens) == 8


def test_keep_freezes_what_runs_and_resume_goes_on_with_the_same_tokens(subject, backend):
    serve(subject, 1, content=31)
    greedy = request("plain", [1, 2], version=1, max_tokens=60, temperature=0.0)
    subject.engine.submit([greedy])
    plain = collect(subject.engine, ["plain"])["plain"]
    for number in range(20):  # until one has not ended before it is paused
        greedy.attempt_id = f"paused-{number}"
        subject.engine.submit([greedy])
        time.sleep(0.02)
        backend.pause(mode="keep")
        time.sleep(0.5)
        ended = subject.engine.step()
        backend.resume()
        if not ended:
            break
    assert not ended, "each ended before it was paused: make them longer"
    paused = collect(subject.engine, [greedy.attempt_id])[greedy.attempt_id]
    assert list(paused.tokens) == list(plain.tokens) and len(plain.tokens) == 60

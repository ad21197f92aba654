"""Every engine that needs nothing else runs through the one contract suite."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from rollout.engines.contract import EngineContract
from rollout.engines.engine_kit import (
    make_engine,
    make_model_folder,
    reference_model,
    write_segment,
)

from flexmarl.api.rollout.v1.engine_pb2 import (
    EngineLoad,
    SimulatedOptions,
    SimulatedPolicy,
)
from flexmarl.rollout.engines.admission import Admission
from flexmarl.rollout.engines.base import Engine
from flexmarl.rollout.engines.simulated_engine import SimulatedEngine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


@dataclass
class WithoutModel:
    """Weights are a name only."""

    engine: Engine
    instant: bool
    checks_content: bool = False
    repeats_draws: bool = True

    def weights(self, version: int, *, content: int = 0, broken: bool = False) -> EngineLoad:
        return EngineLoad(
            load_id=f"l{version}", policy="p", version=version, weights_hash=f"content{content}"
        )

    def hold(self) -> None:
        pass  # nothing runs, or time passes by looks alone


class LooksClock:
    """Time that passes only while somebody looks: a little at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.002
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class TestInstant(EngineContract):
    @pytest.fixture
    def subject(self, folder):
        return WithoutModel(make_engine(folder, engine="instant", max_context=64), instant=True)


class TestSimulated(EngineContract):
    @pytest.fixture
    def subject(self, folder):
        # Slow enough that what shall be cut has not ended by itself.
        times = SimulatedPolicy(decode_tokens_per_s=200)
        model = SimulatedOptions(time_scale=1, prefill_tokens_per_s=1e6, policies={"p": times})
        clock = LooksClock()
        engine = SimulatedEngine(
            model, admission=Admission(max_context=64, vocab_size=24, max_waiting=16),
            max_concurrency=4, clock=clock, sleep=clock.sleep,
        )  # fmt: skip
        return WithoutModel(engine, instant=False)


class TestTransformers(EngineContract):
    @pytest.fixture
    def subject(self, folder, tmp_path):
        engine = make_engine(folder, max_context=64, max_concurrency=4)
        return WithModel(engine, folder, tmp_path)


@dataclass
class WithModel:
    """Weights are a segment of a real model."""

    engine: Engine
    folder: object
    scratch: object
    instant: bool = False
    checks_content: bool = True
    repeats_draws: bool = True

    def weights(self, version: int, *, content: int = 0, broken: bool = False) -> EngineLoad:
        model = reference_model(self.folder, seed=content)
        path = self.scratch / f"w{version}.{content}"
        load = write_segment(path, model, version=version)
        if broken:
            data = bytearray(path.read_bytes())
            data[17] ^= 1
            path.write_bytes(data)
        return load

    def hold(self) -> None:
        pass  # a token is made by a step

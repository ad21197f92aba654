"""What `state_path` comes to, by the kind of device."""

from __future__ import annotations

from typing import Any

import pytest

from flexmarl.core.state_paths import StatePath
from flexmarl.trainer.config import SimulatedConfig, TrainerConfig

SIMULATED = SimulatedConfig.model_validate({"policies": {"p": {"params_b": 1, "tokens_per_s": 1}}})


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({}, StatePath.SEGMENTS),
        ({"device": "cuda"}, StatePath.DEVICE),
        ({"state_path": "device"}, StatePath.DEVICE),
        ({"device": "cuda", "state_path": "segments"}, StatePath.SEGMENTS),
        ({"device": "simulated", "state_path": "device"}, StatePath.SEGMENTS),
    ],
)
def test_state_path(settings: dict[str, Any], path: StatePath) -> None:
    config = TrainerConfig.model_validate({"simulated": SIMULATED, **settings})
    assert config.state_paths().choose().path is path

from __future__ import annotations

import pytest

from flexmarl.core.training_alarms import training_alarms


@pytest.mark.parametrize(
    ("metrics", "names"),
    [
        ({}, []),
        ({"ratio": 1.02, "logprob_outside": 0.08, "weights_unchanged": 0.0}, []),
        ({"logprob_outside": 0.6}, ["ratio"]),
        ({"ratio": 2.5}, ["ratio"]),
        ({"ratio": 0.1}, ["ratio"]),
        ({"non_finite": 2.0}, ["non_finite"]),
        ({"weights_unchanged": 1.0, "grad_norm": 0.3}, ["weights_unchanged"]),
        ({"weights_unchanged": 1.0, "grad_norm": 0.0}, []),  # nothing was to be learnt
    ],
)
def test_alarms(metrics: dict[str, float], names: list[str]) -> None:
    alarms = list(training_alarms(metrics))
    assert [alarm.name for alarm in alarms] == names
    assert all(alarm.text for alarm in alarms)

from __future__ import annotations

import pytest

from flexmarl.core.state_paths import GIB, MIN_BYTES, StatePath, StatePaths


@pytest.mark.parametrize(
    ("device", "path"), [("cpu", StatePath.SEGMENTS), ("cuda", StatePath.DEVICE)]
)
def test_before_anything_is_measured_the_kind_of_device_decides(
    device: str, path: StatePath
) -> None:
    assert StatePaths(device=device).choose().path is path


@pytest.mark.parametrize("forced", list(StatePath))
def test_a_config_forces_a_path_whatever_is_measured(forced: StatePath) -> None:
    for device in ("cpu", "cuda"):
        paths = StatePaths(device=device, forced=forced)
        for path in StatePath:
            paths.loaded({path: GIB}, seconds=0.001 if path is not forced else 100.0)
        choice = paths.choose()
        assert (choice.path, choice.reason) == (forced, "the config says so")


def test_what_was_measured_decides_over_what_was_expected() -> None:
    paths = StatePaths(device="cuda")
    paths.loaded({StatePath.DEVICE: GIB}, seconds=0.5)  # links that are none: 2 GiB/s
    choice = paths.choose()
    assert choice.path is StatePath.SEGMENTS
    assert choice.reason == "segments 8.00 GiB/s, device 2.00 GiB/s"
    paths.loaded({StatePath.SEGMENTS: GIB}, seconds=1.0)
    assert paths.choose().path is StatePath.DEVICE


def test_what_was_read_beside_counts_for_the_path_that_was_chosen() -> None:
    paths = StatePaths(device="cpu")
    mixed = {StatePath.DEVICE: 3 * GIB, StatePath.SEGMENTS: GIB, "kept": 9 * GIB}
    paths.loaded(mixed, seconds=2.0)
    choice = paths.choose()
    assert choice.path is StatePath.DEVICE
    assert choice.reason == "segments 1.00 GiB/s, device 2.00 GiB/s"


def test_the_newest_measurement_weighs_three_tenths() -> None:
    paths = StatePaths(device="cpu")
    paths.loaded({StatePath.DEVICE: GIB}, seconds=1.0)
    paths.loaded({StatePath.DEVICE: 2 * GIB}, seconds=1.0)
    assert "device 1.30 GiB/s" in paths.choose().reason


@pytest.mark.parametrize(("num_bytes", "seconds"), [(MIN_BYTES - 1, 1e-6), (GIB, 0.0)])
def test_small_or_timeless_moves_say_nothing(num_bytes: int, seconds: float) -> None:
    paths = StatePaths(device="cpu")
    paths.loaded({StatePath.DEVICE: num_bytes}, seconds=seconds)
    assert paths.choose().path is StatePath.SEGMENTS

"""Profiles and measurements from strangers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from caffepy.errors import ConfigError
from caffepy.scaling.model import MAX_SAMPLES, Measurements, fit_link, read_measurements
from caffepy.scaling.profile import FORMAT, read_profile

PROFILE = {
    "format": FORMAT,
    "net": "n",
    "device": "CPU",
    "on_cpu": True,
    "batch": 1,
    "passes": 1,
    "iteration_ms": 1.0,
    "update_ms": 0.1,
    "reduce_buckets": 1,
    "layer_wise_reduce": True,
    "layers": [],
    "gradients": [],
}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "cannot be read as a profile: (maximum recursion depth|Stack overflow)"),
        ("9" * 5000, "cannot be read as a profile: Exceeds the limit"),
        (json.dumps(PROFILE | {"batch": 10**400}), "batch: is an integer beyond 2.128, must be a int of at least 1"),
        (json.dumps(PROFILE | {"iteration_ms": 1e300}), "iteration_ms: is 1e.300, must be a float .* at most 1e.15"),
        ("\0", "cannot be read as a profile"),
    ],
)
def test_profiles_that_are_too_much(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_profile(tmp_path / "p.json")


def test_a_profile_that_is_a_device() -> None:
    with pytest.raises(ConfigError, match="it is a device, not a regular file"):
        read_profile(Path("/dev/zero"))


def test_measurements_that_are_a_device() -> None:
    with pytest.raises(ConfigError, match="it is a device, not a regular file"):
        read_measurements(Path("/dev/zero"))


def test_more_sizes_than_can_be_divided_into_ranges_in_time() -> None:
    samples = tuple((float(size), 1e-6 * size) for size in range(1, MAX_SAMPLES + 2))
    with pytest.raises(ConfigError, match="all-reduces of 101 sizes are too many to fit lines to; keep 100"):
        fit_link(Measurements(2, samples), "auto")

"""Profiles: what they add up to, and files that hold one or something else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from caffepy.errors import ConfigError, RunError
from caffepy.scaling.profile import Gradient, LayerProfile, Profile, read_profile, write_profile

PROFILE = Profile(
    net="small",
    device="NVIDIA H200",
    on_cpu=False,
    batch=64,
    passes=2,
    iteration_ms=100.0,
    update_ms=5.0,
    reduce_buckets=6,
    layer_wise_reduce=True,
    layers=(LayerProfile("conv", 10.0, 20.0), LayerProfile("ip", 5.0, 8.0)),
    gradients=(Gradient(1, 2048), Gradient(1, 256), Gradient(0, 1024)),
)


def test_sums():
    assert (PROFILE.forward_ms, PROFILE.backward_ms, PROFILE.gradient_bytes) == (15, 28, 3328)
    assert PROFILE.other_ms == 100 - 5 - 2 * 43
    assert PROFILE.fitted() is PROFILE


def test_layers_that_took_longer_one_by_one_are_scaled_to_the_iteration():
    """As on a GPU, where each layer by itself pays for its launches."""
    fitted = replace(PROFILE, iteration_ms=48.0).fitted()
    assert fitted.other_ms == pytest.approx(0)
    assert [layer.backward_ms for layer in fitted.layers] == pytest.approx([10, 4])
    none = replace(PROFILE, iteration_ms=3.0).fitted()  # not even the update fits
    assert none.update_ms == 3 and none.forward_ms == none.backward_ms == 0


def test_what_is_written_is_read(tmp_path: Path):
    write_profile(tmp_path / "p.json", PROFILE)
    assert read_profile(tmp_path / "p.json") == PROFILE


def test_a_file_that_cannot_be_written(tmp_path: Path):
    with pytest.raises(RunError, match="absent/p.json: cannot be written: No such file"):
        write_profile(tmp_path / "absent" / "p.json", PROFILE)


def changed(path: Path, keys: list[Any], value: Any) -> None:
    """Write a good profile with one value exchanged; None removes it."""
    write_profile(path, PROFILE)
    content = json.loads(path.read_text())
    place = content
    for key in keys[:-1]:
        place = place[key]
    if value is None:
        del place[keys[-1]]
    else:
        place[keys[-1]] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "keys, value, message",
    [
        (["format"], "caffepy profile 9", "is not a 'caffepy profile 1'"),
        (["batch"], 0, r"p.json.batch: is 0, must be a int of at least 1"),
        (["batch"], True, "batch: is True, must be a int"),
        (["batch"], 2.5, "batch: is 2.5, must be a int"),
        (["update_ms"], None, "field 'update_ms' is missing"),
        (["surplus"], 1, "field 'surplus' is unknown"),
        (["iteration_ms"], float("nan"), "iteration_ms: is nan, must be a float of at least 0"),
        (["iteration_ms"], float("inf"), "iteration_ms: is inf"),
        (["on_cpu"], 1, "on_cpu: is 1, must be a bool"),
        (["net"], 7, "net: is 7, must be a str"),
        (["layers"], {}, "layers: must be a list"),
        (["layers"], [], r"gradients\[0\].layer: is 1, must be below the number of layers, 0"),
        (["layers", 0], 3, r"layers\[0\]: must be an object, not 3"),
        (["layers", 1, "forward_ms"], -1, r"layers\[1\].forward_ms: is -1, must be a float of at least 0"),
        (["gradients", 2, "layer"], 2, r"gradients\[2\].layer: is 2, must be at most 1, the one before it"),
        (["gradients", 0, "bytes"], "many", r"gradients\[0\].bytes: is 'many', must be a int"),
    ],
)
def test_files_that_make_no_sense(tmp_path: Path, keys: list[Any], value: Any, message: str):
    changed(tmp_path / "p.json", keys, value)
    with pytest.raises(ConfigError, match=message):
        read_profile(tmp_path / "p.json")


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match="absent.json: cannot be read as a profile: .*No such file"):
        read_profile(tmp_path / "absent.json")

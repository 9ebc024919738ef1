"""Fillers: distributions, fans, and that numbers depend on the key alone."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.backend import RandomStream
from caffepy.errors import ConfigError, DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.fillers import FILLERS, fill

SHAPE = (40, 20, 5, 5)


def run(text, shape=SHAPE, seed=1, stream=2):
    filler = text_format.Parse(text, caffe_pb2.FillerParameter())
    values = fill(filler, shape, RandomStream(seed, stream), "layer 'conv1'")
    assert values.dtype == np.float32
    assert values.shape == shape
    return values


def test_constant():
    assert (run("") == 0).all()
    assert (run("value: 0.5") == 0.5).all()


def test_uniform():
    values = run("type: 'uniform' min: -1 max: 3")
    assert values.min() >= -1
    assert values.max() < 3
    assert abs(values.mean() - 1) < 0.05
    assert abs(values.var() - 16 / 12) < 0.05


def test_gaussian():
    values = run("type: 'gaussian' mean: 2 std: 0.5")
    assert abs(values.mean() - 2) < 0.02
    assert abs(values.std() - 0.5) < 0.02


def test_sparse_keeps_that_many_inputs_an_output_on_average():
    values = run("type: 'gaussian' sparse: 10", (100, 200))
    assert abs((values != 0).mean() - 0.1) < 0.01


def test_positive_unitball():
    values = run("type: 'positive_unitball'").reshape(SHAPE[0], -1)
    assert values.min() >= 0
    assert np.allclose(values.sum(1), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "norm", "n"),
    [
        (SHAPE, "FAN_IN", 500),
        (SHAPE, "FAN_OUT", 1000),
        (SHAPE, "AVERAGE", 750),
        ((50, 400), "FAN_IN", 400),
        ((50, 400), "FAN_OUT", 50),
        ((9000,), "FAN_IN", 1),
        ((9000,), "FAN_OUT", 9000),
    ],
)
def test_fans(shape, norm, n):
    xavier = run(f"type: 'xavier' variance_norm: {norm}", shape)
    bound = math.sqrt(3 / n)
    assert 0.98 * bound < np.abs(xavier).max() <= bound * 1.0001
    msra = run(f"type: 'msra' variance_norm: {norm}", shape)
    assert abs(msra.std() / math.sqrt(2 / n) - 1) < 0.05


def test_bilinear_upsamples_by_two():
    values = run("type: 'bilinear'", (3, 1, 4, 4))
    line = np.array([0.25, 0.75, 0.75, 0.25])
    assert np.allclose(values, np.outer(line, line))


def test_diagonal():
    values = run("type: 'diagonal' diag_val: 2 diag_val: -4", (3, 4, 2, 2))
    wanted = np.zeros((3, 4))
    wanted[[0, 1, 2], [0, 1, 2]] = [0.5, -1, 0.25]
    assert np.array_equal(values, np.broadcast_to(wanted[..., None, None], values.shape))


def test_file(tmp_path: Path):
    path = tmp_path / "values.txt"
    path.write_text("1 2.5\n-3e-1 4")
    assert np.array_equal(run(f"type: 'file' file: '{path}'", (3, 1)), np.array([[1], [2.5], [-0.3]], np.float32))
    for text, words in ((f"'{path}'", "has 4 numbers, but 6 are needed"), ("'/nowhere/x'", "cannot be read")):
        with pytest.raises(DataError, match=words):
            run(f"type: 'file' file: {text}", (6,))
    with pytest.raises(ConfigError, match="needs file"):
        run("type: 'file'", (2,))


def test_numbers_depend_on_seed_and_stream_alone():
    first = run("type: 'gaussian'")
    assert np.array_equal(first, run("type: 'gaussian'"))
    assert not np.array_equal(first, run("type: 'gaussian'", seed=2))
    assert not np.array_equal(first, run("type: 'gaussian'", stream=3))
    assert run("type: 'gaussian'", seed=2**64 - 1).any()


@pytest.mark.parametrize("name", list(FILLERS))
def test_empty_and_scalar_parameters(name):
    assert run(f"type: '{name}'", (0, 3)).size == 0
    if name not in ("bilinear", "diagonal", "file"):
        assert np.isfinite(run(f"type: '{name}'", ())).all()


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ("type: 'xaiver'", SHAPE, "layer 'conv1': unknown filler 'xaiver'; did you mean 'xavier'?"),
        ("type: 'xavier' sparse: 3", SHAPE, "filler 'xavier' does not support sparse"),
        ("type: 'gaussian' sparse: 30", (20, 5), "sparse 30; it must be from 0 to the 20 outputs"),
        ("type: 'gaussian' std: -1", SHAPE, "negative std, -1"),
        ("type: 'uniform' min: 1 max: 0", SHAPE, "min 1 above max 0"),
        ("type: 'bilinear'", (3, 1, 4, 5), "square kernel"),
        ("type: 'bilinear'", (3, 4), "four axes"),
        ("type: 'diagonal'", (3,), "two axes or more"),
    ],
)
def test_refusals(text, shape, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        run(text, shape)

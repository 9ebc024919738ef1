"""`caffepy.load(..., engine="onnxruntime")`: the exported net instead of our kernels."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import caffepy
from caffepy.errors import ConfigError, RunError
from caffepy.infer import onnx_engine as engine
from caffepy.utils.installation import MissingExtraError

NET = """
name: "small"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: "c" type: "Convolution" bottom: "data" top: "c"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "n" type: "BatchNorm" bottom: "c" top: "c" }
layer { name: "r" type: "ReLU" bottom: "c" top: "c" }
layer { name: "pool" type: "Pooling" bottom: "c" top: "pool" pooling_param { pool: AVE global_pooling: true } }
layer { name: "prob" type: "Softmax" bottom: "pool" top: "prob" }
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "net.prototxt").write_text(NET)
    return tmp_path / "net.prototxt"


def images(shape: tuple[int, ...] = (2, 3, 8, 8)) -> Any:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def own(model: caffepy.Model, data: Any) -> Any:
    """What the net as written gives."""
    model.net.blobs["data"].reshape(data.shape)
    model.net.blobs["data"].data[...] = data
    model.net.forward()
    return model.net.blobs["prob"].host_data()


def test_gives_our_numbers_and_says_so(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = caffepy.load(path, engine="onnxruntime", threads=1)
    with caplog.at_level(logging.INFO, "caffepy.infer.onnx_engine"):
        found = model(images())
    np.testing.assert_allclose(found["prob"], own(model, images()), rtol=1e-5, atol=1e-6)
    assert "Net 'small' is computed by onnxruntime; output 'prob': largest difference" in caplog.text
    caplog.clear()
    model(images())
    assert not caplog.records  # compared once


def test_an_input_that_no_layer_reads_stays_an_output(path: Path) -> None:
    path.write_text(NET + 'layer { name: "i" type: "Input" top: "info" input_param { shape { dim: 1 dim: 3 } } }')
    by_runtime, by_us = (caffepy.load(path, engine=name, threads=1) for name in ("onnxruntime", "own"))
    given = {"data": images(), "info": images((1, 3))}
    found, wanted = by_runtime(**given), by_us(**given)
    assert set(found) == set(wanted) == {"prob", "info"}
    np.testing.assert_array_equal(found["info"], given["info"])


def test_other_shapes_have_sessions_of_their_own(path: Path) -> None:
    model = caffepy.load(path, engine="onnxruntime", threads=1)
    for shape in ((2, 3, 8, 8), (1, 3, 8, 8), (3, 3, 12, 10)):
        np.testing.assert_allclose(model(images(shape))["prob"], own(model, images(shape)), rtol=1e-5, atol=1e-6)
    assert len(model._runtime_nets) == 3
    model.close()
    assert not model._runtime_nets


def test_changed_parameters_are_taken_over(path: Path) -> None:
    model = caffepy.load(path, engine="onnxruntime", threads=1)
    before = model(images())["prob"]
    model.net.layers[1].blobs[0].data[...] *= -3
    model.parameters_changed()
    found = model(images())["prob"]
    assert np.abs(found - before).max() > 1e-3
    np.testing.assert_allclose(found, own(model, images()), rtol=1e-5, atol=1e-6)


def test_numbers_that_differ_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LIMIT", -1.0)
    model = caffepy.load(path, engine="onnxruntime", threads=1)
    with pytest.raises(RunError, match=r"output 'prob': .*above the limit of -1; use engine 'own'"):
        model(images())


def test_own_kernels_need_no_library(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "has_runtime", lambda: False)
    model = caffepy.load(path, engine="own", threads=1)
    assert model(images())["prob"].shape == (2, 4, 1, 1)
    assert not model._runtime_nets


def test_errors(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="engine is 'fast'; it can be own or onnxruntime"):
        caffepy.load(path, engine="fast")
    with pytest.raises(ConfigError, match="engine onnxruntime with a GPU: it computes in float32 on the CPU"):
        caffepy.load(path, engine="onnxruntime", device=0)
    with pytest.raises(ConfigError, match="engine onnxruntime with dtype float16"):
        caffepy.load(path, engine="onnxruntime", dtype="float16")
    monkeypatch.setattr(engine, "has_runtime", lambda: False)
    with pytest.raises(MissingExtraError, match=r"onnxruntime is not installed .*install .*\[onnx\]'"):
        caffepy.load(path, engine="onnxruntime")


def test_a_layer_that_goes_on_from_pass_to_pass_is_refused(tmp_path: Path) -> None:
    """A session forgets the hidden state: the second pass would give other numbers."""
    (tmp_path / "net.prototxt").write_text(
        'layer { name: "data" type: "Input" top: "data" input_param { shape { dim: [1, 2, 3] } } }\n'
        'layer { name: "cont" type: "Input" top: "cont" input_param { shape { dim: [1, 2] } } }\n'
        'layer { name: "rnn" type: "RNN" bottom: "data" bottom: "cont" top: "rnn" recurrent_param { num_output: 2 } }\n'
    )
    model = caffepy.load(tmp_path / "net.prototxt", engine="onnxruntime", threads=1)
    with pytest.raises(ConfigError, match=r"layer 'rnn' \(RNN\) keeps its state between passes.* 'own'"):
        model(np.ones((1, 2, 3)), np.ones((1, 2)))

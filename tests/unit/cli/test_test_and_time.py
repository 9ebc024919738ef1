"""`caffepy test` and `caffepy time`: their lines are Caffe's, and their numbers are the net's."""

from __future__ import annotations

import os
import re
from pathlib import Path

import cv2
import h5py
import numpy as np
import pytest
from fake_graph_backend import Leaving

from caffepy.cli.main import main
from caffepy.data.sources.databases import write_datums
from caffepy.formats.proto import caffe_pb2
from caffepy.net import Net
from caffepy.training import evaluate_model as scoring

NET = """
name: "scores"
layer {
  name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param {
    shape { dim: 4 dim: 3 } shape { dim: 4 }
    data_filler { type: "constant" value: 2 } data_filler { type: "constant" value: 1 }
  }
}
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 5 } }
layer { name: "deep" type: "ReLU" bottom: "ip" top: "ip" include { stage: "deep" } }
layer { name: "accuracy" type: "Accuracy" bottom: "ip" bottom: "label" top: "accuracy" include { phase: TEST } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" loss_weight: 3 }
"""

INFOGAIN = """
layer {
  name: "d" type: "DummyData" top: "x" top: "y" dummy_data_param {
    shape { dim: 1 dim: 2 } shape { dim: 1 }
    data_filler { type: "constant" value: 0.25 } data_filler { type: "constant" value: 1 }
  }
}
layer {
  name: "loss" type: "InfogainLoss" bottom: "x" bottom: "y" top: "loss"
  infogain_loss_param { source: "h.binaryproto" }
}
"""
"""-log softmax is log 2 in BVLC's Caffe; NVIDIA's takes 0.25 as the probability."""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A net, and weights with which it always answers class 1."""
    monkeypatch.chdir(tmp_path)
    Path("net.prototxt").write_text(NET)
    weights = caffe_pb2.NetParameter()
    layer = weights.layer.add(name="ip", type="InnerProduct")
    layer.blobs.add(data=[0.0] * 15).shape.dim.extend((5, 3))
    layer.blobs.add(data=[0.0, 100.0, 0.0, 0.0, 0.0]).shape.dim.append(5)
    Path("net.caffemodel").write_bytes(weights.SerializeToString())


def messages(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The logged messages without their prefix."""
    return [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()]


def test_weights_in_hdf5(capsys: pytest.CaptureFixture[str]):
    with h5py.File("net.caffemodel.h5", "w") as file:
        file["data/ip/0"] = np.zeros((5, 3), np.float32)
        file["data/ip/1"] = np.array([0, 100, 0, 0, 0], np.float32)
    assert main(["test", "--model=net.prototxt", "--weights", "net.caffemodel.h5", "--iterations=1"]) == 0
    assert "accuracy = 1" in messages(capsys)


@pytest.mark.parametrize("given, loss", [("bvlc", np.log(2)), ("nvidia", np.log(4))])
def test_dialect_option_overrides(given: str, loss: float, capsys: pytest.CaptureFixture[str]):
    Path("net.prototxt").write_text(INFOGAIN)
    identity = caffe_pb2.BlobProto(num=1, channels=1, height=2, width=2, data=[1, 0, 0, 1])
    Path("h.binaryproto").write_bytes(identity.SerializeToString())
    weights = caffe_pb2.NetParameter(layer=[caffe_pb2.LayerParameter(name="d")])
    Path("ip.caffemodel").write_bytes(weights.SerializeToString())
    command = ["test", "--model=net.prototxt", "--weights=ip.caffemodel", "--iterations=1"]
    assert main([*command, f"--dialect={given}"]) == 0
    lines = messages(capsys)
    assert f"Dialect: {given}, set by --dialect or CAFFEPY_DIALECT" in lines
    assert f"Loss: {loss:.6g}" in lines
    assert "CAFFEPY_DIALECT" not in os.environ


def test_scores_of_each_batch_and_their_means(capsys: pytest.CaptureFixture[str]):
    assert main(["test", "--model=net.prototxt", "-weights", "net.caffemodel", "-iterations=2"]) == 0
    lines = messages(capsys)
    assert lines.count("Use CPU.") == 1
    assert lines[-7:] == [
        "Batch 0, accuracy = 1",
        "Batch 0, loss = 0",
        "Batch 1, accuracy = 1",
        "Batch 1, loss = 0",
        "Loss: 0",
        "accuracy = 1",
        "loss = 0 (* 3 = 0 loss)",
    ]


FOLDABLE = """
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 4 dim: 3 dim: 6 dim: 6 } shape { dim: 4 } data_filler { type: "gaussian" }
  data_filler { type: "constant" value: 1 } } }
layer { name: "c" type: "Convolution" bottom: "data" top: "c"
  convolution_param { num_output: 5 kernel_size: 3 weight_filler { type: "msra" } } }
layer { name: "n" type: "BatchNorm" bottom: "c" top: "c" }
layer { name: "r" type: "ReLU" bottom: "c" top: "c" }
layer { name: "i" type: "InnerProduct" bottom: "c" top: "i"
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "i" bottom: "label" top: "loss" }
"""


@pytest.mark.parametrize("shown", [False, True])
def test_the_net_is_folded_unless_something_else_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shown: bool
):
    Path("net.prototxt").write_text(("debug_info: true" if shown else "") + FOLDABLE)
    ran, forward = [], Net.forward

    def noting(net: Net) -> None:
        if net.backend.holds_values:  # not the plan of its memory
            ran.append([node.layer.type for node in net.schedule])
        forward(net)

    monkeypatch.setattr(Net, "forward", noting)
    scores = []
    for options in ([], ["--no-fuse"], ["--no-share", "--eager"]):
        assert main(["test", "--model=net.prototxt", "--weights=net.caffemodel", "--iterations=2", *options]) == 0
        scores.append([line for line in messages(capsys) if "loss = " in line])
    folded = [types for types in ran if "Convolution + BatchNorm + ReLU" in types]
    assert (len(ran), len(folded)) == (6, 0 if shown else 4)
    values = [[float(line.split(" = ")[1].split()[0]) for line in lines] for lines in scores]
    assert len(values[0]) == 3
    np.testing.assert_allclose(values, [values[0]] * 3, rtol=1e-5)


def test_folded_weights_leave_a_device_that_captures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    Path("net.prototxt").write_text(FOLDABLE.replace('type: "gaussian"', 'type: "constant" value: 0.5'))
    scores, away, loss = [], [], Net.loss

    def noting(net: Net) -> float:
        away.append([blob.is_offloaded for layer in net.layers for blob in layer.blobs if len(blob.shape) > 1])
        return loss(net)

    monkeypatch.setattr(Net, "loss", noting)
    for made in (None, Leaving()):
        if made is not None:
            monkeypatch.setattr(scoring, "create_backend", lambda *_, made=made: made)
        assert main(["test", "--model=net.prototxt", "--weights=net.caffemodel", "--iterations=3"]) == 0
        scores.append([line for line in messages(capsys) if "loss = " in line])
    assert away == [[False, False]] * 3 + [[True, False]] * 3
    assert scores[0] == scores[1] and made.launches == 2


def test_time_shows_the_layers_of_a_test_one_by_one(capsys: pytest.CaptureFixture[str]):
    Path("net.prototxt").write_text(FOLDABLE)
    assert main(["time", "--model=net.prototxt", "--iterations=1", "--phase=TEST"]) == 0
    layers = [line.split()[0] for line in messages(capsys) if "\tforward: " in line]
    assert layers == ["data", "c", "n", "r", "i", "loss"]


DETECTIONS = """
layer { name: "boxes" type: "HDF5Data" top: "det" top: "gt" hdf5_data_param { source: "list.txt" batch_size: 1 } }
layer { name: "eval" type: "DetectionEvaluate" bottom: "det" bottom: "gt" top: "detection_eval"
  detection_evaluate_param { num_classes: 3 } }
"""


def _write_boxes() -> None:
    """Two batches with an object of each of two classes; class 1 is hit twice, class 2 once, at a lower score."""
    near, far = (0.1, 0.1, 0.5, 0.5), (0.6, 0.6, 0.9, 0.9)
    found = [[(0, 1, 0.9, *near), (0, 2, 0.8, *near)], [(0, 1, 0.9, *near), (0, 2, 0.6, *far)]]
    objects = [[(0, 1, 0, *near, 0), (0, 2, 0, *far, 0)]] * 2
    with h5py.File("boxes.h5", "w") as file:
        file["det"], file["gt"] = (np.array(rows, np.float32)[:, None] for rows in (found, objects))
    Path("list.txt").write_text("boxes.h5\n")


@pytest.mark.parametrize(("version", "second"), [([], 6 * 0.5 / 11), (["--ap-version", "Integral"], 0.25)])
def test_detections_are_scored_by_average_precision(
    capsys: pytest.CaptureFixture[str], version: list[str], second: float
):
    _write_boxes()
    Path("net.prototxt").write_text(NET + DETECTIONS)
    arguments = ["test", "--model=net.prototxt", "--weights=net.caffemodel", "--iterations=2", *version]
    assert main(arguments) == 0
    lines = messages(capsys)
    assert "class AP 1: 1" in lines
    assert f"class AP 2: {second:.6g}" in lines
    assert f"Test net output mAP #0: detection_eval = {(1 + second) / 2:.6g}" in lines
    assert "accuracy = 1" in lines


def test_outputs_of_changing_size_have_no_mean(capsys: pytest.CaptureFixture[str]):
    Path("net.prototxt").write_text(
        """
        layer { name: "in" type: "DummyData" top: "loc" top: "conf" top: "prior" dummy_data_param {
          shape { dim: 1 dim: 4 } shape { dim: 1 dim: 2 } shape { dim: 1 dim: 2 dim: 4 }
          data_filler { type: "constant" value: 1 } } }
        layer { name: "out" type: "DetectionOutput" bottom: "loc" bottom: "conf" bottom: "prior" top: "boxes"
          detection_output_param { num_classes: 2 } }
        """
    )
    assert main(["test", "--model=net.prototxt", "--weights=net.caffemodel"]) == 2
    error = "layer 'out' (DetectionOutput): its top 'boxes', an output of the test net, has another size in each batch"
    assert error in capsys.readouterr().err


def test_the_loss_is_weighted(capsys: pytest.CaptureFixture[str]):
    weights = caffe_pb2.NetParameter.FromString(Path("net.caffemodel").read_bytes())
    weights.layer[0].blobs[1].data[:] = [0.0] * 5
    Path("flat.caffemodel").write_bytes(weights.SerializeToString())
    assert main(["test", "--model=net.prototxt", "--weights=flat.caffemodel", "--iterations=3"]) == 0
    lines = messages(capsys)
    assert lines[-1] == "loss = 1.60944 (* 3 = 4.82831 loss)"  # log 5
    assert "Loss: 4.82831" in lines


@pytest.mark.parametrize("stages, there", [([], False), (["--stage=deep"], True)])
def test_stages_choose_layers(capsys: pytest.CaptureFixture[str], stages: list[str], there: bool):
    assert main(["test", "--model=net.prototxt", "--weights=net.caffemodel", "--iterations=1", *stages]) == 0
    assert ("Creating Layer deep (ReLU)" in messages(capsys)) == there


def test_inputs_that_nobody_fills_are_said(capsys: pytest.CaptureFixture[str]):
    data = 'layer { name: "data" type: "Input" top: "data" input_param { shape { dim: [4, 3] } } }'
    Path("deploy.prototxt").write_text(data + NET[NET.index('layer { name: "ip"') : NET.index('layer { name: "deep"')])
    assert main(["test", "--model=deploy.prototxt", "--weights=net.caffemodel", "--iterations=1"]) == 0
    assert "The inputs of this net (data) are not filled: the scores are for zero inputs." in messages(capsys)


ONNXRUNTIME = "--weights=net.caffemodel --engine=onnxruntime"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("test --weights=net.caffemodel", "caffepy: error: test needs a net"),
        ("test --model=net.prototxt", "caffepy: error: test needs trained weights"),
        (
            f"test --model=net.prototxt --gpu=0 {ONNXRUNTIME}",
            "engine onnxruntime with a GPU: it computes in float32 on",
        ),
        (
            f"test --model=loss.prototxt {ONNXRUNTIME}",
            "net '' has no layers that onnxruntime can compute; use engine 'own'",
        ),
        ("time", "caffepy: error: time needs a net"),
        ("time --model=net.prototxt --data", "--data"),
        ("time --model=net.prototxt --dialect=caffe2", "argument --dialect: invalid choice: 'caffe2'"),
    ],
)
def test_mistakes(words: str, message: str, capsys: pytest.CaptureFixture[str]):
    Path("loss.prototxt").write_text(INFOGAIN.replace("InfogainLoss", "SoftmaxWithLoss"))
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


def test_time_prints_every_layer_and_the_averages(capsys: pytest.CaptureFixture[str]):
    assert main(["time", "--model=net.prototxt", "--iterations=3", "--cpu"]) == 0
    lines = messages(capsys)
    layers = [line for line in lines if re.fullmatch(r" *\w+\t(forward|backward): [\d.e-]+ ms\.", line)]
    assert [line.split()[0] for line in layers] == [n for n in ("data", "ip", "loss") for _ in range(2)]
    assert layers[0].startswith("      data\tforward: ")
    averages = [line for line in lines if line.startswith("Average ") and line.endswith(" ms.")]
    assert [line.split(":")[0] for line in averages] == [
        "Average Forward pass",
        "Average Backward pass",
        "Average Forward-Backward",
    ]
    assert sum(line.startswith("Iteration: ") for line in lines) == 3
    assert lines[-1] == "*** Benchmark ends ***"
    assert lines[-2].startswith("Total Time: ")


def test_time_adds_up(capsys: pytest.CaptureFixture[str]):
    assert main(["time", "--model=net.prototxt", "--iterations=2", "--cpu"]) == 0
    text = "\n".join(messages(capsys))
    parts = [float(number) for number in re.findall(r"\tforward: ([\d.e-]+) ms", text)]
    forward = float(re.search(r"Average Forward pass: ([\d.e-]+) ms", text)[1])
    assert sum(parts) <= forward * 1.001


def test_time_in_the_test_phase(capsys: pytest.CaptureFixture[str]):
    assert main(["time", "--model=net.prototxt", "--iterations=1", "--phase=TEST"]) == 0
    assert any(line.startswith("  accuracy\tforward: ") for line in messages(capsys))


DEEPER = """
name: "deeper"
layer { name: "data" type: "HDF5Data" top: "data" top: "label"
  hdf5_data_param { source: "files.txt" batch_size: 4 } }
layer { name: "c" type: "Convolution" bottom: "data" top: "c"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "n" type: "BatchNorm" bottom: "c" top: "c" }
layer { name: "r" type: "ReLU" bottom: "c" top: "c" }
layer { name: "a" type: "InnerProduct" bottom: "c" top: "a"
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
layer { name: "b" type: "InnerProduct" bottom: "a" top: "b"
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
layer { name: "loss_a" type: "SoftmaxWithLoss" bottom: "a" bottom: "label" top: "loss_a" loss_weight: 0.3 }
layer { name: "accuracy" type: "Accuracy" bottom: "b" bottom: "label" top: "accuracy" include { stage: "scored" } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "b" bottom: "label" top: "loss" }
"""


def test_onnxruntime_gives_the_same_scores(capsys: pytest.CaptureFixture[str]):
    Path("deeper.prototxt").write_text(DEEPER)
    Path("files.txt").write_text("data.h5")
    with h5py.File("data.h5", "w") as file:
        file["data"] = np.random.default_rng(1).standard_normal((12, 3, 8, 8)).astype(np.float32)
        file["label"] = np.arange(12, dtype=np.float32) % 5
    command = ["test", "--model=deeper.prototxt", "--weights=net.caffemodel", "--iterations=3", "--stage=scored"]
    scores = []
    for engine in ("own", "onnxruntime"):
        assert main([*command, "--threads=1", "--engine", engine]) == 0
        lines = messages(capsys)
        said = [line for line in lines if line.startswith("Net 'deeper' is computed by onnxruntime; output '")]
        assert [line.split("'")[3] for line in said] == (["a"] if engine == "onnxruntime" else [])
        found = {key: float(value.split()[0]) for key, _, value in (line.partition(" = ") for line in lines) if value}
        scores.append({key: value for key, value in found.items() if key.startswith(("Batch", "loss", "accuracy"))})
    assert len(scores[0]) == 12 and scores[0].keys() == scores[1].keys()
    assert scores[1] == pytest.approx(scores[0], rel=1e-4)


def test_time_shows_the_speed_of_data_layers_alone(capsys: pytest.CaptureFixture[str]):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 40, 40, 3), dtype=np.uint8)
    images = (cv2.imencode(".jpg", each)[1].tobytes() for each in pixels)
    datums = (caffe_pb2.Datum(data=image, encoded=True, label=1) for image in images)
    write_datums(Path("db"), ((b"%d" % number, datum) for number, datum in enumerate(datums)))
    data = 'layer { name: "d" type: "Data" top: "x" top: "y" data_param { source: "db" batch_size: 4 backend: LMDB } }'
    Path("net.prototxt").write_text(data)
    assert main(["time", "--model=net.prototxt", "--data", "--iterations=3", "--cpu"]) == 0
    speed, shares = messages(capsys)[-2:]
    assert re.search(r"d\t\d+ images/s \(\d+ batches of 4 in .* s\), [\d.]+ cores used", speed)
    assert re.search(r"[\t ]decoding \d+ %", shares)

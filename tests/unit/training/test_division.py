"""Two devices of a process train and score as one does, whatever makes the data and whatever keeps state."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import cv2
import h5py
import lmdb
import numpy as np
import pytest
from training import solver_param

import caffepy
from caffepy.formats.proto.caffe_pb2 import Datum

SOLVER = (
    'base_lr: 0.1 momentum: 0.9 lr_policy: "fixed" max_iter: 4 snapshot_after_train: false random_seed: 3 '
    "test_iter: 3 test_interval: 2 "
)
MADE = '''
import json
import numpy as np
import caffepy.as_caffe
import caffe


class Samples(caffe.Layer):
    """Sample i of the data set; devices take them in turns, as BVLC Caffe's documents show."""

    def setup(self, bottom, top):
        self.batch = int(self.param_str)
        self.first = caffe.solver_rank() * self.batch

    def reshape(self, bottom, top):
        top[0].reshape(self.batch, 1, 3, 3)
        top[1].reshape(self.batch)

    def forward(self, bottom, top):
        for row in range(self.batch):
            top[0].data[row] = np.random.default_rng(self.first + row).standard_normal((1, 3, 3))
            top[1].data[row] = (self.first + row) % 3
        self.first += caffe.solver_count() * self.batch

    def backward(self, top, down, bottom): ...


class Streams(Samples):
    """Time steps of eight streams, of which each device has its own."""

    def setup(self, bottom, top):
        self.streams, self.step = int(self.param_str), 0
        self.own = range(caffe.solver_rank() * self.streams, (caffe.solver_rank() + 1) * self.streams)

    def reshape(self, bottom, top):
        top[0].reshape(2, self.streams, 9)
        top[1].reshape(2, self.streams)

    def forward(self, bottom, top):
        for row in range(2):
            all_streams = np.random.default_rng(self.step).standard_normal((8, 9))
            top[0].data[row], top[1].data[row] = all_streams[self.own], [stream % 3 for stream in self.own]
            self.step += 1


class Forgetful(Samples):
    """Has never heard of other devices."""

    def setup(self, bottom, top):
        self.batch, self.first = int(self.param_str), 0

    def forward(self, bottom, top):
        top[0].data[...] = self.first
        self.first += 1


class Mine(Forgetful):
    def forward(self, bottom, top):
        top[0].data[...] = self.rank


class Twice(Samples):
    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].shape)

    def setup(self, bottom, top): ...

    def forward(self, bottom, top):
        top[0].data[...] = 2 * bottom[0].data
'''
PYTHON = 'type: "Python" python_param { module: "made_samples" layer: "%s" param_str: "%d" } '
HEAD = """
layer { name: "ip0" type: "InnerProduct" bottom: "data" top: "ip0" include { phase: TRAIN }
  inner_product_param { num_output: 8 weight_filler { type: "xavier" } } }
layer { name: "drop" type: "Dropout" bottom: "ip0" top: "ip0" include { phase: TRAIN } }
layer { name: "ip" type: "InnerProduct" bottom: "ip0" top: "ip" include { phase: TRAIN }
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" include { phase: TRAIN } }
"""
RECURRENT = """
layer { name: "cont" type: "DummyData" top: "cont" include { phase: %(phase)s }
  dummy_data_param { shape { dim: 2 dim: %(streams)d } data_filler { type: "constant" value: 1 } } }
layer { name: "time" type: "Reshape" bottom: "data" top: "time" include { phase: %(phase)s }
  reshape_param { shape { dim: 2 dim: -1 dim: 9 } } }
layer { name: "lstm" type: "LSTM" bottom: "time" bottom: "cont" top: "lstm" include { phase: %(phase)s }
  recurrent_param { num_output: 4 weight_filler { type: "xavier" } } }
"""
RECURRENT_LOSS = """
layer { name: "steps" type: "Reshape" bottom: "label" top: "steps" include { phase: TRAIN }
  reshape_param { shape { dim: 2 dim: -1 } } }
layer { name: "ip" type: "InnerProduct" bottom: "lstm" top: "ip" include { phase: TRAIN }
  inner_product_param { num_output: 3 axis: 2 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "steps" top: "loss" include { phase: TRAIN }
  softmax_param { axis: 2 } }
"""
SCORED = """
layer { name: "test" type: "Data" top: "data" include { phase: TEST } transform_param { scale: 0.01 }
  data_param { source: "lmdb" batch_size: 4 backend: LMDB } }
layer { name: "made" top: "made" top: "ignored" include { phase: TEST } %s }
layer { name: "mean" type: "Reduction" bottom: "made" top: "mean" include { phase: TEST }
  reduction_param { operation: MEAN } }
layer { name: "silence" type: "Silence" bottom: "ignored" include { phase: TEST } }
"""
MEAN = """
layer { name: "out" type: "Reduction" bottom: "lstm" top: "out" include { phase: TEST }
  reduction_param { operation: MEAN } }
"""
TESTED = SCORED % (PYTHON % ("Samples", 2)) + RECURRENT % {"phase": "TEST", "streams": 2} + MEAN
TRANSFORM = "transform_param { scale: 0.01 mirror: true }"
RECORDS = {
    "Data": f'data_param {{ source: "lmdb" batch_size: %d backend: LMDB }} {TRANSFORM}',
    "HDF5Data": 'hdf5_data_param { source: "h5.txt" batch_size: %d shuffle: true }',
    "ImageData": 'image_data_param { source: "images.txt" batch_size: %d is_color: false shuffle: true } ' + TRANSFORM,
}
DATA = 'layer { name: "data" top: "data" top: "label" include { phase: TRAIN } %s }'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the data, which is the working directory and on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "made_samples", raising=False)
    Path("made_samples.py").write_text(MADE)
    rng = np.random.default_rng(7)
    with lmdb.open("lmdb", map_size=1 << 22) as environment, environment.begin(write=True) as records:
        for number in range(21):
            datum = Datum(channels=1, height=3, width=3, label=number % 3)
            datum.data = rng.integers(0, 256, 9, np.uint8).tobytes()
            records.put(b"%08d" % number, datum.SerializeToString())
    with h5py.File("a.h5", "w") as file:
        file["data"] = rng.standard_normal((11, 1, 3, 3)).astype(np.float32)
        file["label"] = (np.arange(11) % 3).astype(np.float32)
    Path("h5.txt").write_text("a.h5\n")
    for number in range(9):
        cv2.imwrite(f"{number}.png", rng.integers(0, 256, (3, 3), np.uint8))
    Path("images.txt").write_text("".join(f"{number}.png {number % 3}\n" for number in range(9)))
    return tmp_path


def outcome(net: str, devices: int, solver: str = SOLVER, **options: Any) -> tuple[np.ndarray, list[Any]]:
    """The weights and the scores of a training."""
    with caffepy.train(solver_param(solver, net), cpu_solvers=devices, threads=1, progress=False, **options) as trained:
        weights = [blob.host_data().ravel() for layer in trained.net.layers for blob in layer.blobs]
        return np.concatenate(weights), [trained.scores]


def compare(one: str, two: str, **options: Any) -> None:
    """Training of one device and of two give the same weights and the same scores."""
    (alone, scores), (together, their_scores) = outcome(one, 1, **options), outcome(two, 2, **options)
    np.testing.assert_allclose(together, alone, rtol=0, atol=2e-6)
    assert str(scores) == str(their_scores)


def warnings(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if part in record.getMessage()]


@pytest.mark.parametrize("kind", RECORDS)
def test_records_are_divided_and_tests_with_state_are_not(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The test net has a Python layer that makes data, an LSTM with state, and records."""
    net = DATA % f'type: "{kind}" {RECORDS[kind] % 8}' + HEAD + TESTED
    with caplog.at_level(logging.INFO):
        compare(net, net)
    [line] = warnings(caplog, "earlier passes")
    assert line.startswith("layer 'made' (Python) depends on earlier passes: device 0 alone scores this net")


def test_a_python_layer_divides_its_data_by_rank_and_count() -> None:
    whole, half = (DATA % (PYTHON % ("Samples", batch)) + HEAD + TESTED for batch in (8, 4))
    compare(whole, half)


def test_random_dummy_data_belong_to_samples() -> None:
    text = 'type: "DummyData" dummy_data_param { shape { dim: %d dim: 9 } shape { dim: %d } data_filler { type: '
    text += '"gaussian" } data_filler { type: "constant" value: 1 } }'
    whole, half = (DATA % (text % (batch, batch)) + HEAD + TESTED for batch in (8, 4))
    compare(whole, half)


@pytest.mark.parametrize("iter_size", [1, 2])
def test_records_of_a_net_with_state_are_not_divided(iter_size: int, caplog: pytest.LogCaptureFixture) -> None:
    data = DATA % f'type: "Data" {RECORDS["Data"] % 8}'
    net = data + RECURRENT % {"phase": "TRAIN", "streams": 4} + RECURRENT_LOSS + TESTED
    compare(net, net, solver=SOLVER + f"iter_size: {iter_size}")
    [line] = warnings(caplog, "the records are not divided, and all 2 devices train on the same batches")
    assert line.startswith("layer 'lstm' (LSTM) depends on earlier passes")


def test_streams_of_an_lstm_that_python_divides() -> None:
    one, two = (
        DATA % (PYTHON % ("Streams", own)) + RECURRENT % {"phase": "TRAIN", "streams": own} + RECURRENT_LOSS + TESTED
        for own in (8, 4)
    )
    compare(one, two)


def test_batches_of_their_own_follow_their_own_state(caplog: pytest.LogCaptureFixture) -> None:
    data = DATA % f'type: "Data" {RECORDS["Data"] % 8}'
    net = data + RECURRENT % {"phase": "TRAIN", "streams": 4} + RECURRENT_LOSS
    outcome(net, 2, solver=SOLVER.partition("test_iter")[0], batch="per-device")
    assert warnings(caplog, "each of the 2 devices follows the passes of its own batches alone")


@pytest.mark.parametrize(
    ("name", "devices", "named"), [("Forgetful", 2, True), ("Forgetful", 1, False), ("Mine", 2, False)]
)
def test_python_data_that_no_device_divides_are_named_once(
    name: str, devices: int, named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    net = DATA % (PYTHON % (name, 4)) + HEAD
    outcome(net, devices, solver=SOLVER.partition("test_iter")[0])
    found = warnings(caplog, "layer 'data' (Python) makes data and has never asked for caffe.solver_rank()")
    assert len(found) == named


def test_statistics_that_a_test_changes_are_those_of_the_root() -> None:
    normalised = """
    layer { name: "norm" type: "BatchNorm" bottom: "data" top: "norm" batch_norm_param { use_global_stats: %s }
      include { phase: %s } }
    """
    frozen, counting = normalised % ("true", "TRAIN"), normalised % ("false", "TEST")
    train = DATA % f'type: "Data" {RECORDS["Data"] % 8}' + HEAD
    test = DATA.replace("TRAIN", "TEST") % f'type: "Data" {RECORDS["Data"] % 2}'
    mean = 'layer { name: "s" type: "Silence" bottom: "label" bottom: "norm" }'
    net = train + frozen + test + counting + mean
    compare(net, net, solver=SOLVER + 'snapshot: 2 snapshot_prefix: "saved"')


def test_a_class_without_state_lets_devices_divide_a_test(caplog: pytest.LogCaptureFixture) -> None:
    Path("made_samples.py").write_text(MADE + "    depends_on_earlier_passes = False\n")
    test = DATA.replace("TRAIN", "TEST") % f'type: "Data" {RECORDS["Data"] % 2}'
    test += 'layer { name: "twice" bottom: "data" top: "twice" include { phase: TEST } %s }' % (PYTHON % ("Twice", 1))
    test += 'layer { name: "quiet" type: "Silence" bottom: "label" include { phase: TEST } }'
    net = DATA % f'type: "Data" {RECORDS["Data"] % 8}' + HEAD + test
    with caplog.at_level(logging.INFO):
        compare(net, net)
    assert not warnings(caplog, "earlier passes")

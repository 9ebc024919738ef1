"""`caffepy.load`: nets called with arrays."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from fake_graph_backend import FakeGraphBackend
from google.protobuf import text_format
from other_arrays import OnlyDlpack

import caffepy
from caffepy.backend.cpu.backend import CpuBackend
from caffepy.errors import ConfigError, DataError, ShapeError, SnapshotError
from caffepy.formats.proto import caffe_pb2
from caffepy.infer.model import Model
from caffepy.layers.layer import LayerContext
from caffepy.net.executor import MAX_SHAPES
from caffepy.net.fold import FoldedConvolution

NET = """
name: "small"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 6 dim: 6 } } }
layer { name: "other" type: "Input" top: "other" input_param { shape { dim: 2 dim: 4 } } }
layer { name: "c" type: "Convolution" bottom: "data" top: "c"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "n" type: "BatchNorm" bottom: "c" top: "c" }
layer { name: "s" type: "Scale" bottom: "c" top: "c" scale_param { bias_term: true } }
layer { name: "r" type: "ReLU" bottom: "c" top: "c" }
layer { name: "pool" type: "Pooling" bottom: "c" top: "pool" pooling_param { pool: AVE global_pooling: true } }
layer { name: "f" type: "Flatten" bottom: "pool" top: "f" }
layer { name: "sum" type: "Eltwise" bottom: "f" bottom: "other" top: "sum" }
layer { name: "deep" type: "Power" bottom: "sum" top: "deep" power_param { scale: 2 } include { stage: "deep" } }
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "net.prototxt").write_text(NET)
    return tmp_path / "net.prototxt"


def images(shape: tuple[int, ...] = (2, 3, 6, 6), seed: int = 1) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def plainly(model: Model, data: Any, other: Any) -> Any:
    """What the net as written gives."""
    net = model.net
    for name, values in (("data", data), ("other", other)):
        net.blobs[name].reshape(values.shape)
        net.backend.from_host(values, net.blobs[name].data)
    net.forward()
    return net.blobs["sum"].host_data()


def test_a_call_gives_what_the_net_gives(path: Path) -> None:
    model = caffepy.load(path)
    data, other = images(), images((2, 4))
    assert list(model(data, other)) == model.outputs == ["sum"]
    for found in (model(data, other), model(data, other=other), model(other=other, data=data)):
        np.testing.assert_allclose(found["sum"], plainly(model, data, other), rtol=1e-5, atol=1e-6)
    runner = next(iter(model._executors.values()))
    assert any(isinstance(node.layer, FoldedConvolution) for node in runner.net.schedule)
    assert repr(model).startswith("<caffepy model 'small': data 2 x 3 x 6 x 6, other 2 x 4 -> sum, on ")
    model.close()
    model.close()


def test_a_batch_without_images_has_results_without_images(path: Path) -> None:
    model = caffepy.load(path)
    for rows in (0, 2, 0):
        assert model(images((rows, 3, 6, 6)), images((rows, 4)))["sum"].shape == (rows, 4)
    model.close()


def test_results_are_the_callers(path: Path) -> None:
    model = caffepy.load(path)
    first = model(images(), images((2, 4)))["sum"]
    kept = first.copy()
    model(images(seed=2), images((2, 4)))
    np.testing.assert_array_equal(first, kept)
    first[...] = 0
    np.testing.assert_array_equal(model(images(), images((2, 4)))["sum"], kept)


class OnlyArray:
    """What NumPy converts, as PyTorch's tensors."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self._array, dtype)


@pytest.mark.parametrize(
    "given",
    [
        OnlyDlpack,
        OnlyArray,
        np.ndarray.tolist,
        np.asfortranarray,
        lambda a: a.astype(np.float64),
        lambda a: np.repeat(a, 2, axis=3)[..., ::2],
        lambda a: a[::-1].copy()[::-1],
    ],
)
def test_whatever_holds_numbers_is_taken(path: Path, given: Any) -> None:
    model = caffepy.load(path)
    other = images((2, 4))
    np.testing.assert_array_equal(model(given(images()), other)["sum"], model(images(), other)["sum"])


def test_bytes_are_numbers(path: Path) -> None:
    model = caffepy.load(path)
    pixels, other = np.arange(216, dtype=np.uint8).reshape(2, 3, 6, 6), images((2, 4))
    np.testing.assert_array_equal(model(pixels, other)["sum"], model(pixels.astype(np.float32), other)["sum"])


@pytest.mark.parametrize(
    "arrays, named, problem",
    [
        ((1, 2, 3), {}, "net 'small' has 2 inputs, data, other; 3 are given"),
        ((images(),), {"data": 1}, "'data' is given twice; its inputs are data, other"),
        ((), {"date": 1}, "'date' is not an input"),
        ((images(),), {}, "no array is given for other"),
        ((["x"], images((2, 4))), {}, "input 'data' is no array of numbers: its dtype is"),
        (([[1], [1, 2]], images((2, 4))), {}, "input 'data' is no array of numbers: "),
        ((images((2, 5, 6, 6)), images((2, 4))), {}, "of shape data 2 x 5 x 6 x 6, other 2 x 4: layer 'c' .* 4 5 3 3 "),
        ((images((2, 3, 6)), images((2, 4))), {}, "input 'data' is 2 x 3 x 6; it must have 4 axes, as 2 x 3 x 6 x 6"),
        ((images((3, 3, 6, 6)), images((2, 4))), {}, "layer 'sum'"),
    ],
)
def test_what_does_not_fit_is_named(path: Path, arrays: Any, named: Any, problem: str) -> None:
    with pytest.raises(ShapeError, match=problem):
        caffepy.load(path)(*arrays, **named)


def test_each_shape_keeps_its_net_and_the_oldest_goes(path: Path) -> None:
    model = caffepy.load(path)
    for count in range(1, MAX_SHAPES + 3):
        data, other = images((count, 3, 6, 6)), images((count, 4))
        np.testing.assert_allclose(model(data, other)["sum"], plainly(model, data, other), rtol=1e-5, atol=1e-6)
    assert [shapes[0][0] for shapes in model._executors] == list(range(3, MAX_SHAPES + 3))
    kept = dict(model._executors)
    model(images((3, 3, 6, 6)), images((3, 4)))
    assert model._executors == kept
    assert next(reversed(model._executors))[0][0] == 3


def test_threads_that_call_at_the_same_time_get_their_own_results(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = caffepy.load(path)
    inputs = [(images((n, 3, 6, 6), seed), images((n, 4), seed)) for seed, n in enumerate((1, 2, 2, 3))]
    wanted = [model(*pair)["sum"] for pair in inputs]
    upload = CpuBackend.upload

    def upload_slowly(backend: CpuBackend, source: Any, target: Any) -> None:
        upload(backend, source, target)
        time.sleep(0.001)  # the others' turn

    monkeypatch.setattr(CpuBackend, "upload", upload_slowly)
    order = list(range(len(inputs))) * 10
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda number: model(*inputs[number])["sum"], order))
    for number, result in zip(order, found, strict=True):
        np.testing.assert_array_equal(result, wanted[number])


def test_weights_are_read_in_turn(path: Path) -> None:
    files = []
    for value in (1.0, 3.0):
        message = caffe_pb2.NetParameter()
        blob = message.layer.add(name="s", type="Scale").blobs.add(data=[value] * 4)
        blob.shape.dim.append(4)
        message.layer[0].blobs.add(data=[value] * 4).shape.dim.append(4)
        files.append(path.with_name(f"{value}.caffemodel"))
        files[-1].write_bytes(message.SerializeToString())
    assert caffepy.load(path, files).net.layers[4].blobs[0].host_data()[0] == 3
    assert caffepy.load(str(path), str(files[0])).net.layers[4].blobs[0].host_data()[0] == 1
    message.layer[0].blobs[0].data.append(1)
    files[0].write_bytes(message.SerializeToString())
    with pytest.raises(SnapshotError, match="'s'"):
        caffepy.load(path, files[0])


def test_options(path: Path) -> None:
    assert caffepy.load(path, stages=["deep"]).outputs == ["deep"]
    with pytest.raises(ConfigError, match="dtype is 'double'; it can be float32, float16, bfloat16"):
        caffepy.load(path, dtype="double")
    path.write_text('layer { name: "d" type: "DummyData" top: "d" dummy_data_param { shape { dim: 1 } } }')
    with pytest.raises(ConfigError, match="has no Input layer to give arrays to; use its deploy net"):
        caffepy.load(path)


def test_parameters_may_be_changed(path: Path) -> None:
    model = caffepy.load(path)
    data, other = images(), images((2, 4))
    before = model(data, other)["sum"]
    model.backend.fill(model.net.layers[4].blobs[1].data, 5)
    np.testing.assert_array_equal(model(data, other)["sum"], before)
    model.parameters_changed()
    np.testing.assert_allclose(model(data, other)["sum"], plainly(model, data, other), rtol=1e-5, atol=1e-6)


def test_each_shape_keeps_its_graphs() -> None:
    backend = FakeGraphBackend()
    param = text_format.Parse(NET, caffe_pb2.NetParameter())
    model = Model(param, LayerContext(backend, phase=caffe_pb2.TEST), [])
    for _ in range(3):
        for count in (1, 2):
            data, other = images((count, 3, 6, 6)), images((count, 4))
            np.testing.assert_allclose(model(data, other)["sum"], plainly(model, data, other), rtol=1e-5, atol=1e-6)
    assert backend.launches == 4
    model.close()


SEQUENCE = """
layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 3 dim: 2 dim: 4 } } }
layer { name: "cont" type: "Input" top: "cont" input_param { shape { dim: 3 dim: 2 } } }
layer { name: "out" type: "LSTM" bottom: "x" bottom: "cont" top: "out"
  recurrent_param { num_output: 5 weight_filler { type: "uniform" min: -1 max: 1 } } }
"""


def test_a_state_goes_on_in_passes_of_another_length() -> None:
    param = text_format.Parse(SEQUENCE, caffe_pb2.NetParameter())
    whole, parts = (Model(param, LayerContext(CpuBackend(1), caffe_pb2.TEST, seed=2), []) for _ in range(2))
    x = np.random.default_rng(1).standard_normal((12, 2, 4)).astype(np.float32)
    cont = np.ones((12, 2), np.float32)
    cont[0] = 0
    wanted = whole(x, cont)["out"]
    cuts = [0, 3, 4, 7, 9, 12]
    found = [parts(x[a:b], cont[a:b])["out"] for a, b in zip(cuts, cuts[1:], strict=False)]
    np.testing.assert_allclose(np.concatenate(found), wanted, rtol=1e-5, atol=1e-6)


def test_other_streams_begin_without_a_state() -> None:
    param = text_format.Parse(SEQUENCE, caffe_pb2.NetParameter())
    model = Model(param, LayerContext(CpuBackend(1), caffe_pb2.TEST, seed=2), [])
    x, ones = np.ones((3, 2, 4), np.float32), np.ones((3, 2), np.float32)
    first = model(x, ones)["out"]
    assert not np.allclose(model(x, ones)["out"], first)
    model(np.ones((3, 1, 4)), np.ones((3, 1)))
    np.testing.assert_array_equal(model(x, ones)["out"], first)


def test_images_are_prepared(path: Path, tmp_path: Path):
    """`prepare` gives the values of the input whose layer has a transform_param."""
    net = caffepy.load(path)
    with pytest.raises(ConfigError, match=r"net 'small': no Input layer says how images become.* deploy --like"):
        net.prepare("a.png")
    net.close()
    fields = "transform_param { mean_value: 1 resize_param { resize_mode: FIT_SMALL_SIZE height: 6 width: 6 } }"
    path.write_text(NET.replace('top: "data"', f'top: "data" {fields}', 1))
    net = caffepy.load(path)
    cv2.imwrite(str(tmp_path / "a.png"), np.full((12, 12, 3), 9, np.uint8))
    array = np.full((12, 12), 5, np.uint8)
    values = net.prepare(tmp_path / "a.png", array)
    assert values.tolist() == [np.full((3, 6, 6), 8.0).tolist(), np.full((3, 6, 6), 4.0).tolist()]
    assert net(data=values, other=np.zeros((2, 4)))["sum"].shape == (2, 4)
    with pytest.raises(DataError, match="values of the shapes 3 x 6 x 12, 3 x 6 x 6; prepare images of one shape"):
        net.prepare(array, array[:6])
    net.close()

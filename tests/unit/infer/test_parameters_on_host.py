"""Weights that no pass reads lie in host memory, which nobody sees who reads, writes, saves or shares them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from fake_graph_backend import Leaving
from google.protobuf import text_format

from caffepy.backend.cpu.backend import CpuBackend
from caffepy.formats.proto import caffe_pb2
from caffepy.infer.model import Model
from caffepy.layers.blob import Blob
from caffepy.layers.layer import LayerContext
from caffepy.net import Net

NET = """
name: "small"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 6 dim: 6 } } }
layer { name: "c" type: "Convolution" bottom: "data" top: "c"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "n" type: "BatchNorm" bottom: "c" top: "c" }
layer { name: "s" type: "Scale" bottom: "c" top: "c" scale_param { bias_term: true } }
layer { name: "d" type: "Convolution" bottom: "c" top: "d"
  convolution_param { num_output: 4 kernel_size: 3 pad: 1 weight_filler { type: "xavier" } } }
layer { name: "e" type: "Scale" bottom: "d" top: "e" scale_param { filler { value: 3 } } }
layer { name: "p" type: "Pooling" bottom: "e" top: "p" pooling_param { pool: AVE global_pooling: true } }
layer { name: "i" type: "InnerProduct" bottom: "p" top: "i"
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
"""
FOLDED = ["c", "d"]
"""The layers whose weights are folded."""


def images(count: int = 2, seed: int = 1) -> Any:
    return np.random.default_rng(seed).standard_normal((count, 3, 6, 6)).astype(np.float32)


def make(backend: Any = None, text: str = NET) -> Model:
    param = text_format.Parse(text, caffe_pb2.NetParameter())
    return Model(param, LayerContext(backend or Leaving(), caffe_pb2.TEST, seed=5), [])


def blob(model: Model, layer: str, index: int = 0) -> Blob:
    return model.net.layers[model.net.layer_names.index(layer)].blobs[index]


def away(model: Model) -> list[str]:
    """The layers of which a parameter is in host memory alone."""
    return [layer.name for layer in model.net.layers if any(blob.is_offloaded for blob in layer.blobs)]


def numbers(model: Model) -> list[Any]:
    return [blob.host_data() for layer in model.net.layers for blob in layer.blobs]


def expected(model: Model, data: Any) -> Any:
    """What a net on the CPU gives that has the parameters of the model's."""
    param = text_format.Parse(NET, caffe_pb2.NetParameter())
    param.layer[0].input_param.shape[0].dim[0] = len(data)
    net = Net(param, LayerContext(CpuBackend(1), caffe_pb2.TEST))
    net.copy_trained_layers_from(model.net.to_proto(), "the model")
    net.backend.from_host(data, net.blobs["data"].data)
    net.forward()
    return net.blobs["i"].host_data()


def check(model: Model, data: Any) -> None:
    np.testing.assert_allclose(model(data)["i"], expected(model, data), rtol=1e-5, atol=1e-3)


def test_folded_weights_leave_and_the_numbers_stay() -> None:
    model, data = make(), images()
    before = numbers(model)
    memory = weakref.ref(blob(model, "c").data.base)
    for _ in range(3):
        check(model, data)
    assert away(model) == FOLDED and memory() is None
    for found, wanted in zip(numbers(model), before, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert away(model) == FOLDED, "reading the numbers for a snapshot takes no memory of the device"
    assert model.net.to_proto().layer[1].blobs[0].data == list(before[0].ravel())
    assert blob(model, "i").allocated("data") is not None


def test_weights_written_between_calls_are_taken_over() -> None:
    model, data = make(), images()
    check(model, data)
    first = model(data)["i"]
    weights = blob(model, "c").data
    assert away(model) == ["d"]
    weights *= 2
    del weights
    np.testing.assert_array_equal(model(data)["i"], first)
    model.parameters_changed()
    check(model, data)
    assert not np.allclose(model(data)["i"], first)
    assert not away(model), "parameters that change are folded on the device"
    blob(model, "d").data[...] += 1
    model.parameters_changed()
    check(model, data)


HELD: dict[str, Callable[[Any], Any]] = {"the array": lambda array: array, "a part of it": lambda array: array[1:]}


@pytest.mark.parametrize("what", HELD)
def test_arrays_that_somebody_keeps_stay_the_parameters(what: str) -> None:
    model, data = make(), images()
    kept = HELD[what](blob(model, "c").data)
    check(model, data)
    assert away(model) == ["d"]
    kept[...] = 7
    model.parameters_changed()
    check(model, data)
    assert np.shares_memory(blob(model, "c").data, kept) and (blob(model, "c").host_data()[1:] == 7).all()


def test_weights_copied_between_calls_are_taken_over() -> None:
    model, data = make(), images()
    check(model, data)
    other = make(CpuBackend(1))
    for each in (blob(other, name) for name in ("c", "d", "i")):
        each.data[...] = np.random.default_rng(8).standard_normal(each.shape)
    model.net.copy_trained_layers_from(other.net.to_proto(), "other")
    model.parameters_changed()
    np.testing.assert_allclose(model(data)["i"], other(data)["i"], rtol=1e-5, atol=1e-3)
    check(model, data)


def test_another_shape_is_folded_and_the_weights_leave_again() -> None:
    model = make()
    for count in (2, 3, 2, 1):
        check(model, images(count))
        assert away(model) == FOLDED
    looked_at = blob(model, "d").data
    check(model, images(4))
    assert away(model) == ["c"], "what somebody looked at stays, to be looked at again"
    del looked_at
    check(model, images(5))
    assert away(model) == ["c"]


def test_weights_that_two_layers_share_stay_where_one_reads_them() -> None:
    shared = 'param { name: "w" } convolution_param { num_output: 4 kernel_size: 3 pad: 1'
    text = NET.replace("convolution_param { num_output: 4 kernel_size: 3 pad: 1", shared) + (
        f'layer {{ name: "f" type: "Convolution" bottom: "c" top: "f" {shared} }} }}'
    )
    model, data = make(text=text), images()
    for _ in range(3):
        found = model(data)
    assert away(model) == ["c"]
    np.testing.assert_allclose(found["f"], make(CpuBackend(1), text)(data)["f"], rtol=1e-5, atol=1e-3)


def test_parameters_shared_across_shapes() -> None:
    text = """
    layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 2 dim: 6 } } }
    layer { name: "a" type: "InnerProduct" bottom: "x" top: "a" param { name: "w" }
      inner_product_param { num_output: 4 bias_term: false weight_filler { type: "xavier" } } }
    layer { name: "b" type: "InnerProduct" bottom: "a" top: "b" param { name: "w" share_mode: PERMISSIVE }
      inner_product_param { num_output: 6 bias_term: false } }
    """
    model = make(text=text)
    x = np.random.default_rng(3).standard_normal((2, 6)).astype(np.float32)
    weights = blob(model, "a").host_data()
    expected = x @ weights.T @ weights.reshape(6, 4).T
    for _ in range(3):
        np.testing.assert_allclose(model(x)["b"], expected, rtol=1e-5, atol=1e-3)
        assert np.array_equal(blob(model, "b").host_data(), weights.reshape(6, 4))
    blob(model, "b").load(-blob(model, "b").host_data())
    model.parameters_changed()
    np.testing.assert_allclose(model(x)["b"], expected, rtol=1e-5, atol=1e-3)
    np.testing.assert_array_equal(blob(model, "a").host_data(), -weights)


def test_a_net_that_shares_the_weights_keeps_them() -> None:
    model, data = make(), images()
    check(model, data)
    other = make()
    other.net.share_trained_layers_with(model.net)
    assert not away(model)
    blob(model, "c").data[...] = 3
    assert (blob(other, "c").host_data() == 3).all()
    for each in (model, other, model):
        each.parameters_changed()
        check(each, data)
        check(each, images(3))
        assert not away(model) and not away(other)


def test_threads_call_and_look_at_the_same_time() -> None:
    model = make()
    inputs = [images(count, seed=count) for count in (1, 2, 3, 4)]
    wanted = [expected(model, data) for data in inputs]
    before = numbers(model)
    stop = threading.Event()

    def look() -> int:
        looks = 0
        while not stop.is_set():
            for found, number in zip(numbers(model), before, strict=True):
                np.testing.assert_array_equal(found, number)
            looks += 1
        return looks

    with ThreadPoolExecutor(4) as threads:
        looking = threads.submit(look)
        calls = [threads.submit(model, inputs[turn % 4]) for turn in range(24)]
        found = [call.result() for call in calls]
        stop.set()
        assert looking.result() > 0
    for turn, each in enumerate(found):
        np.testing.assert_allclose(each["i"], wanted[turn % 4], rtol=1e-5, atol=1e-3)


def test_threads_that_ask_at_the_same_time_get_one_array() -> None:
    model = make()
    model(images())
    barrier = threading.Barrier(4)

    def ask(_: int) -> Any:
        barrier.wait(300)
        return blob(model, "c").data

    with ThreadPoolExecutor(4) as threads:
        first, *others = threads.map(ask, range(4))
    assert all(each is first for each in others)


class Leasing(Leaving):
    """Notes which memory an input or an output may use on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.leased: Any = None
        self.used: list[Any] = []

    @contextmanager
    def workspace_lease(self, buffer: Any) -> Iterator[None]:
        self.leased = buffer
        try:
            yield
        finally:
            self.leased = None

    def upload(self, host: Any, destination: Any) -> None:
        self.used.append(self.leased)
        super().upload(host, destination)

    def download(self, arrays: Any) -> Any:
        self.used.append(self.leased)
        return super().download(arrays)


def test_inputs_and_outputs_use_the_memory_of_the_blobs_on_their_way() -> None:
    device = Leasing()
    model = make(device)
    for count in (2, 3):
        device.used.clear()
        check(model, images(count))
        arena = next(reversed(model._executors.values())).arena
        assert arena is not None and len(device.used) == 2 and all(each is arena for each in device.used)

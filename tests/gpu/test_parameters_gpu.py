"""Weights that no pass reads lie in host memory on a GPU too, and come back whoever asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy import pycaffe as caffe
from caffepy.backend import Backend, create_backend
from caffepy.formats.proto import caffe_pb2
from caffepy.infer.model import Model
from caffepy.layers.blob import Blob
from caffepy.layers.layer import LayerContext
from caffepy.net import Net
from caffepy.net.executor import ForwardExecutor

KINDS = ("FLOAT", "FLOAT16", "BFLOAT16")
NET = """
name: "small"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 16 dim: 12 dim: 12 } } }
layer { name: "c" type: "Convolution" bottom: "data" top: "c"
  convolution_param { num_output: 32 kernel_size: 3 pad: 1 bias_term: false weight_filler { type: "msra" } } }
layer { name: "n" type: "BatchNorm" bottom: "c" top: "c" }
layer { name: "s" type: "Scale" bottom: "c" top: "c" scale_param { bias_term: true } }
layer { name: "r" type: "ReLU" bottom: "c" top: "c" }
layer { name: "d" type: "Convolution" bottom: "c" top: "d"
  convolution_param { num_output: 32 kernel_size: 3 pad: 1 weight_filler { type: "msra" } } }
layer { name: "e" type: "ReLU" bottom: "d" top: "d" }
layer { name: "p" type: "Pooling" bottom: "d" top: "p" pooling_param { pool: AVE global_pooling: true } }
layer { name: "i" type: "InnerProduct" bottom: "p" top: "i"
  inner_product_param { num_output: 8 weight_filler { type: "xavier" } bias_filler { type: "constant" value: 0.5 } } }
"""
LEAVING = {"FLOAT": ["c"], "FLOAT16": ["c", "d", "i"], "BFLOAT16": ["c", "d", "i"]}
"""Layers whose weights are folded or, in half precision, copied."""


@pytest.fixture(scope="module")
def gpu() -> Iterator[Backend]:
    """A GPU whose scratch memory nobody else uses."""
    made = create_backend(0, math="fp32", autotune=False)
    yield made
    made.close()


def images(count: int = 2, seed: int = 1) -> Any:
    return np.random.default_rng(seed).standard_normal((count, 16, 12, 12)).astype(np.float32)


def make(gpu: Backend, kind: str, weights: Any = None) -> Model:
    param = text_format.Parse(NET, caffe_pb2.NetParameter())
    param.default_forward_type = param.default_backward_type = caffe_pb2.Type.Value(kind)
    return Model(param, LayerContext(gpu, caffe_pb2.TEST, seed=5), [(weights, "a test")] if weights else [])


def blob(model: Model, layer: str) -> Blob:
    return model.net.layers[model.net.layer_names.index(layer)].blobs[0]


def away(net: Net) -> list[str]:
    return [layer.name for layer in net.layers if any(blob.is_offloaded for blob in layer.blobs)]


def check(model: Model, gpu: Backend, kind: str, count: int = 2) -> None:
    """Replays give the bits of a new model, with the same parameters, whose weights somebody holds on the device."""
    fresh = make(gpu, kind, model.net.to_proto())
    held = [each.data for layer in fresh.net.layers for each in layer.blobs]
    wanted = fresh(images(count))["i"]
    assert held and not away(fresh.net)
    for _ in range(3):
        np.testing.assert_array_equal(model(images(count))["i"], wanted)
    fresh.close()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_leave_and_passes_and_files_are_the_same(gpu: Backend, kind: str) -> None:
    model = make(gpu, kind)
    before = model.net.to_proto().SerializeToString()
    for count in (2, 3, 2):
        check(model, gpu, kind, count)
        assert away(model.net) == LEAVING[kind]
    assert all(runner.captured for runner in model._executors.values())
    assert model.net.to_proto().SerializeToString() == before
    assert away(model.net) == LEAVING[kind]
    model.close()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_written_between_passes(gpu: Backend, kind: str) -> None:
    model = make(gpu, kind)
    kept = blob(model, "d").data
    check(model, gpu, kind)
    first = model(images())["i"]
    for name in ("c", "i"):
        with gpu.activate():
            gpu.from_host(blob(model, name).host_data() * np.float32(1.5), blob(model, name).data)
    with gpu.activate():
        gpu.fill(kept, 0.01)
    if kind != "FLOAT":  # in FLOAT passes read weights as they are
        np.testing.assert_array_equal(model(images())["i"], first)
    model.parameters_changed()
    check(model, gpu, kind)
    check(model, gpu, kind, 5)
    assert not np.allclose(model(images())["i"], first) and not away(model.net)
    model.close()


def test_weights_that_come_back_can_be_used_at_once_on_another_stream(gpu: Backend) -> None:
    import cupy

    model = make(gpu, "FLOAT16")
    wanted = {name: blob(model, name).host_data() for name in LEAVING["FLOAT16"]}
    model(images())
    assert away(model.net) == LEAVING["FLOAT16"]
    with cupy.cuda.Stream(non_blocking=True):
        for name, values in wanted.items():
            np.testing.assert_array_equal(blob(model, name).data.get(), values)
    model.close()


def test_parameters_are_filled_whoever_asks_first(gpu: Backend) -> None:
    """On no stream of the backend's: the zeros of new memory must not come behind the filler's values."""
    for _ in range(20):
        model = make(gpu, "FLOAT16")
        assert all(np.abs(blob(model, name).host_data()).max() > 0 for name in ("c", "d", "i"))
        model.close()


def test_inputs_on_their_way_lie_in_the_nets_arena() -> None:
    own = create_backend(0, math="fp32", autotune=False)
    model, large = make(own, "FLOAT16"), images(400)
    for _ in range(3):
        model(large)
    waiting = own._scratch._buffers.get("upload")  # type: ignore[attr-defined]
    assert large.nbytes > 3 * 2**20 and (waiting is None or waiting.nbytes < 2**20)
    wanted = model(large)["i"]
    model(-large)
    np.testing.assert_array_equal(model(large)["i"], wanted)
    model.close()
    own.close()


def test_threads_call_and_read_at_the_same_time(gpu: Backend) -> None:
    model = make(gpu, "FLOAT16")
    inputs = [images(count, seed=count) for count in (1, 2, 3)]
    wanted = [model(each)["i"] for each in inputs]
    weights = {name: blob(model, name).host_data() for name in LEAVING["FLOAT16"]}

    def work(turn: int) -> None:
        if turn % 4 == 3:
            for name, values in weights.items():
                np.testing.assert_array_equal(blob(model, name).host_data(), values)
        else:
            np.testing.assert_array_equal(model(inputs[turn % 4])["i"], wanted[turn % 4])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(80)))
    assert away(model.net) == LEAVING["FLOAT16"]
    model.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_net_that_is_made_while_the_stream_is_busy(gpu: Backend, kind: str) -> None:
    """Outside of `activate`, where CuPy's stream is another one: BatchNorm's ones were cleared after they were set."""
    param = text_format.Parse(NET, caffe_pb2.NetParameter())
    param.default_forward_type = param.default_backward_type = caffe_pb2.Type.Value(kind)
    results = []
    for busy in (False, True):
        with gpu.activate():
            factor, product = gpu.zeros((4096, 4096)), gpu.zeros((4096, 4096))
            gpu.synchronize()
            for _ in range(200 * busy):
                gpu.gemm(factor, factor, product)
        net = Net(param, LayerContext(gpu, caffe_pb2.TEST, seed=5), fuse=True)
        with gpu.activate():
            gpu.from_host(images(), net.blobs["data"].data)
            net.forward()
            results.append(net.blobs["i"].host_data())
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_a_net_that_is_scored_as_caffepy_test_scores_it(gpu: Backend, kind: str) -> None:
    param = text_format.Parse(NET, caffe_pb2.NetParameter())
    param.default_forward_type = param.default_backward_type = caffe_pb2.Type.Value(kind)
    nets = [Net(param, LayerContext(gpu, caffe_pb2.TEST, seed=5), fuse=True) for _ in range(2)]
    results = []
    with gpu.activate():
        for net, leaves in zip(nets, (False, True), strict=True):
            runner = ForwardExecutor(net)
            if leaves:
                runner.offload_to_host()
            gpu.from_host(images(), net.blobs["data"].data)
            for _ in range(3):
                runner.forward()
                results.append(net.blobs["i"].host_data())
            assert runner.captured and away(net) == (LEAVING[kind] if leaves else [])
            runner.close()
    for found in results:
        np.testing.assert_array_equal(found, results[0])


def keep_busy(gpu: Any, seconds: float = 0.2) -> None:
    """Give the backend's stream something to do, so that what follows there comes late."""
    from caffepy.backend.cuda.compiler import launch_blocks, library_kernel

    with gpu.activate():
        launch_blocks(library_kernel("tuning", "idle"), (1,), (1,), (int(1e9 * seconds),))


@pytest.mark.parametrize("kind", KINDS)
def test_a_net_that_is_built_outside_of_activate_on_a_busy_gpu(gpu: Backend, kind: str) -> None:
    """BatchNorm's factors of 1 must not be overtaken by the zeros of their memory: the scores were the bias alone."""
    param = text_format.Parse(NET, caffe_pb2.NetParameter())
    param.default_forward_type = param.default_backward_type = caffe_pb2.Type.Value(kind)
    results = []
    for seconds in (0.0, 0.2):
        keep_busy(gpu, seconds)
        net = Net(param, LayerContext(gpu, caffe_pb2.TEST, seed=5), fuse=True)
        with gpu.activate():
            gpu.from_host(images(), net.blobs["data"].data)
            net.forward()
            results.append(net.blobs["i"].host_data())
        net.close()
    assert np.ptp(results[0]) > 0
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("name", ["fill", "from_host", "copy", "add"])
def test_what_is_written_to_new_memory_comes_behind_its_zeros(gpu: Backend, name: str, active: bool) -> None:
    """Also where a net is built outside of `activate`: BatchNorm's factors were zeros on a busy GPU."""
    keep_busy(gpu, 0.2)
    with gpu.activate() if active else nullcontext():
        array, other = gpu.zeros((5,)), gpu.zeros((5,))
        gpu.fill(other, 3)
        work = {
            "fill": lambda: gpu.fill(array, 3),
            "from_host": lambda: gpu.from_host(np.full(5, 3, np.float32), array),
            "copy": lambda: gpu.copy(other, array),
            "add": lambda: gpu.add(other, array),
        }
        work[name]()
    np.testing.assert_array_equal(gpu.to_host(array), np.full(5, 3))


def test_memory_that_another_stream_still_writes_to_is_not_taken(gpu: Backend) -> None:
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as other:
        keep_busy(gpu, 0.0)  # loads the kernel
        block = cupy.empty(1000, "float32")
        from caffepy.backend.cuda.compiler import launch_blocks, library_kernel

        launch_blocks(library_kernel("tuning", "idle"), (1,), (1,), (200_000_000,))
        block.data.memset_async(0, block.nbytes, other)
        del block
        array = gpu.zeros((1000,))
        gpu.fill(array, 1)
        gpu.synchronize()
        other.synchronize()
        np.testing.assert_array_equal(gpu.to_host(array), np.ones(1000, np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_programs_of_pycaffe(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes, a snapshot, weights that are looked at and written, another net that shares them."""
    path, types = tmp_path / "net.prototxt", f"default_forward_type: {kind} default_backward_type: {kind}\n"
    path.write_text(types + NET)
    caffe.set_device(0)
    caffe.set_mode_gpu()
    caffe.set_random_seed(3)
    try:
        net, other = caffe.Net(path, caffe.TEST), caffe.Net(path, caffe.TEST)
        first = net.forward(data=images())["i"].copy()
        before = net._core.to_proto().SerializeToString()
        for _ in range(3):
            found = net.forward(data=images())["i"].copy()
        assert away(net._core) == LEAVING[kind] and net._inference._last is not None
        assert np.abs(found - first).max() < 0.05 * np.abs(first).max()
        net.save(tmp_path / "saved.caffemodel")
        assert net._core.to_proto().SerializeToString() == before
        other.copy_from(tmp_path / "saved.caffemodel")
        other.forward(data=images())
        np.testing.assert_array_equal(other.forward(data=images())["i"], found)
        net.params["c"][0].data[...] *= 2  # from here on the net's own layers run
        doubled = net.forward(data=images())["i"].copy()
        assert not np.allclose(doubled, first)
        other.share_with(net)
        np.testing.assert_array_equal(other.forward(data=images())["i"], doubled)
        net.params["c"][0].data[...] *= 0.5
        np.testing.assert_array_equal(net.forward(data=images())["i"], first)
        np.testing.assert_array_equal(other.forward(data=images())["i"], first)
    finally:
        caffe.set_mode_cpu()

"""`import caffe` on a GPU: blobs that are written on the host, captured training with callbacks, Python layers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from random_programs import run_program
from shared_memory_programs import Program

from caffepy import pycaffe as caffe
from caffepy.pycaffe.device import mode

NET = """
name: 'small' force_backward: true
layer { name: 'data' type: 'Input' top: 'data' input_param { shape { dim: 8 dim: 2 dim: 5 dim: 6 } } }
layer { name: 'label' type: 'Input' top: 'label' input_param { shape { dim: 8 } } }
layer { name: 'conv' type: 'Convolution' bottom: 'data' top: 'conv'
  convolution_param { num_output: 8 kernel_size: 3 pad: 1 weight_filler { type: 'xavier' } } }
layer { name: 'relu' type: 'ReLU' bottom: 'conv' top: 'conv' }
layer { name: 'ip' type: 'InnerProduct' bottom: 'conv' top: 'ip'
  inner_product_param { num_output: 10 weight_filler { type: 'xavier' } } }
layer { name: 'loss' type: 'SoftmaxWithLoss' bottom: 'ip' bottom: 'label' top: 'loss' }
"""

SOLVER = "net: '{}' base_lr: 0.05 momentum: 0.9 lr_policy: 'fixed' max_iter: 8 snapshot_prefix: '{}' random_seed: 7"

LAYER = """
from caffepy import pycaffe as caffe

class Halve(caffe.Layer):
    def setup(self, bottom, top): self.blobs.add_blob(1); self.blobs[0].data[0] = 0.5
    def reshape(self, bottom, top): top[0].reshape(*bottom[0].shape)
    def forward(self, bottom, top): top[0].data[...] = self.blobs[0].data[0] * bottom[0].data
    def backward(self, top, propagate_down, bottom):
        self.blobs[0].diff[0] += (top[0].diff * bottom[0].data).sum()
        bottom[0].diff[...] = self.blobs[0].data[0] * top[0].diff
"""


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    before = asdict(mode)
    caffe.set_device(0)
    caffe.set_mode_gpu()
    caffe.set_math("fp32")
    yield
    for name, value in before.items():
        setattr(mode, name, value)


@pytest.fixture
def net_file(tmp_path: Path) -> Path:
    path = tmp_path / "net.prototxt"
    path.write_text(NET)
    return path


@pytest.fixture
def solver_file(net_file: Path, tmp_path: Path) -> Path:
    path = tmp_path / "solver.prototxt"
    path.write_text(SOLVER.format(net_file, tmp_path / "m"))
    return path


def fill(net: caffe.Net) -> None:
    net.blobs["data"].data[...] = np.random.default_rng(0).normal(size=net.blobs["data"].shape)
    net.blobs["label"].data[...] = np.arange(8)


def on_cpu(path: Path, phase: int, weights: Path) -> caffe.Net:
    caffe.set_mode_cpu()
    net = caffe.Net(path, phase, weights=weights)
    caffe.set_mode_gpu()
    return net


def test_passes_agree_with_the_cpu(net_file: Path, tmp_path: Path) -> None:
    net = caffe.Net(net_file, caffe.TRAIN)
    assert net.net.backend.name == "cuda:0"
    net.save(tmp_path / "w.caffemodel")
    other = on_cpu(net_file, caffe.TRAIN, tmp_path / "w.caffemodel")
    for each in (net, other):
        fill(each)
        each.forward()
        each.backward()
    for name in net.blobs:
        assert net.blobs[name].data.flags.c_contiguous
        np.testing.assert_allclose(net.blobs[name].data, other.blobs[name].data, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(net.blobs[name].diff, other.blobs[name].diff, rtol=1e-4, atol=1e-5)
    for name, blobs in net.params.items():
        for mine, theirs in zip(blobs, other.params[name], strict=True):
            np.testing.assert_allclose(mine.diff, theirs.diff, rtol=1e-4, atol=1e-5)


def test_host_arrays_are_written_through_and_kept_up_to_date(net_file: Path) -> None:
    net = caffe.Net(net_file, caffe.TRAIN)
    fill(net)
    held, diff = net.blobs["ip"].data, net.params["conv"][0].diff
    bias = net.params["ip"][1].data
    net.forward()
    first = held.copy()
    bias[...] = 3  # kept from before the pass, and written without asking for it again
    net.forward()
    np.testing.assert_allclose(held, first + 3, rtol=1e-4, atol=1e-5)
    net.backward()
    once = diff.copy()
    net.backward()
    np.testing.assert_allclose(diff, 2 * once, rtol=1e-4, atol=1e-6)
    net.clear_param_diffs()
    assert not diff.any()
    net.blobs["conv"].data.reshape(-1)[...] = 1  # channels last on the device
    net.forward(start="ip", end="ip")
    weights = net.params["ip"][0].data
    np.testing.assert_allclose(held, np.tile(weights.sum(1) + 3, (8, 1)), rtol=1e-4, atol=1e-4)


def test_arrays_outlive_the_net_and_reshape_keeps_numbers(net_file: Path) -> None:
    net = caffe.Net(net_file, caffe.TEST)
    fill(net)
    blob, kept = net.blobs["data"], net.blobs["data"].data
    then = kept.copy()
    net.forward()
    del net
    np.testing.assert_array_equal(kept, then)
    blob.reshape(16, 60)
    np.testing.assert_array_equal(blob.data.reshape(-1)[: then.size], then.reshape(-1))


def test_captured_training_is_eager_training(solver_file: Path) -> None:
    weights = []
    for eager in (False, True):
        solver = caffe.SGDSolver(solver_file)
        fill(solver.net)
        if eager:
            solver.net.before_forward(lambda layer: None)
        solver.step(6)
        assert solver.solver.graph_executor.captured is not eager
        weights.append(solver.net.params["conv"][0].data.copy())
    np.testing.assert_array_equal(*weights)


def test_inputs_and_weights_written_between_replays_count(solver_file: Path) -> None:
    solver = caffe.SGDSolver(solver_file)
    fill(solver.net)
    solver.step(4)
    assert solver.solver.graph_executor.captured
    for blobs in solver.net.params.values():
        for blob in blobs:
            blob.data[...] = 0
    solver.step(1)
    np.testing.assert_allclose(solver.net.blobs["loss"].data, np.log(10), rtol=1e-5)
    solver.net.blobs["data"].reshape(4, 2, 5, 6)
    solver.net.blobs["label"].reshape(4)
    solver.step(2)
    assert solver.net.blobs["ip"].data.shape == (4, 10) and np.isfinite(solver.net.blobs["loss"].data)


def test_callbacks_change_gradients_between_graphs(solver_file: Path) -> None:
    solver = caffe.SGDSolver(solver_file)
    fill(solver.net)
    solver.step(2)
    before = solver.net.params["conv"][0].data.copy()
    calls = []

    def clear() -> None:
        calls.append(float(np.abs(solver.net.params["conv"][0].diff).sum()))
        for blobs in solver.net.params.values():
            for blob in blobs:
                blob.diff[...] = 0

    solver.param.momentum = 0
    solver.add_callback(lambda: calls.append(0.0), clear)
    solver.step(3)
    assert len(calls) == 6 and all(calls[1::2]) and solver.solver.graph_executor.captured
    np.testing.assert_array_equal(solver.net.params["conv"][0].data, before)


def test_apply_update(solver_file: Path) -> None:
    solver = caffe.SGDSolver(solver_file)
    held = solver.net.params["ip"][0].data
    held[...] = 0
    solver.net.params["ip"][0].diff[...] = 1
    solver.apply_update()
    np.testing.assert_allclose(held, -0.05, rtol=1e-6)


def test_a_python_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halve_layer.py").write_text(LAYER)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("halve_layer", None)
    path = tmp_path / "net.prototxt"
    path.write_text(
        "name: 'n' force_backward: true input: 'data' input_shape { dim: 2 dim: 3 dim: 4 dim: 5 } "
        "layer { name: 'h' type: 'Python' bottom: 'data' top: 'h' "
        "python_param { module: 'halve_layer' layer: 'Halve' } }"
    )
    net = caffe.Net(path, caffe.TRAIN)
    net.blobs["data"].data[...] = 6
    net.blobs["h"].diff[...] = 2
    assert (net.forward()["h"] == 3).all() and (net.backward()["data"] == 1).all()
    assert net.layers[1].blobs[0].diff[0] == net.params["h"][0].diff[0] == 2 * 6 * 120
    net.layers[1].blobs[0].data[0] = 2
    assert (net.forward()["h"] == 12).all()


def test_files(net_file: Path, tmp_path: Path) -> None:
    net = caffe.Net(net_file, caffe.TRAIN)
    net.params["conv"][0].data[...] = np.arange(144).reshape(8, 2, 3, 3)
    net.save_hdf5(tmp_path / "w.h5")
    other = caffe.Net(net_file, caffe.TEST)
    held = other.params["conv"][0].data
    other.load_hdf5(tmp_path / "w.h5")
    np.testing.assert_array_equal(held, np.arange(144).reshape(8, 2, 3, 3))


def test_half_precision_blobs_are_float32_on_the_host(net_file: Path) -> None:
    path = net_file.parent / "half.prototxt"
    path.write_text("default_forward_type: FLOAT16 default_backward_type: FLOAT16 " + NET)
    net = caffe.Net(path, caffe.TRAIN)
    fill(net)
    assert all(blob.data.dtype == np.float32 for blob in net.blobs.values())
    assert not any("_as_" in name for name in net.blobs) and len(net.layers) == 6
    net.params["ip"][0].data[...] = 0
    net.params["ip"][1].data[...] = 0
    np.testing.assert_allclose(net.forward()["loss"], np.log(10), rtol=1e-3)
    net.backward()
    assert np.isfinite(net.params["ip"][1].diff).all() and net.params["ip"][1].diff.any()


FOLDED = """
name: 'folded'
layer { name: 'data' type: 'Input' top: 'data' input_param { shape { dim: 2 dim: 8 dim: 12 dim: 12 } } }
layer { name: 'c' type: 'Convolution' bottom: 'data' top: 'c'
  convolution_param { num_output: 16 kernel_size: 3 weight_filler { type: 'xavier' } } }
layer { name: 'bn' type: 'BatchNorm' bottom: 'c' top: 'bn' }
layer { name: 's' type: 'Scale' bottom: 'bn' top: 's' scale_param { bias_term: true } }
layer { name: 'r' type: 'ReLU' bottom: 's' top: 's' }
layer { name: 'pool' type: 'Pooling' bottom: 's' top: 'pool' pooling_param { pool: AVE global_pooling: true } }
layer { name: 'ip' type: 'InnerProduct' bottom: 'pool' top: 'ip'
  inner_product_param { num_output: 10 weight_filler { type: 'xavier' } } }
layer { name: 'prob' type: 'Softmax' bottom: 'ip' top: 'prob' }
"""


def captured(net: caffe.Net) -> bool:
    """Whether the last pass was a graph."""
    last = net._inference._last
    return last is not None and last.captured


def folded(net: caffe.Net) -> bool:
    """Whether passes run the folded net, which hides blobs."""
    return net._inference.active


def folded_pair(tmp_path: Path) -> tuple[caffe.Net, caffe.Net]:
    """A net and one with the same parameters that always runs layer by layer."""
    path = tmp_path / "folded.prototxt"
    path.write_text(FOLDED)
    nets = []
    for plain in (False, True):
        caffe.set_random_seed(5)
        caffe.set_layer_by_layer(plain)
        nets.append(caffe.Net(path, caffe.TEST))
        for seed, name in enumerate(("bn", "s")):
            for blob in nets[-1].params[name]:
                blob.data[...] = np.random.default_rng(seed).uniform(0.5, 2, blob.shape)
        nets[-1].params["bn"][2].data[...] = 1
    return nets[0], nets[1]


def images(seed: int, shape: tuple[int, ...] = (2, 8, 12, 12)) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def agree(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)  # TF32, by kernels of different shapes


@pytest.mark.parametrize("math", ["fp32", "tf32"])
def test_passes_are_captured_and_hidden_blobs_are_those_of_the_last_pass(tmp_path: Path, math: str) -> None:
    caffe.set_math(math)
    net, plain = folded_pair(tmp_path)
    kept = net.blobs["prob"].data
    for seed in range(5):
        for each in (net, plain):
            each.forward(data=images(seed))
        agree(kept, plain.blobs["prob"].data)
    assert captured(net)
    for each in (net, plain):
        each.blobs["data"].data[...] = images(8)  # of a pass that has not run
    for name in plain.blobs:
        agree(net.blobs[name].data, plain.blobs[name].data)
    assert not folded(net)
    agree(net.forward()["prob"], plain.forward()["prob"])


def test_captured_passes_of_several_shapes(tmp_path: Path) -> None:
    net, plain = folded_pair(tmp_path)
    for turn in range(4):
        for shape in ((2, 8, 12, 12), (1, 8, 20, 16), (4, 8, 7, 9)):
            for each in (net, plain):
                each.blobs["data"].reshape(*shape)
                each.forward(data=images(turn, shape))
            agree(net.blobs["prob"].data, plain.blobs["prob"].data)
            assert turn < 3 or captured(net)


def test_weights_changed_after_captured_passes(tmp_path: Path) -> None:
    net, plain = folded_pair(tmp_path)
    plain.params["c"][0].data[...] *= -1
    plain.save(tmp_path / "other.caffemodel")
    for each in (net, plain):
        for seed in range(4):
            each.forward(data=images(seed))
        each.copy_from(tmp_path / "other.caffemodel")
        each.forward(data=images(9))
    assert captured(net)
    agree(net.blobs["prob"].data, plain.blobs["prob"].data)
    for each in (net, plain):
        each.params["ip"][1].data[3] += 2
        each.forward()
    assert not folded(net)
    agree(net.blobs["prob"].data, plain.blobs["prob"].data)


def test_hidden_blobs_give_their_memory_back(tmp_path: Path) -> None:
    net, _ = folded_pair(tmp_path)
    for seed in range(3):
        net.forward(data=images(seed))
    assert [net._core.blobs[name].allocated("data") for name in ("c", "bn", "pool", "ip")] == [None] * 4


def test_a_captured_solver_shares_another_nets_values(net_file: Path, tmp_path: Path) -> None:
    """Graphs that know the old memory are dropped; training goes on as if the values had been copied."""
    settings = tmp_path / "shared.prototxt"
    settings.write_text(SOLVER.format(net_file, tmp_path / "s"))
    solver, twin, other = caffe.SGDSolver(settings), caffe.SGDSolver(settings), caffe.Net(net_file, caffe.TRAIN)
    random = np.random.default_rng(0)
    values = {name: random.integers(0, 10, blob.shape) for name, blob in other.blobs.items() if name in other.inputs}
    for net in (solver.net, twin.net, other):
        for name, numbers in values.items():
            net.blobs[name].data[...] = numbers / (1 if name == "label" else 10)
    for each in (solver, twin):
        each.step(4)
    other.forward()
    other.backward()
    solver.net.share_with(other)
    for name, blobs in twin.net.params.items():
        for mine, theirs in zip(blobs, other.params[name], strict=True):
            mine.data[...] = theirs.data
    for _ in range(2):
        for each in (solver, twin):
            each.step(3)
        for name, blobs in twin.net.params.items():
            for mine, theirs, shared in zip(blobs, solver.net.params[name], other.params[name], strict=True):
                np.testing.assert_array_equal(theirs.data, shared.data)
                np.testing.assert_allclose(theirs.data, mine.data, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first", range(1900, 1940, 10))
def test_random_programs_do_what_caffe_does(first: int) -> None:
    for seed in range(first, first + 10):
        run_program(seed, steps=30)


def test_programs_that_write_before_a_pass_do_what_caffe_does() -> None:
    for seed in range(2001, 2031):
        run_program(seed, 25, Program)

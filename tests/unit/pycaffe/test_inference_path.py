"""Passes of `caffe.Net` on the folded net: when they run so, and that a program sees what it always saw."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_graph_backend import FakeGraphBackend, Leaving

from caffepy import pycaffe as caffe
from caffepy.errors import DataError, ShapeError
from caffepy.net.executor import ForwardExecutor
from caffepy.pycaffe import device as settings
from caffepy.pycaffe.device import Device

NET = """
name: 'n'
layer { name: 'data' type: 'Input' top: 'data' input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: 'spare' type: 'Input' top: 'spare' input_param { shape { dim: 2 } } include { phase: TRAIN } }
layer { name: 'c' type: 'Convolution' bottom: 'data' top: 'c'
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: 'xavier' } } }
layer { name: 'bn' type: 'BatchNorm' bottom: 'c' top: 'bn' }
layer { name: 's' type: 'Scale' bottom: 'bn' top: 's' scale_param { bias_term: true } }
layer { name: 'r' type: 'ReLU' bottom: 's' top: 's' }
layer { name: 'pool' type: 'Pooling' bottom: 's' top: 'pool' pooling_param { pool: AVE global_pooling: true } }
layer { name: 'ip' type: 'InnerProduct' bottom: 'pool' top: 'ip'
  inner_product_param { num_output: 5 weight_filler { type: 'xavier' } } }
layer { name: 'prob' type: 'Softmax' bottom: 'ip' top: 'prob' }
layer { name: 'flat' type: 'Flatten' bottom: 's' top: 'flat' }
"""

Program = Callable[[caffe.Net], Any]


def images(seed: int, shape: tuple[int, ...] = (2, 3, 8, 8)) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def make(path: Path, plain: bool = False) -> caffe.Net:
    """The net, with statistics and scales that change numbers."""
    caffe.set_random_seed(3)
    caffe.set_layer_by_layer(plain)
    net = caffe.Net(path, caffe.TEST)
    for seed, name in enumerate(("bn", "s")):
        for blob in net.params[name]:
            blob.data[...] = np.random.default_rng(seed).uniform(0.5, 2, blob.shape)
    net.params["bn"][2].data[...] = 1
    return net


@pytest.fixture
def path(write) -> Path:
    return write("net.prototxt", NET)


@pytest.fixture
def net(path: Path) -> caffe.Net:
    return make(path)


class Passes:
    """What a net's passes ran on, seen from outside.

    Attributes:
        folded: whether the last pass of a net ran on its folded form.
        runners: those of all folded forms that ran a pass.
    """

    def __init__(self) -> None:
        self.folded: weakref.WeakKeyDictionary[caffe.Net, bool] = weakref.WeakKeyDictionary()
        self.runners: weakref.WeakSet[ForwardExecutor] = weakref.WeakSet()
        self._count = 0

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        of_net, of_runner = caffe.Net.forward, ForwardExecutor.forward

        def run_net(net: caffe.Net, *arguments: Any, **named: Any) -> Any:
            before = self._count
            result = of_net(net, *arguments, **named)
            self.folded[net] = self._count > before
            return result

        def run_folded(runner: ForwardExecutor) -> None:
            of_runner(runner)
            self.runners.add(runner)
            self._count += 1

        monkeypatch.setattr(caffe.Net, "forward", run_net)
        monkeypatch.setattr(ForwardExecutor, "forward", run_folded)


PASSES = Passes()


@pytest.fixture(autouse=True)
def watched() -> Iterator[None]:
    PASSES.runners.clear()
    with pytest.MonkeyPatch.context() as patch:
        PASSES.watch(patch)
        yield


def folded(net: caffe.Net) -> bool:
    """Whether the last pass ran on the folded net."""
    return PASSES.folded[net]


def is_folded_again(net: caffe.Net) -> bool:
    """Whether one of the next passes runs on the folded net."""
    found = []
    for seed in range(2):
        net.forward(data=images(seed))
        found.append(folded(net))
    return any(found)


def begin(net: caffe.Net, passes: int = 2) -> None:
    for seed in range(passes):
        net.forward(data=images(seed))


def agree(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_second_pass_is_folded_and_outputs_are_the_same(path: Path) -> None:
    net, plain = make(path), make(path, plain=True)
    for seed in range(4):
        for name, array in net.forward(data=images(seed)).items():
            agree(array, plain.forward(data=images(seed))[name])
        assert folded(net) is (seed > 0) and not folded(plain)


def test_arrays_of_inputs_and_outputs_are_kept_up_to_date(path: Path) -> None:
    net, plain = make(path), make(path, plain=True)
    kept = [(each.blobs["data"].data, each.blobs["prob"].data, each.blobs["flat"].data) for each in (net, plain)]
    for seed in range(4):
        for data, _, _ in kept:
            data[...] = images(seed)
        net.forward()
        plain.forward()
        for mine, theirs in zip(*kept, strict=True):
            agree(mine, theirs)
    assert folded(net)
    assert net.blobs["prob"].data.any()
    _ = net.blobs["c"].data  # layer by layer again
    for data, _, _ in kept:
        data[...] = images(9)
    net.forward()
    plain.forward()
    for mine, theirs in zip(*kept, strict=True):
        agree(mine, theirs)


@pytest.mark.parametrize("name", ["c", "bn", "s", "pool", "ip"])
def test_hidden_blobs_have_the_last_pass_numbers(path: Path, name: str) -> None:
    nets = make(path), make(path, plain=True)
    for net in nets:
        begin(net, 3)
        net.blobs["data"].data[...] = images(7)  # of a pass that has not run
        net.blobs["prob"].data[...] = 0.5
    assert folded(nets[0])
    agree(nets[0].blobs[name].data, nets[1].blobs[name].data)
    agree(nets[0].blobs["data"].data, images(7))
    assert (nets[0].blobs["prob"].data == 0.5).all()
    agree(nets[0].forward()["prob"], nets[1].forward()["prob"])
    assert not folded(nets[0])


def test_hidden_blobs_need_no_memory_meanwhile(net: caffe.Net) -> None:
    begin(net)
    core = net._core
    assert [core.blobs[name].allocated("data") for name in ("c", "bn", "pool", "ip")] == [None] * 4
    assert all(b.allocated is None for layer in core.layers for b in layer.scratch_buffers.values())


LOOKS: dict[str, Program] = {
    "hidden": lambda net: net.blobs["ip"].data,
    "returned": lambda net: net.forward(blobs=["ip"]),
    "backward": lambda net: net.backward(),
    "part": lambda net: net.forward(start="ip"),
    "numbers": lambda net: net._forward(0, 1),
    "callback": lambda net: net.after_forward(lambda layer: None),
    "core": lambda net: net.net,
    "core layer": lambda net: net.layers[1].layer,
    "core blob": lambda net: net.blobs["c"].blob,
    "reshape": lambda net: net.blobs["ip"].reshape(1),
    "share": lambda net: net.share_with(net),
    "layer": lambda net: net.layers[2].reshape([net.blobs["c"]], [net.blobs["bn"]]),
    "parameters": lambda net: net.params["ip"][0].data,
}


@pytest.mark.parametrize("look", LOOKS)
def test_what_lets_it_run_layer_by_layer_for_good(net: caffe.Net, look: str) -> None:
    begin(net)
    assert folded(net)
    LOOKS[look](net)
    begin(net)
    gc.collect()
    assert not is_folded_again(net)


LEAVE: dict[str, Program] = {
    "shapes": lambda net: [blob.shape for blob in net.blobs.values()],
    "outputs": lambda net: net.blobs["prob"].data,
    "save": lambda net: net.save(net.folder / "w.caffemodel"),
    "diff": lambda net: net.blobs["ip"].diff,
    "parameters' diff": lambda net: net.params["ip"][0].diff,
    "names": lambda net: (net.top_names, net.layers, repr(net), net._repr_html_(), net.blob_loss_weights),
    "reshape": lambda net: net.reshape(),
}


@pytest.mark.parametrize("look", LEAVE)
def test_what_does_not(net: caffe.Net, look: str, tmp_path: Path) -> None:
    net.folder = tmp_path
    begin(net)
    LEAVE[look](net)
    begin(net, 1)
    assert folded(net)


def test_looks_before_the_first_pass_do_not_count_once_their_arrays_are_gone(net: caffe.Net) -> None:
    held = net.blobs["ip"].data[0, 1:]
    [each.data.shape for each in net.blobs.values()]
    begin(net, 3)
    assert not folded(net)
    expected = net.forward(data=images(5))["prob"].copy()
    assert held.any()
    del held
    gc.collect()
    agree(net.forward(data=images(5))["prob"], expected)
    assert folded(net)


def test_parameters_written_before_count(path: Path) -> None:
    nets = make(path), make(path, plain=True)
    for net in nets:
        begin(net, 1)
        net.params["c"][0].data[...] *= 2
        weights = net.params["ip"][0].data
        net.forward(data=images(1))
        weights[...] += 1
        del weights
        net.forward(data=images(2))
    assert folded(nets[0])
    agree(nets[0].blobs["prob"].data, nets[1].blobs["prob"].data)


def test_parameters_written_afterwards_count(path: Path) -> None:
    nets = make(path), make(path, plain=True)
    for net in nets:
        begin(net, 3)
        net.params["bn"][1].data[...] *= 3
    agree(nets[0].blobs["c"].data, nets[1].blobs["c"].data)  # of the pass before
    agree(nets[0].blobs["bn"].data, nets[1].blobs["bn"].data)
    agree(nets[0].forward()["prob"], nets[1].forward()["prob"])


def test_parameters_written_through_caffepys_layer_count(path: Path) -> None:
    nets = make(path), make(path, plain=True)
    for net in nets:
        begin(net, 3)
        layer = net.layer_dict["c"].layer
        layer.blobs[0].data[...] *= 3
    agree(nets[0].forward()["prob"], nets[1].forward()["prob"])


@pytest.mark.parametrize("load", ["copy_from", "load_hdf5"])
def test_parameters_from_a_file_count(path: Path, tmp_path: Path, load: str) -> None:
    source = make(path)
    source.params["c"][0].data[...] = 0.5
    source.params["bn"][0].data[...] = -1
    (source.save if load == "copy_from" else source.save_hdf5)(tmp_path / "w")
    nets = make(path), make(path, plain=True)
    for net in nets:
        begin(net, 3)
        getattr(net, load)(tmp_path / "w")
        net.forward(data=images(4))
    assert folded(nets[0])
    agree(nets[0].blobs["prob"].data, nets[1].blobs["prob"].data)


def test_other_shapes(path: Path) -> None:
    nets = make(path), make(path, plain=True)
    for turn in range(2):
        for shape in ((2, 3, 8, 8), (1, 3, 12, 10), (4, 3, 5, 6)):
            for net in nets:
                net.blobs["data"].reshape(*shape)
                if turn:
                    net.reshape()
                net.forward(data=images(turn, shape))
            for name in nets[0].outputs:
                agree(nets[0].blobs[name].data, nets[1].blobs[name].data)
    assert folded(nets[0]) and len(PASSES.runners) == 3
    assert nets[0].blobs["c"].shape == (4, 4, 3, 4)  # as the last pass made it


@pytest.mark.parametrize("reshape", [False, True])
def test_hidden_blobs_after_a_reshape(path: Path, reshape: bool) -> None:
    nets = make(path), make(path, plain=True)
    for net in nets:
        begin(net, 3)
        net.blobs["data"].reshape(1, 3, 9, 9)
        if reshape:
            net.reshape()
    shapes = [[blob.shape for blob in net.blobs.values()] for net in nets]
    assert shapes[0] == shapes[1]
    for name in nets[0].blobs:
        agree(nets[0].blobs[name].data, nets[1].blobs[name].data)
    for net in nets:
        net.forward(data=images(8, (1, 3, 9, 9)))
    for name in nets[0].blobs:
        agree(nets[0].blobs[name].data, nets[1].blobs[name].data)


def test_a_mistake_is_told_as_ever(write) -> None:
    path = write(
        "label.prototxt",
        """
layer { name: 'data' type: 'Input' top: 'data' top: 'label' input_param { shape { dim: 2 dim: 3 } shape { dim: 2 } } }
layer { name: 'ip' type: 'InnerProduct' bottom: 'data' top: 'ip' inner_product_param { num_output: 3 } }
layer { name: 'loss' type: 'SoftmaxWithLoss' bottom: 'ip' bottom: 'label' top: 'loss' }""",
    )
    net = caffe.Net(path, caffe.TEST)
    for _ in range(2):
        net.forward()
    assert folded(net)
    net.blobs["label"].data[...] = 7
    for _ in range(2):
        with pytest.raises(DataError, match=r"layer 'loss'.*label"):
            net.forward()
    net.blobs["label"].data[...] = 1
    agree(net.forward()["loss"], np.log(3))
    net.blobs["data"].reshape(2, 5)
    with pytest.raises(ShapeError, match="layer 'ip'"):
        net.forward()


OTHERS = {
    "a data layer": "layer { name: 'd' type: 'DummyData' top: 'd' dummy_data_param { shape { dim: 2 } } }",
    "files": "layer { name: 'h' type: 'HDF5Output' bottom: 'x' bottom: 'x' hdf5_output_param { file_name: 'F' } }",
    "an input overwritten": "layer { name: 'r' type: 'ReLU' bottom: 'x' top: 'x' }",
    "batch statistics": "layer { name: 'b' type: 'BatchNorm' bottom: 'x' top: 'b' "
    "batch_norm_param { use_global_stats: false } }",
}


@pytest.mark.parametrize("what", OTHERS)
def test_nets_that_are_never_folded(write, what: str, tmp_path: Path) -> None:
    text = "layer { name: 'x' type: 'Input' top: 'x' input_param { shape { dim: 2 dim: 3 dim: 2 dim: 2 } } }"
    net = caffe.Net(write("other.prototxt", text + OTHERS[what].replace("'F'", f"'{tmp_path / 'f.h5'}'")), caffe.TEST)
    for _ in range(3):
        net.forward()
        assert not folded(net)


def test_training_nets_and_solvers_nets_are_never_folded(path: Path, solver_file: Path) -> None:
    solver = caffe.SGDSolver(solver_file)
    for net in (caffe.Net(path, caffe.TRAIN), solver.net, *solver.test_nets):
        for _ in range(3):
            net.forward()
            assert not folded(net)


def test_all_rows_are_run_in_batches(path: Path) -> None:
    net, plain = make(path), make(path, plain=True)
    agree(
        net.forward_all(data=images(1, (7, 3, 8, 8)))["prob"], plain.forward_all(data=images(1, (7, 3, 8, 8)))["prob"]
    )
    assert folded(net)


@pytest.mark.parametrize("plain", [False, True])
def test_threads_run_nets_of_their_own(write, plain: bool) -> None:
    """Nets share no workspace, neither in captured passes nor layer by layer."""
    path = write("wide.prototxt", NET.replace("num_output: 4", "num_output: 32 pad: 1"))
    nets, shape = [make(path, plain) for _ in range(4)], (2, 3, 33, 41)
    for net in nets:
        net.blobs["data"].reshape(*shape)
        for _ in range(3):
            net.forward(data=images(0, shape))
    wanted = [nets[0].forward(data=images(seed, shape))["prob"].copy() for seed in range(4)]

    def passes(seed: int) -> list[Any]:
        return [nets[seed].forward(data=images(seed, shape))["prob"].copy() for _ in range(60)]

    with ThreadPoolExecutor(4) as threads:
        for found, right in zip(threads.map(passes, range(4)), wanted, strict=True):
            np.testing.assert_array_equal(found, [right] * len(found))


def test_what_a_program_writes_while_another_net_computes_is_kept(path: Path) -> None:
    net, plain, other = make(path), make(path, plain=True), make(path)
    begin(net)
    written = net.blobs["data"].data
    with other.device.computing():  # in another thread
        written[...] = images(5)
    agree(net.forward()["prob"], plain.forward(data=images(5))["prob"])


def test_weights_that_left_the_device_are_seen_written_saved_and_shared(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(Leaving())
    monkeypatch.setattr(settings, "cpu_device", lambda: device)
    net, other = make(path), make(path)
    monkeypatch.undo()
    plain = make(path, plain=True)
    weights = net._core.layers[1].blobs[0]
    begin(net, 3)
    assert folded(net) and weights.is_offloaded
    net.save(tmp_path / "net.caffemodel")
    assert folded(net) and weights.is_offloaded, "saving takes no memory of the device"
    plain.params["c"][0].data[...] = 0
    plain.copy_from(tmp_path / "net.caffemodel")
    agree(net.forward(data=images(7))["prob"], plain.forward(data=images(7))["prob"])
    for each in (net, plain):
        each.params["c"][0].data[...] *= 3
    for seed in range(2):
        agree(net.forward(data=images(seed))["prob"], plain.forward(data=images(seed))["prob"])
    begin(other, 3)
    assert folded(other) and other._core.layers[1].blobs[0].is_offloaded
    net.share_with(other)
    other.params["c"][0].data[...] = net.params["c"][0].data[...] = -1
    plain.params["c"][0].data[...] = -1
    for each in (net, other):
        agree(each.forward(data=images(4))["prob"], plain.forward(data=images(4))["prob"])


def test_passes_are_captured(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(FakeGraphBackend())
    monkeypatch.setattr(settings, "cpu_device", lambda: device)
    net = make(path)
    monkeypatch.undo()
    plain = make(path, plain=True)
    for seed in range(6):
        shape = (1 + seed % 2, 3, 8, 8)
        for each in (net, plain):
            each.blobs["data"].reshape(*shape)
            each.forward(data=images(seed, shape))
        agree(net.blobs["prob"].data, plain.blobs["prob"].data)
    assert device.backend.launches == 3 and folded(net)
    agree(net.blobs["pool"].data, plain.blobs["pool"].data)


def test_the_folded_nets_are_freed_with_the_net(path: Path) -> None:
    net = make(path)
    begin(net)
    assert len(PASSES.runners) == 1
    del net
    gc.collect()
    assert not PASSES.runners


def test_the_environment_switches_it_off() -> None:
    code = "from caffepy.pycaffe.device import mode; print(mode.layer_by_layer)"
    for value, expected in (("1", "True"), ("0", "False"), ("", "False")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "CAFFEPY_LAYER_BY_LAYER": value},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        assert done.stdout.strip() == expected

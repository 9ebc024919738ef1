"""Layers that users write in Python: what their objects see and write, how modules are found, errors, sharing."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layer_harness import BACKENDS, TEST, TRAIN, Runner, assert_near, gaussian
from training import CPU, build_net, build_solver, solver_param

from caffepy.backend.meta import MetaBackend
from caffepy.data.sharding import Shard
from caffepy.errors import ConfigError, RunError
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import parse_text
from caffepy.layers import LayerContext
from caffepy.net import Net
from caffepy.training.options import TrainOptions
from caffepy.training.p2p_manager import P2PManager

MODULE = '''
import numpy as np
from caffepy.layers.python import PythonLayerBase


class Euclidean:
    """EuclideanLoss in NumPy, as pycaffe's example has it."""

    def setup(self, bottom, top):
        if len(bottom) != 2:
            raise Exception("Need two inputs to compute distance.")

    def reshape(self, bottom, top):
        if bottom[0].count != bottom[1].count:
            raise Exception("Inputs must have the same dimension.")
        self.diff = np.zeros_like(bottom[0].data, dtype=np.float32)
        top[0].reshape(1)

    def forward(self, bottom, top):
        self.diff[...] = bottom[0].data - bottom[1].data
        top[0].data[...] = np.sum(self.diff**2) / bottom[0].num / 2.0

    def backward(self, top, propagate_down, bottom):
        for i, sign in ((0, 1), (1, -1)):
            if propagate_down[i]:
                bottom[i].diff[...] = sign * top[0].diff[0] * self.diff / bottom[i].num


class Affine(PythonLayerBase):
    """y = x * weight, with one parameter; counts its calls."""

    def setup(self, bottom, top):
        self.calls = []
        self.blobs.add_blob(1)
        self.blobs[0].data[...] = float(self.param_str or 1)

    def reshape(self, bottom, top):
        self.calls.append("reshape")
        top[0].reshape(*bottom[0].shape)

    def forward(self, bottom, top):
        top[0].data[...] = bottom[0].data * self.blobs[0].data[0]

    def backward(self, top, propagate_down, bottom):
        self.blobs[0].diff[...] += (top[0].diff * bottom[0].data).sum()
        if propagate_down[0]:
            bottom[0].diff[...] = top[0].diff * self.blobs[0].data[0]


class Failing(Affine):
    def forward(self, bottom, top):
        raise ValueError("no such thing")


class Early(Affine):
    """Writes its gradient in the forward pass."""

    def forward(self, bottom, top):
        super().forward(bottom, top)
        bottom[0].diff[...] = 7

    def backward(self, top, propagate_down, bottom):
        pass


class Incomplete:
    pass


class WithoutReshape(PythonLayerBase):
    def forward(self, bottom, top):
        pass


class WithoutBackward(WithoutReshape):
    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].shape)


LIMITS = {"TRAIN": 3, "TEST": 2}


class Regions:
    """As py-faster-rcnn's layers: settings in param_str_, a table by str(phase), tops whose size forward finds."""

    def setup(self, bottom, top):
        self.stride = int(self.param_str_.split(":")[1])
        top[0].reshape(1, 5)
        top[1].reshape(1, 4)
        top[2].reshape(1, 4)

    def reshape(self, bottom, top):
        """Reshaping happens in forward."""
        pass

    def forward(self, bottom, top):
        best = np.argsort(-bottom[0].data[0, 0].ravel())[: LIMITS[str(self.phase)]]
        rows, columns = np.unravel_index(best, bottom[0].data.shape[2:])
        corners = np.stack([columns, rows], 1) * self.stride
        rois = np.hstack([np.zeros((len(best), 1)), corners, corners + 7])
        top[0].reshape(*rois.shape)
        top[0].data[...] = rois.astype(np.float32, copy=False)
        for blob, value in ((top[1], corners.repeat(2, 1) / 8), (top[2], np.ones((len(best), 4)))):
            blob.reshape(*value.shape)
            blob.data[...] = value

    def backward(self, top, propagate_down, bottom):
        """This layer does not propagate gradients."""
        pass


class Alone(Affine):
    """Fails where two are in `forward` at once."""

    inside = 0
    met = 0

    def forward(self, bottom, top):
        import time

        self.inside += 1
        time.sleep(0.01)
        self.met = max(self.met, self.inside)
        super().forward(bottom, top)
        self.inside -= 1
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of layers, `user_layers`, on sys.path."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "user_layers", raising=False)
    (tmp_path / "user_layers.py").write_text(MODULE)
    return tmp_path


def text(name: str, more: str = "") -> str:
    return f"type: 'Python' python_param {{ module: 'user_layers' layer: '{name}' {more} }}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 4, 5)])
def test_a_loss_of_pycaffes_documentation(shape: tuple[int, ...], backend: str) -> None:
    x, y = gaussian(shape, 1), gaussian(shape, 2)
    runner = Runner(text("Euclidean"), [x, y], backend)
    assert_near(runner.forward()[0], [((x - y) ** 2).sum() / shape[0] / 2], 1e-6, "loss")
    first, second = runner.backward([np.array([0.5], np.float32)])
    assert_near(first, 0.5 * (x - y) / shape[0], 1e-6, "gradient")
    assert_near(second, -0.5 * (x - y) / shape[0], 1e-6, "gradient")
    assert runner.backward([np.ones(1)], [True, False])[1] is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_and_their_gradients(backend: str) -> None:
    x, dy = gaussian((2, 3, 4, 2), 1), gaussian((2, 3, 4, 2), 2)
    runner = Runner(text("Affine", "param_str: '3'"), [x], backend)
    result = runner.run([dy])
    assert np.array_equal(result.tops[0], x * 3) and np.array_equal(result.bottom_diffs[0], dy * 3)
    assert_near(result.param_diffs[0], [(dy * x).sum()], 1e-5, "parameter's gradient")
    runner.backward([dy])
    assert_near(runner.layer.blobs[0].host_diff(), [2 * (dy * x).sum()], 1e-5, "two passes")
    runner.layer.backend.fill(runner.layer.blobs[0].data, 5)
    assert np.array_equal(runner.forward()[0], x * 5)


def test_reshape_comes_before_every_pass_and_the_parameters_are_the_nets() -> None:
    runner = Runner(text("Affine"), [gaussian((2, 3))])
    for _ in range(3):
        runner.forward()
    instance = runner.layer.instance
    assert instance.calls == ["reshape"] * 4
    assert (instance.phase, instance.rank, instance.world_size) == (0, 0, 1)
    assert runner.layer.capture_blocker() == "it runs the user's Python code on the host"


REGIONS = f"""
layer {{ name: "x" type: "Input" top: "x" input_param {{ shape {{ dim: 1 dim: 2 dim: 4 dim: 4 }} }} }}
layer {{ name: "conv" type: "Convolution" bottom: "x" top: "conv"
         convolution_param {{ num_output: 3 kernel_size: 1 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "regions" bottom: "conv" top: "rois" top: "targets" top: "weights"
         {text("Regions", "param_str: 's: 4'")} }}
layer {{ name: "pool" type: "ROIPooling" bottom: "conv" bottom: "rois" top: "pool"
         roi_pooling_param {{ pooled_h: 2 pooled_w: 2 spatial_scale: 0.25 }} }}
layer {{ name: "boxes" type: "InnerProduct" bottom: "pool" top: "boxes"
         inner_product_param {{ num_output: 4 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "loss" type: "SmoothL1Loss" bottom: "boxes" bottom: "targets" bottom: "weights" bottom: "weights"
         top: "loss" }}
"""


@pytest.mark.parametrize(("phase", "count"), [(TRAIN, 3), (TEST, 2)])
def test_regions_of_a_layer_with_the_names_of_fast_rcnns_pycaffe(phase: int, count: int) -> None:
    """Tops that depend on learned scores and change their shape in forward; losses with weights from them."""
    param = caffe_pb2.NetParameter()
    parse_text(REGIONS, param, "regions")
    net = Net(param, LayerContext(CPU, phase=phase))
    CPU.from_host(gaussian((1, 2, 4, 4)), net.blobs["x"].data)
    net.clear_param_diffs()
    net.forward()
    assert net.blobs["rois"].shape == (count, 5) and net.blobs["boxes"].shape == (count, 4)
    phase_of_layer = next(layer for layer in net.layers if layer.name == "regions").instance.phase
    assert (str(phase_of_layer), f"{phase_of_layer}", f"{phase_of_layer:d}") == (
        ("TRAIN", "TRAIN", "0") if phase == TRAIN else ("TEST", "TEST", "1")
    )
    if phase == TRAIN:
        net.backward()
        diffs = [blob.host_diff() for layer in net.layers for blob in layer.blobs]
        assert len(diffs) == 4 and all(np.isfinite(diff).all() and diff.any() for diff in diffs)


def test_a_gradient_that_was_written_in_the_forward_pass() -> None:
    runner = Runner(text("Early"), [gaussian((2, 3))])
    runner.forward()
    assert np.array_equal(runner.backward([np.ones((2, 3))])[0], np.full((2, 3), 7))


def test_in_place() -> None:
    x = gaussian((2, 3, 2, 2), 1)
    runner = Runner(text("Affine", "param_str: '3'"), [x], in_place=True)
    assert np.array_equal(runner.forward()[0], x * 3)


NET = """
layer {{ name: "data" type: "DummyData" top: "data" top: "goal" dummy_data_param {{
  shape {{ dim: 8 dim: 1 dim: 8 dim: 8 }} shape {{ dim: 8 dim: 4 }}
  data_filler {{ type: "constant" value: 0.5 }} data_filler {{ type: "constant" value: 1 }} }} }}
layer {{ name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param {{ num_output: 4 kernel_size: 3 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "ip" type: "InnerProduct" bottom: "conv" top: "ip"
  inner_product_param {{ num_output: 4 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "loss" bottom: "ip" bottom: "goal" top: "loss" {} }}
"""
SOLVER = 'type: "SGD" base_lr: 0.003 momentum: 0.9 lr_policy: "fixed" max_iter: 9'
PYTHON_LOSS = text("Euclidean") + " loss_weight: 1"


def test_a_net_trains_as_with_the_layer_it_stands_for() -> None:
    losses = []
    for loss in (PYTHON_LOSS, "type: 'EuclideanLoss'"):
        with build_solver(SOLVER, NET.format(loss)) as solver:
            solver.step(5)
            losses.append(float(solver.net.loss()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_memory_plans_know_what_it_may_read() -> None:
    net = build_net(NET.format(PYTHON_LOSS))
    meta = MetaBackend(net.backend)
    layer = net.layers[-1]
    layer.backend = meta
    bottom, top = meta.zeros((8, 4)), meta.zeros((1,))

    class Stub:
        def __init__(self, array: Any) -> None:
            self.data, self.diff = array, meta.zeros(array.shape)

    blobs = [Stub(bottom), Stub(bottom)], [Stub(top)]
    meta.step = 3
    layer.forward(*blobs)
    meta.step = 5
    layer.backward(blobs[1], [True, False], blobs[0])
    assert (bottom.memory.first, bottom.memory.last, top.memory.first) == (3, 5, 3)
    assert blobs[0][0].diff.memory.first == 5 and blobs[0][1].diff.memory.first is None


def test_a_module_beside_the_prototxt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "beside_layers.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    loss = PYTHON_LOSS.replace("user_layers", "beside_layers")
    net = build_net(NET.format(loss), resolve=PathResolver(folder / "net.prototxt"))
    net.forward()
    with pytest.raises(ConfigError, match="no module 'nowhere_layers' on PYTHONPATH, in the working directory"):
        build_net(NET.format(loss.replace("beside", "nowhere")), resolve=PathResolver(folder / "net.prototxt"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("type: 'Python'", "python_param needs module and layer"),
        (text("Absent"), r"module 'user_layers' \(.*user_layers.py\) has no class 'Absent'"),
        (text("Incomplete"), r"class 'Incomplete' of .*user_layers.py lacks setup, reshape, forward"),
        (text("WithoutReshape"), r"layer 'L' \(Python\): class 'WithoutReshape' of .*user_layers.py lacks reshape"),
        (text("Euclidean"), r"layer 'L' \(Python\): setup: .*user_layers.py:11: Exception: Need two inputs"),
    ],
)
def test_settings_that_do_not_fit(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Runner(setting, [gaussian((2, 3))], tops=1)


def test_a_backward_pass_that_is_missing() -> None:
    runner = Runner(text("WithoutBackward"), [gaussian((2, 3))], tops=1)
    runner.forward()
    with pytest.raises(ConfigError, match=r"class 'WithoutBackward' of .*user_layers.py lacks backward"):
        runner.backward([gaussian((2, 3))])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("import caffe\n", "imports caffe, which is not installed; import caffepy.as_caffe before it"),
        ("import no_such_thing\n", r"cannot import module 'broken_layers': .*broken_layers.py:1: ModuleNotFoundError"),
        ("x = 1\nx +* 2\n", r"cannot import module 'broken_layers': .*broken_layers.py:2: SyntaxError"),
        ("x = {}\n\nx['a']\n", r"broken_layers.py:3: KeyError: 'a'"),
    ],
)
def test_modules_that_cannot_be_imported(
    module: Path, content: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "caffe", None)
    (module / "broken_layers.py").write_text(content)
    with pytest.raises(ConfigError, match=message):
        Runner(text("A").replace("user_", "broken_"), [gaussian((2, 3))], tops=1)


def test_an_error_in_a_pass_names_file_and_line() -> None:
    runner = Runner(text("Failing"), [gaussian((2, 3))], tops=1)
    with pytest.raises(RunError, match=r"layer 'L' \(Python\): forward: .*user_layers.py:\d+: ValueError: no such"):
        runner.forward()


def test_layers_of_one_name_share_no_object() -> None:
    layer = 'layer { name: "same" bottom: "x" top: "%s" ' + text("Alone", "share_in_parallel: true") + " }"
    data = 'layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 } } }'
    first, second = build_net(data + layer % "a" + layer % "b").layers[-2:]
    assert first.instance is not second.instance  # type: ignore[attr-defined]


def test_devices_share_one_object_and_take_turns() -> None:
    kind, shard = text("Alone", "share_in_parallel: true"), Shard(world_size=2, devices_per_rank=2, training=1)
    runners = [Runner(kind, [gaussian((2, 3))], tops=1, shard=shard) for _ in range(2)]
    alone = Runner(text("Alone"), [gaussian((2, 3))], tops=1)
    objects = [runner.layer.instance for runner in (*runners, alone)]
    assert objects[0] is objects[1] and objects[2] is not objects[0]
    threads = [threading.Thread(target=runner.forward) for runner in runners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert objects[0].met == 1


SHARING = """
layer { name: 'x' type: 'DummyData' top: 'x' top: 'y' dummy_data_param {
  shape { dim: 2 dim: 3 } data_filler { type: 'constant' value: 1 } } }
layer { name: 'p' bottom: 'x' top: 'p' param { name: 'w' } %s }
layer { name: 'q' bottom: 'p' top: 'q' param { name: 'w' } %s }
layer { name: 'loss' type: 'EuclideanLoss' bottom: 'q' bottom: 'y' top: 'loss' }
"""


def test_nets_that_do_not_train_together_have_objects_of_their_own() -> None:
    """A process with several nets or solvers: each counts its own passes."""
    kind = text("Affine", "param_str: '3' share_in_parallel: true")
    nets = [build_net(SHARING % (kind, kind)) for _ in range(2)]
    objects = [layer.instance for net in nets for layer in net.layers if layer.type == "Python"]
    assert len(set(map(id, objects))) == 4
    shards = [Shard(world_size=2, devices_per_rank=2, training=number) for number in (1, 2)]
    first, second = (Runner(kind, [gaussian((2, 3))], tops=1, shard=shard) for shard in shards)
    assert first.layer.instance is not second.layer.instance
    for net in nets:
        net.forward()
        net.backward()
    np.testing.assert_array_equal(*(net.layers[1].blobs[0].host_diff() for net in nets))


@pytest.mark.parametrize("shared", [False, True])
def test_devices_of_a_training_share_one_object_for_each_layer_of_each_net(shared: bool, module: Path) -> None:
    (module / "counted.py").write_text(
        "from user_layers import Affine\nmade = []\nclass Counted(Affine):\n    def __init__(self): made.append(self)\n"
    )
    kind = text("Counted", f"param_str: '3' share_in_parallel: {str(shared).lower()}").replace("user_layers", "counted")
    settings = "base_lr: 0.1 lr_policy: 'fixed' max_iter: 2 test_iter: 1 test_iter: 1 test_interval: 2"
    param = solver_param(settings + " snapshot_after_train: false", SHARING % (kind, kind))
    P2PManager(TrainOptions(param, cpu_solvers=2, threads=1)).run()
    made = sys.modules.pop("counted").made
    assert len(made) == (6 if shared else 12)


def test_layers_share_a_parameter_by_name() -> None:
    """What is loaded for one layer is the other's, and the gradient is the sum."""
    kind = text("Affine", "param_str: '3'")
    net = build_net(SHARING % (kind, kind))
    p, q = (layer for layer in net.layers if layer.type == "Python")
    CPU.fill(p.blobs[0].data, 2)
    net.forward()
    assert (net.blobs["q"].host_data() == 4).all()
    net.backward()
    dq = (net.blobs["q"].host_data() - net.blobs["y"].host_data()) / 2
    assert q.blobs[0].host_diff() == pytest.approx((dq * net.blobs["p"].host_data() + 2 * dq).sum())

"""Profiles made here: of a small net that is trained on the CPU, and of times that are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from caffepy.backend import create_backend
from caffepy.backend.meta import MetaBackend
from caffepy.errors import ConfigError, DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.net import Net
from caffepy.net.record_shape import without_data
from caffepy.scaling.profile import (
    Gradient,
    Profile,
    ProfiledNet,
    estimate_profile,
    gradients_of,
    measure_profile,
    read_subject,
    with_settings_of,
    write_profile,
)

NET = """
name: "small" reduce_buckets: 3
layer { name: "data" type: "Data" top: "data" top: "label" include { phase: TRAIN }
        data_param { source: "absent_lmdb" batch_size: 4 backend: LMDB } transform_param { scale: 0.004 } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" param { lr_mult: 1 } param { lr_mult: 2 }
        convolution_param { num_output: 5 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "ip" type: "InnerProduct" bottom: "conv" top: "ip" inner_product_param { num_output: 10 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
SOLVER = """
net: "net.prototxt" base_lr: 0.01 lr_policy: "fixed" momentum: 0.9 max_iter: 100 iter_size: 2 test_iter: 3
test_interval: 1 snapshot: 1 snapshot_prefix: "never" display: 1 layer_wise_reduce: false
"""
SHAPE = (1, 6, 6)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A solver whose data are not there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.prototxt").write_text(NET)
    (tmp_path / "solver.prototxt").write_text(SOLVER)
    return tmp_path


def measured(subject: ProfiledNet) -> Profile:
    backend = create_backend(None, 1)
    with backend.activate():
        return measure_profile(subject, backend, 3)


def test_a_profile_is_measured_without_data_tests_and_snapshots(folder: Path):
    profile = measured(read_subject(Path("solver.prototxt"), shape=SHAPE))
    assert [layer.name for layer in profile.layers] == ["data", "conv", "ip", "loss"]
    assert (profile.net, profile.device, profile.on_cpu) == ("small", "CPU, 1 thread", True)
    assert (profile.batch, profile.passes, profile.reduce_buckets) == (8, 2, 3)
    assert not profile.layer_wise_reduce
    assert profile.iteration_ms > 0 and profile.other_ms >= -1e-9
    assert all(layer.forward_ms > 0 for layer in profile.layers[1:])
    assert all(layer.backward_ms > 0 for layer in profile.layers[1:])
    # Multiples of 64 numbers: ip has 10 x 80 + 10, conv 5 x 9 + 5.
    assert profile.gradients == (Gradient(2, 4 * 832), Gradient(2, 256), Gradient(1, 256), Gradient(1, 256))
    assert sorted(path.name for path in folder.iterdir()) == ["net.prototxt", "solver.prototxt"]


def test_another_batch():
    assert measured(read_subject(Path("solver.prototxt"), batch=3, shape=SHAPE)).batch == 6


def test_data_that_are_not_there():
    with pytest.raises(DataError, match="absent_lmdb"):
        measured(read_subject(Path("solver.prototxt")))


def test_a_net_without_data(folder: Path):
    (folder / "net.prototxt").write_text('layer { name: "in" type: "Input" top: "in" }\n')
    with pytest.raises(ConfigError, match="has no data layer"):
        measured(read_subject(Path("solver.prototxt")))


def test_given_times_are_divided_by_multiplications():
    subject = read_subject(Path("solver.prototxt"), shape=SHAPE)
    profile = estimate_profile(subject, 10.0, 30.0, on_cpu=False)
    conv, ip = 4 * 16 * 45, 4 * 800  # for each of 4 x 4 places of 4 images the filters; for each image the matrix
    assert profile.layers[1].forward_ms == pytest.approx(10 * conv / (conv + ip))
    assert profile.layers[2].backward_ms == pytest.approx(30 * ip / (conv + ip))
    assert profile.layers[3].backward_ms == 0
    assert profile.iteration_ms == pytest.approx(80) and profile.update_ms == 0 and profile.other_ms == pytest.approx(0)
    assert profile.gradients == measured(subject).gradients
    assert not profile.on_cpu


def test_made_up_data_leave_the_rest_alone():
    net = read_subject(Path("solver.prototxt")).solver.net_param
    made_up = without_data(net, {"data": (3, 5, 5)})
    assert [layer.type for layer in net.layer][0] == "Data"
    assert [layer.type for layer in made_up.layer] == ["DummyData", "Convolution", "InnerProduct", "SoftmaxWithLoss"]
    assert [list(shape.dim) for shape in made_up.layer[0].dummy_data_param.shape] == [[4, 3, 5, 5], [4]]
    assert made_up.layer[0].include[0].phase == caffe_pb2.TRAIN


def gradients(text: str, *, bias: bool = False, fuse: bool = False) -> tuple[Gradient, ...]:
    net = caffe_pb2.NetParameter()
    net.layer.add(name="in", type="Input", top=["x"]).input_param.shape.add(dim=[2, 3])
    for line in text.split():
        name, share, rate = line.split(":")
        layer = net.layer.add(name=name, type="InnerProduct", bottom=[net.layer[-1].top[0]], top=[name])
        layer.inner_product_param.num_output = 3
        layer.inner_product_param.bias_term = bias
        layer.param.add(name=share, lr_mult=float(rate))
        net.layer.add(name=f"{name}/relu", type="ReLU", bottom=[name], top=[name])
    return gradients_of(Net(net, LayerContext(MetaBackend()), fuse=fuse))


def test_gradients_come_in_the_order_of_the_backward_pass():
    assert gradients("a:a:1 b:b:1") == (Gradient(3, 256), Gradient(1, 256))


def test_a_shared_gradient_is_finished_by_its_first_layer():
    """Its owner's, so that c, which lies behind it in the buffer's order, is finished before it."""
    assert gradients("a:w:1 b:b:1 c:w:1") == (Gradient(3, 256), Gradient(1, 256))


def test_what_is_not_learned_is_not_exchanged():
    assert gradients("a:a:1 b:b:0") == (Gradient(1, 256),)


def test_members_of_fused_layers_are_found():
    """Only with a bias is a ReLU fused with its InnerProduct; weights and bias, the last layer's first."""
    layers = [gradient.layer for gradient in gradients("a:a:1 b:b:1", bias=True, fuse=True)]
    assert layers == [2, 2, 1, 1]
    assert [gradient.layer for gradient in gradients("a:a:1 b:b:1", bias=True)] == [3, 3, 1, 1]


def test_a_solvers_settings_replace_the_profiles(folder: Path):
    profile = estimate_profile(read_subject(Path("solver.prototxt"), shape=SHAPE), 1.0, 2.0, on_cpu=True)
    write_profile(folder / "p.json", profile)
    (folder / "net.prototxt").write_text(NET.replace("reduce_buckets: 3", "reduce_buckets: 5"))
    changed = with_settings_of(Path("solver.prototxt"), profile, "p.json")
    assert changed.reduce_buckets == 5 and changed.layers == profile.layers
    (folder / "net.prototxt").write_text(NET.replace("small", "large"))
    with pytest.raises(ConfigError, match="p.json is of net 'small' with iter_size 2, solver.prototxt of 'large'"):
        with_settings_of(Path("solver.prototxt"), profile, "p.json")

"""Classes of a program that become layer types: `caffepy.register_layer`."""

from __future__ import annotations

from collections.abc import Iterator
from math import tanh
from typing import Any

import numpy as np
import pytest
from layer_harness import check_layer, gaussian
from training import PLAIN, build_net, build_solver

import caffepy
from caffepy.backend import Array, Each, Scalar, expression
from caffepy.errors import ConfigError, RunError
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import parse_text
from caffepy.layers import Layer, is_registered, layer_class
from caffepy.layers import layer as base
from caffepy.layers.activation import ActivationLayer
from caffepy.layers.python import PythonLayerBase
from caffepy.net.deploy import deploy_net, plan_deploy
from caffepy.pycaffe import layer_type_list

DATA = 'layer { name: "d" type: "Input" top: "d" input_param { shape { dim: 2 dim: 3 } } } '
NOISE = """
layer { name: "d" type: "DummyData" top: "d" top: "t" dummy_data_param { shape { dim: 8 dim: 3 } shape { dim: 8 dim: 3 }
  data_filler { type: "gaussian" } data_filler { type: "constant" value: 1 } } }
"""


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The types that a test registers are gone behind it."""
    entries = dict(base.LAYERS._entries)
    monkeypatch.setattr(base, "_REGISTERED", set(base._REGISTERED))
    monkeypatch.setattr(base, "_REPLACED", set(base._REPLACED))
    yield
    for name in [name for name in base.LAYERS if not base.LAYERS.get(name).__module__.startswith("caffepy.")]:
        del base.LAYERS._entries[name]
    base.LAYERS._entries.update(entries)


class Affine:
    """y = scale * x + shift, with the learned shift, in pycaffe's form."""

    def setup(self, bottom: Any, top: Any) -> None:
        self.scale = self.param.power_param.scale  # type: ignore[attr-defined]
        self.blobs.add_blob(1)  # type: ignore[attr-defined]

    def reshape(self, bottom: Any, top: Any) -> None:
        top[0].reshape(*bottom[0].shape)

    def forward(self, bottom: Any, top: Any) -> None:
        top[0].data[...] = bottom[0].data * self.scale + self.blobs[0].data  # type: ignore[attr-defined]

    def backward(self, top: Any, propagate_down: list[bool], bottom: Any) -> None:
        self.blobs[0].diff[...] += top[0].diff.sum()  # type: ignore[attr-defined]
        if propagate_down[0]:
            bottom[0].diff[...] = top[0].diff * self.scale


class Distance:
    """Half the mean squared distance, a loss."""

    bottoms = (2, 2)
    is_loss = True
    no_gradient_bottoms = frozenset([1])

    def setup(self, bottom: Any, top: Any) -> None:
        pass

    def reshape(self, bottom: Any, top: Any) -> None:
        top[0].reshape()

    def forward(self, bottom: Any, top: Any) -> None:
        top[0].data[...] = ((bottom[0].data - bottom[1].data) ** 2).sum() / bottom[0].num / 2

    def backward(self, top: Any, propagate_down: list[bool], bottom: Any) -> None:
        bottom[0].diff[...] = top[0].diff * (bottom[0].data - bottom[1].data) / bottom[0].num


@expression
def scaled_tanh(x: Each, scale: Scalar) -> Each:
    return tanh(x * scale)


@expression
def scaled_tanh_gradient(y: Each, dy: Each, scale: Scalar) -> Each:
    return dy * (1 - y * y) * scale


class ScaledTanH(ActivationLayer):
    """In caffepy's own form."""

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(scaled_tanh, (x, self.param.power_param.scale), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        self.backend.apply(scaled_tanh_gradient, (source, dy, self.param.power_param.scale), (dx,))


def test_a_class_with_pycaffes_methods() -> None:
    assert caffepy.register_layer("Affine2", Affine) is Affine
    net = build_net(DATA + 'layer { name: "a" type: "Affine2" bottom: "d" top: "a" power_param { scale: 3 } }')
    x = gaussian((2, 3)).astype(np.float32)
    net.blobs["d"].load(x)
    net.forward()
    assert np.allclose(net.blobs["a"].host_data(), 3 * x)
    assert (net.layers[-1].type, len(net.layers[-1].blobs)) == ("Affine2", 1)
    assert "Affine2" in layer_type_list()


def test_a_subclass_of_pycaffes_layer() -> None:
    class Own(PythonLayerBase, Affine):
        setup, reshape, forward, backward = Affine.setup, Affine.reshape, Affine.forward, Affine.backward

    caffepy.register_layer("Own3", Own)
    net = build_net(DATA + 'layer { name: "a" type: "Own3" bottom: "d" top: "a" python_param { param_str: "x" } }')
    layer: Any = net.layers[-1]
    assert (layer.instance.type, layer.instance.param_str, layer.instance.phase) == ("Own3", "x", 0)


def test_a_class_with_caffepys_contract_has_its_gradient_on_every_backend() -> None:
    caffepy.register_layer("ScaledTanH2", ScaledTanH)
    assert layer_class("ScaledTanH2") is ScaledTanH
    x = gaussian((2, 3, 4))
    check_layer("type: 'ScaledTanH2' power_param { scale: 0.5 }", [x], lambda x: np.tanh(0.5 * x), in_place=True)


def test_gradients_of_a_class_with_pycaffes_methods() -> None:
    caffepy.register_layer("Affine2", Affine)
    check_layer("type: 'Affine2' power_param { scale: 2 }", [gaussian((3, 4))], lambda x, shift: 2 * x + shift)


def test_a_registered_loss_and_layer_learn() -> None:
    """Without loss_weight, and with a parameter that a class has added."""
    caffepy.register_layer("Affine2", Affine)
    caffepy.register_layer("Distance2", Distance)
    net = f"""{NOISE} layer {{ name: "a" type: "Affine2" bottom: "d" top: "a" power_param {{ scale: 0 }} }}
        layer {{ name: "loss" type: "Distance2" bottom: "a" bottom: "t" top: "loss" }}"""
    with build_solver(PLAIN.replace("max_iter: 4", "max_iter: 60"), net) as solver:
        solver.solve()
        assert solver.net.layers[-1].loss_weights == [1]
        assert np.allclose(solver.net.layers[-2].blobs[0].host_data(), 1, atol=1e-3)


def test_variables_that_a_class_declares_are_checked() -> None:
    caffepy.register_layer("Distance2", Distance)
    with pytest.raises(ConfigError, match=r"layer 'l' \(Distance2\).* 2 bottom"):
        build_net(DATA + 'layer { name: "l" type: "Distance2" bottom: "d" top: "l" }')


def test_errors_of_a_registered_class_name_layer_file_and_line() -> None:
    class Bad(Affine):
        def forward(self, bottom: Any, top: Any) -> None:
            raise ValueError("no")

    caffepy.register_layer("Bad2", Bad)
    net = build_net(DATA + 'layer { name: "b" type: "Bad2" bottom: "d" top: "b" }')
    with pytest.raises(RunError, match=r"layer 'b' \(Bad2\): forward: .*test_registered.py:\d+: ValueError: no"):
        net.forward()


def test_a_class_without_methods_is_refused() -> None:
    class Half:
        def setup(self, bottom: Any, top: Any) -> None: ...

    with pytest.raises(ConfigError, match=r"layer type 'Half2': class 'Half' lacks reshape, forward"):
        caffepy.register_layer("Half2", Half)


def test_caffepys_own_types_are_replaced_only_if_asked() -> None:
    with pytest.raises(
        ConfigError, match=r"caffepy has the layer type 'TanH'; .*register_layer\(\"TanH\", ScaledTanH, re"
    ):
        caffepy.register_layer("TanH", ScaledTanH)
    with pytest.raises(ConfigError, match=r"caffepy has the layer type 'PReLU'"):  # its module is not imported yet
        caffepy.register_layer("PReLU", Affine)
    caffepy.register_layer("TanH", ScaledTanH, replace=True)
    base.import_layer_types()
    assert layer_class("TanH") is ScaledTanH
    assert is_registered("TanH")


def test_a_replaced_type_is_not_fused_and_not_taken_for_caffepys() -> None:
    class Shifted(Affine):
        def forward(self, bottom: Any, top: Any) -> None:
            top[0].data[...] = bottom[0].data + 100

    text = f"""{DATA}
        layer {{ name: "ip" type: "InnerProduct" bottom: "d" top: "ip" inner_product_param {{ num_output: 2 }} }}
        layer {{ name: "r" type: "ReLU" bottom: "ip" top: "r" }}"""
    caffepy.register_layer("ReLU", Shifted, replace=True)
    net = build_net(text)
    net.forward()
    assert (net.blobs["r"].host_data() == 100).all()
    assert net.layers[-1].type == "ReLU (registered)"
    assert net.to_proto().layer[-1].type == "ReLU"


def test_a_programs_own_type_may_be_registered_again() -> None:
    caffepy.register_layer("Affine2", Affine)

    class Newer(Affine):
        pass

    @caffepy.register_layer("Affine2")
    class Newest(Newer):
        pass

    cls: Any = layer_class("Affine2")
    assert cls.user_class is Newest


def test_an_attribute_param_of_the_users_own_stays() -> None:
    class Own(Affine):
        param = "mine"

        def setup(self, bottom: Any, top: Any) -> None:
            assert self.param == "mine"

    caffepy.register_layer("Own2", Own)
    build_net(DATA + 'layer { name: "o" type: "Own2" bottom: "d" top: "o" }')


def test_deploy_keeps_registered_layers() -> None:
    caffepy.register_layer("Affine2", Affine)
    text = f"""{NOISE} layer {{ name: "a" type: "Affine2" bottom: "d" top: "a" }}
        layer {{ name: "loss" type: "EuclideanLoss" bottom: "a" bottom: "t" top: "loss" }}"""
    train = parse_text(text, caffe_pb2.NetParameter(), "n")
    made = deploy_net(train, plan_deploy(train, {}))
    assert [layer.type for layer in made.layer] == ["DummyData", "Affine2"]
    made = deploy_net(train, plan_deploy(train, {"d": (1, 3)}))
    assert [layer.type for layer in made.layer] == ["Input", "Affine2"]


def test_an_unknown_type_names_the_door_and_guesses_only_misspellings() -> None:
    for name in ("Qn", "FocalLozz", "Quux"):
        with pytest.raises(
            ConfigError, match=rf"unknown layer type '{name}'; if a Caffe fork .*register_layer\(\"{name}\""
        ):
            layer_class(name)
    with pytest.raises(ConfigError, match=r"unknown layer type 'Convolutoin'; did you mean 'Convolution'\?$"):
        layer_class("Convolutoin")


def test_layer_is_public() -> None:
    assert issubclass(ScaledTanH, Layer)

"""Classes of a program that become layer types: `caffepy.register_layer`."""

from __future__ import annotations

from collections.abc import Iterator
from math import tanh
from typing import Any

import numpy as np
import pytest
from layer_harness import check_layer, gaussian
from registered_types import forgotten_types
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
    with forgotten_types(monkeypatch):
        yield


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


# -- classes with methods on shapes and arrays --------------------------------------------------------


class Power2:
    """y = (scale * x)^2."""

    param: caffe_pb2.LayerParameter

    def forward(self, x: Any) -> Any:
        return (self.param.power_param.scale * x) ** 2

    def backward(self, x: Any, y: Any, dy: Any) -> Any:
        return 2 * self.param.power_param.scale**2 * x * dy


class Mix:
    """Of a and b, (N, C): w * a + b and the sums of a * b, with a learned weight for each column."""

    bottoms, tops = (2, 2), (2, 2)

    def shape(self, a: Any, b: Any) -> Any:
        return [a, (a[0],)]

    def parameters(self, a: Any, b: Any) -> Any:
        return [((a[1],), 0.5), ((), caffe_pb2.FillerParameter(type="constant", value=2))]

    def forward(self, a: Any, b: Any, w: Any, unused: Any) -> Any:
        return w * a + b, (a * b).sum(1)

    def backward(self, a: Any, b: Any, w: Any, unused: Any, y: Any, z: Any, dy: Any, dz: Any) -> Any:
        return w * dy + dz[:, None] * b, dy + dz[:, None] * a, (dy * a).sum(0), None


class Half:
    """y = x / 2, without a gradient."""

    def forward(self, x: Any) -> Any:
        return x / 2


def test_a_formula_on_arrays_has_its_gradient_on_every_backend_and_works_in_place() -> None:
    caffepy.register_layer("Power2", Power2)
    text = "type: 'Power2' power_param { scale: 0.5 }"
    check_layer(text, [gaussian((2, 3, 4, 5))], lambda x: (0.5 * x) ** 2, in_place=True)
    check_layer(text, [gaussian(())], lambda x: (0.5 * x) ** 2)


def test_a_function_of_numpy_is_a_forward() -> None:
    caffepy.register_layer("Sinh2", type("Sinh", (), {"forward": np.sinh}))
    check_layer("type: 'Sinh2'", [gaussian((2, 3))], np.sinh, gradients=False)


def test_several_bottoms_tops_and_parameters_on_arrays() -> None:
    caffepy.register_layer("Mix2", Mix)
    inputs = [gaussian((3, 4)), gaussian((3, 4), 1)]
    check_layer("type: 'Mix2'", inputs, lambda a, b, w, unused: (w * a + b, (a * b).sum(1)))
    text = DATA + 'layer { name: "a" type: "Mix2" bottom: "d" bottom: "d" top: "y" top: "z" }'
    assert [blob.host_data().tolist() for blob in build_net(text).layers[-1].blobs] == [[0.5] * 3, 2]


def test_parameters_of_a_class_on_arrays_learn_and_load() -> None:
    caffepy.register_layer("Mix2", Mix)
    net = f"""{NOISE} layer {{ name: "a" type: "Mix2" bottom: "d" bottom: "d" top: "y" top: "z" }}
        layer {{ name: "l" type: "EuclideanLoss" bottom: "y" bottom: "d" top: "l" }}
        layer {{ name: "s" type: "Silence" bottom: "z" }}"""
    with build_solver(PLAIN.replace("max_iter: 4", "max_iter: 60"), net) as solver:
        solver.solve()
        learned = solver.net.to_proto()
        assert np.allclose(learned.layer[-3].blobs[0].data, 0, atol=0.05)
    other = build_net(net)
    other.copy_trained_layers_from(learned, "learned")
    assert other.to_proto().layer[-3].blobs[0].data == learned.layer[-3].blobs[0].data


def test_a_class_without_backward_is_for_nets_that_do_not_train_through_it() -> None:
    caffepy.register_layer("Half2", Half)
    ip = 'layer { name: "i" type: "InnerProduct" bottom: "d" top: "i" inner_product_param { num_output: 3 } } '
    loss = 'layer { name: "l" type: "EuclideanLoss" bottom: "h" bottom: "d" top: "l" }'
    text = f'{DATA}{ip}layer {{ name: "h" type: "Half2" bottom: "i" top: "h" }}{loss}'
    with pytest.raises(
        ConfigError, match=r"layer 'h' \(Half2\): cannot backpropagate to its bottom 'i', .*; give its class a"
    ):
        build_net(text)
    build_net(text, phase=caffe_pb2.TEST).forward()
    build_net(f'{DATA}layer {{ name: "h" type: "Half2" bottom: "d" top: "h" }}{loss}').backward()


def test_a_class_with_parameters_and_without_backward_names_itself() -> None:
    class Bare:
        parameters, forward, shape = Mix.parameters, Mix.forward, Mix.shape

    caffepy.register_layer("Bare2", Bare)
    text = DATA + 'layer { name: "a" type: "Bare2" bottom: "d" bottom: "d" top: "y" top: "z" loss_weight: [1, 0] }'
    net = build_net(text)
    net.forward()
    with pytest.raises(RunError, match=r"layer 'a' \(Bare2\): cannot train: class 'Bare' .* no method backward"):
        net.backward()


@pytest.mark.parametrize(
    ("methods", "error"),
    [
        (
            {"forward": lambda self: 0},
            r"forward\(\) does not take the 1 arrays of the layer \(1 bottoms, 0 par",
        ),
        (
            {"backward": lambda self, x, dy: dy},
            r"backward\(x, dy\) does not take the 3 arrays .* 1 tops and their grad",
        ),
        (
            {"shape": lambda self, x: [x, x]},
            r"the layer has 1 tops, and shape returned 2 shapes: \[\(2, 3\), \(2, 3\)\]",
        ),
        ({"shape": lambda self, x: 2.5}, r"shape returned 2.5 in place of a shape or a list of shapes"),
        ({"shape": lambda self, x: (2, -1)}, r"shape returned \(2, -1\) in place of"),
        ({"shape": lambda self, x: x[9]}, r"shape: .*test_registered.py:\d+: IndexError"),
        ({"parameters": lambda self, x: None}, r"parameters returned None in place of a list of \(shape, filler\)"),
        ({"parameters": lambda self, x: [(2, 3)]}, r"parameters returned \(2, 3\) in place of \(shape, filler\)"),
        ({"parameters": lambda self, x: [((2,), "xavier")]}, r"parameters returned \(\(2,\), 'xavier'\) in place"),
    ],
)
def test_methods_that_do_not_fit_the_layer(methods: dict[str, Any], error: str) -> None:
    caffepy.register_layer("Wrong2", type("Wrong", (), {"forward": lambda self, x: x} | methods))
    with pytest.raises(ConfigError, match=rf"layer 'a' \(Wrong2\): .*{error}"):
        build_net(DATA + 'layer { name: "a" type: "Wrong2" bottom: "d" top: "a" }')


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (lambda x: x[:1], r"forward returned float32 of shape \(1, 3\) for top 'a', not numbers of shape \(2, 3\)"),
        (lambda x: None, r"forward returned None in place of 1 arrays"),
        (lambda x: (x, x), r"forward returned 2 arrays in place of 1 arrays"),
        (lambda x: x * 1j, r"forward returned complex64 of shape"),
        (lambda x: x.fill(0), r"forward: .*test_registered.py:\d+: ValueError: .*read-only"),
    ],
)
def test_results_that_do_not_fit_the_tops(result: Any, error: str) -> None:
    caffepy.register_layer("Wrong2", type("Wrong", (), {"forward": lambda self, x: result(x)}))
    net = build_net(DATA + 'layer { name: "a" type: "Wrong2" bottom: "d" top: "a" }')
    with pytest.raises(RunError, match=rf"layer 'a' \(Wrong2\): {error}"):
        net.forward()

"""Where Caffe's gradients are wrong and ours are not (docs/reference/differences.md): each is held to NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from training import CPU, build_solver, weights_of

from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import parse_text
from caffepy.layers.layer import LayerContext
from caffepy.net import Net
from caffepy.training.display import LossWindow

Floats = NDArray[np.float32]
FUSED = pytest.mark.parametrize("fuse", [False, True])


def net_of(text: str, fuse: bool = False) -> Net:
    return Net(parse_text(text, caffe_pb2.NetParameter(), "net"), LayerContext(CPU), fuse=fuse)


def feed(net: Net, seed: int = 0) -> dict[str, Floats]:
    """Give every Input normal numbers; returns them."""
    rng = np.random.default_rng(seed)
    found = {}
    for name in net.inputs:
        blob = net.blobs[name]
        found[name] = rng.standard_normal(blob.shape).astype(np.float32)
        CPU.from_host(found[name], blob.data)
    return found


def parameter_diff(net: Net, layer: str, index: int = 0) -> Floats:
    diff: Floats = next(one for one in net.layers if one.name == layer).blobs[index].host_diff()
    return diff


def run(net: Net) -> None:
    net.forward()
    net.backward()


def inputs(*shapes: tuple[str, tuple[int, ...]]) -> str:
    return "".join(
        f'layer {{ name: "{name}" type: "Input" top: "{name}" '
        f"input_param {{ shape {{ {' '.join(f'dim: {d}' for d in shape)} }} }} }}\n"
        for name, shape in shapes
    )


# -- Scale at batch 1 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("axis", "num_axes"), [(1, 1), (0, 1), (0, -1), (1, -1), (0, 2)])
@pytest.mark.parametrize("in_place", [False, True])
def test_scale_at_batch_1_adds_up_over_passes(axis: int, num_axes: int, in_place: bool) -> None:
    shape = (1, 3, 2, 2)
    top = "x" if in_place else "y"
    net = net_of(
        inputs(("data", shape), ("t", shape))
        + 'layer { name: "copy" type: "Power" bottom: "data" top: "x" }'
        + f"""layer {{ name: "scale" type: "Scale" bottom: "x" top: "{top}" scale_param {{ axis: {axis}
          num_axes: {num_axes} bias_term: true }} }}
        layer {{ name: "loss" type: "EuclideanLoss" bottom: "{top}" bottom: "t" top: "loss" }}"""
    )
    net.clear_param_diffs()
    scale = bias = 0
    for number in range(3):
        values = feed(net, number)
        run(net)
        dy = values["data"] - values["t"]
        last = 4 if num_axes == -1 else axis + num_axes
        axes = tuple(a for a in range(4) if not axis <= a < last)
        scale, bias = scale + (dy * values["data"]).sum(axis=axes), bias + dy.sum(axis=axes)
    np.testing.assert_allclose(parameter_diff(net, "scale"), scale, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(parameter_diff(net, "scale", 1), bias, rtol=1e-4, atol=1e-5)


def test_iter_size_at_batch_1_is_a_larger_batch() -> None:
    """A constant image, so that every pass has the same gradient: one pass and four train alike."""
    found = []
    for iter_size in (1, 4):
        net = """layer { name: "data" type: "DummyData" top: "x" top: "t" dummy_data_param {
            shape { dim: 1 dim: 3 dim: 2 dim: 2 } data_filler { type: "constant" value: 0.5 }
            data_filler { type: "constant" value: 2 } } }
          layer { name: "scale" type: "Scale" bottom: "x" top: "y" scale_param { bias_term: true } }
          layer { name: "loss" type: "EuclideanLoss" bottom: "y" bottom: "t" top: "loss" }"""
        with build_solver(f'base_lr: 0.1 lr_policy: "fixed" iter_size: {iter_size}', net) as solver:
            solver.step(3)
            found.append(weights_of(solver.net))
    for name, values in found[0].items():
        np.testing.assert_allclose(found[1][name], values, rtol=1e-5)


def test_scales_that_share_a_parameter_at_batch_1() -> None:
    net = net_of(
        inputs(("a", (1, 3, 2, 2)), ("b", (1, 3, 2, 2)))
        + "".join(
            f'layer {{ name: "scale_{x}" type: "Scale" bottom: "{x}" top: "y{x}" param {{ name: "s" }} '
            "loss_weight: 1 }"
            for x in "ab"
        )
    )
    net.clear_param_diffs()
    values = feed(net)
    run(net)
    wanted = (values["a"] + values["b"]).sum(axis=(0, 2, 3))
    np.testing.assert_allclose(parameter_diff(net, "scale_a"), wanted, rtol=1e-4, atol=1e-5)


# -- layers that share memory -------------------------------------------------------------------------------

BEFORE_FLATTEN = {
    "Reshape": "reshape_param { shape { dim: 4 dim: 3 dim: 2 } }",
    "Concat": "",
    "Slice": "",
    "Flatten": "flatten_param { end_axis: 1 }",
}


@pytest.mark.parametrize("kind", list(BEFORE_FLATTEN))
def test_flatten_right_behind_a_layer_that_shares_its_diff(kind: str) -> None:
    net = net_of(
        inputs(("data", (4, 5)), ("t", (4, 6)))
        + f"""layer {{ name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param {{ num_output: 6
          weight_filler {{ type: "gaussian" std: 1 }} }} }}
        layer {{ name: "first" type: "{kind}" bottom: "ip" top: "first" {BEFORE_FLATTEN[kind]} }}
        layer {{ name: "flatten" type: "Flatten" bottom: "first" top: "flat" }}
        layer {{ name: "loss" type: "EuclideanLoss" bottom: "flat" bottom: "t" top: "loss" }}"""
    )
    for number in range(3):
        values = feed(net, number)
        net.clear_param_diffs()
        run(net)
        weights = next(layer for layer in net.layers if layer.name == "ip").blobs[0].host_data()
        wanted = (values["data"] @ weights.T - values["t"]).T @ values["data"] / 4
        np.testing.assert_allclose(parameter_diff(net, "ip"), wanted, rtol=1e-4, atol=1e-5)


# -- propagate_down ---------------------------------------------------------------------------------------

CUT_OFF = {
    "Flatten": "",
    "Reshape": "reshape_param { shape { dim: 4 dim: -1 } }",
    "BatchNorm": "",
    "Softmax": "",
    "LRN": "",
    "Scale": "",
    "Concat": "",
    "Slice": "",
    "Pooling": "pooling_param { kernel_size: 2 }",
}


@FUSED
@pytest.mark.parametrize("kind", list(CUT_OFF))
def test_a_reader_that_is_cut_off_gives_no_gradient(kind: str, fuse: bool) -> None:
    """The other reader is a loss on the blob itself."""
    shape = (4, 3, 2, 2)
    net = net_of(
        inputs(("data", shape), ("t", shape))
        + f"""layer {{ name: "conv" type: "Convolution" bottom: "data" top: "x" convolution_param {{ num_output: 3
          kernel_size: 1 bias_term: false weight_filler {{ type: "gaussian" std: 1 }} }} }}
        layer {{ name: "cut" type: "{kind}" bottom: "x" top: "y" propagate_down: false {CUT_OFF[kind]} }}
        layer {{ name: "ip" type: "InnerProduct" bottom: "y" top: "ip" loss_weight: 3
          inner_product_param {{ num_output: 2 weight_filler {{ type: "gaussian" std: 1 }} }} }}
        layer {{ name: "loss" type: "EuclideanLoss" bottom: "x" bottom: "t" top: "loss" }}""",
        fuse,
    )
    for number in range(2):
        values = feed(net, number)
        net.clear_param_diffs()
        run(net)
        weights = next(layer for layer in net.layers if layer.name == "conv").blobs[0].host_data()[:, :, 0, 0]
        dy = (np.einsum("oc,nchw->nohw", weights, values["data"]) - values["t"]) / 4
        wanted = np.einsum("nohw,nchw->oc", dy, values["data"])
        np.testing.assert_allclose(parameter_diff(net, "conv")[:, :, 0, 0], wanted, rtol=1e-4, atol=1e-5)
        assert np.abs(parameter_diff(net, "ip")).max() > 0


# -- in place ---------------------------------------------------------------------------------------------

SLOPES: dict[str, tuple[str, Callable[[Floats], Floats]]] = {
    "BNLL": ("", lambda x: 1 / (1 + np.exp(-x))),
    "Power": ("power_param { power: 2 scale: 1.5 shift: 0.5 }", lambda x: 2 * 1.5 * (1.5 * x + 0.5)),
    "Power 3": ("power_param { power: 3 scale: 1.5 }", lambda x: 3 * 1.5**3 * x**2),
    "Power 1": ("power_param { scale: 1.5 }", lambda x: np.full_like(x, 1.5)),
    "Log": ("log_param { base: 2 scale: 0.1 shift: 1 }", lambda x: 0.1 / (0.1 * x + 1) / np.log(2)),
    "Clip": ("clip_param { min: -0.5 max: 0.5 }", lambda x: (np.abs(x) <= 0.5).astype(np.float32)),
    "ReLU": ("relu_param { negative_slope: -0.5 }", lambda x: np.where(x > 0, 1, -0.5)),
}


@FUSED
@pytest.mark.parametrize("case", list(SLOPES))
def test_layers_in_place_know_their_input(case: str, fuse: bool) -> None:
    settings, slope = SLOPES[case]
    net = net_of(
        inputs(("data", (6, 5)), ("dy", (6, 4)))
        + f"""layer {{ name: "ip" type: "InnerProduct" bottom: "data" top: "x" inner_product_param {{ num_output: 4
          weight_filler {{ type: "gaussian" std: 0.5 }} }} }}
        layer {{ name: "in place" type: "{case.split()[0]}" bottom: "x" top: "x" {settings} }}
        layer {{ name: "y" type: "Eltwise" bottom: "x" bottom: "dy" top: "y" loss_weight: 1
          eltwise_param {{ operation: PROD }} }}""",
        fuse,
    )
    for number in range(2):
        values = feed(net, number)
        net.clear_param_diffs()
        run(net)
        weights = next(layer for layer in net.layers if layer.name == "ip").blobs[0].host_data()
        dx = values["dy"] * slope(values["data"] @ weights.T)
        np.testing.assert_allclose(parameter_diff(net, "ip"), dx.T @ values["data"], rtol=1e-3, atol=1e-5)


def test_axpy_whose_factor_needs_no_gradient() -> None:
    """Only x comes from a layer that learns; a layer that looks at the factor's flag would leave its gradient out."""
    net = net_of(
        'layer { name: "s" type: "Input" top: "s" input_param { shape { dim: 2 dim: 3 } } }'
        'layer { name: "b" type: "Input" top: "b" input_param { shape { dim: 2 dim: 3 dim: 4 } } }'
        'layer { name: "p" type: "Parameter" top: "x" parameter_param { shape { dim: 2 dim: 3 dim: 4 } } }'
        'layer { name: "axpy" type: "Axpy" bottom: "s" bottom: "x" bottom: "b" top: "y" }'
        'layer { name: "sum" type: "Reduction" bottom: "y" top: "loss" loss_weight: 2 }'
    )
    given = feed(net)
    net.forward()
    net.backward()
    np.testing.assert_allclose(parameter_diff(net, "p"), np.repeat(2 * given["s"], 4).reshape(2, 3, 4), rtol=1e-6)


# -- layers whose blobs share memory in Caffe -----------------------------------------------------------------


def parameter_net(between: str) -> str:
    """A Parameter layer times x, of which the sum is the loss; its gradient is x."""
    return f"""
    {inputs(("x", (2, 6)))}
    layer {{ name: "p" type: "Parameter" top: "p" parameter_param {{ shape {{ {between} }} }} }}
    layer {{ name: "rows" type: "{"Flatten" if between.count("dim") > 2 else "Split"}" bottom: "p" top: "rows" }}
    layer {{ name: "product" type: "Eltwise" bottom: "x" bottom: "rows" top: "y" eltwise_param {{ operation: PROD }} }}
    layer {{ name: "sum" type: "Reduction" bottom: "y" top: "loss" loss_weight: 1 }}
    """


@pytest.mark.parametrize("shape", ["dim: 2 dim: 6", "dim: 2 dim: 2 dim: 3"], ids=["plain", "before Flatten"])
def test_a_parameter_layers_gradient_adds_up_over_passes(shape: str) -> None:
    """Caffe lets the top have the parameter's diff, which each pass overwrites; a Flatten takes it away."""
    net = net_of(parameter_net(shape))
    wanted = sum(feed_and_run(net, seed) for seed in range(3))
    np.testing.assert_allclose(parameter_diff(net, "p").reshape(2, 6), wanted, rtol=1e-5)


def feed_and_run(net: Net, seed: int) -> Floats:
    x = feed(net, seed)["x"]
    run(net)
    return x


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", ["RNN", "LSTM"])
@pytest.mark.parametrize("layer", ['"ReLU"', '"Power" power_param { scale: 2 }'])
def test_a_layer_in_place_on_a_recurrent_layers_top(kind: str, layer: str, steps: int) -> None:
    """With one step Caffe's unrolled net has the same memory, and takes what the layer wrote for its own output."""
    found = []
    for top in ("y", "z"):
        net = net_of(f"""
        {inputs(("x", (steps, 2, 4)), ("cont", (steps, 2)), ("target", (steps, 2, 5)))}
        layer {{ name: "r" type: "{kind}" bottom: "x" bottom: "cont" top: "y" recurrent_param {{ num_output: 5
          weight_filler {{ type: "uniform" min: -0.5 max: 0.5 }} }} }}
        layer {{ name: "behind" type: {layer} bottom: "y" top: "{top}" }}
        layer {{ name: "loss" type: "EuclideanLoss" bottom: "{top}" bottom: "target" top: "loss" }}
        """)
        feed(net)
        CPU.fill(net.blobs["cont"].data, 1)
        run(net)
        run(net)
        found.append([blob.host_diff().copy() for layer in net.layers if layer.name == "r" for blob in layer.blobs])
    for in_place, apart in zip(*found, strict=True):
        assert apart.any()
        np.testing.assert_array_equal(in_place, apart)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", ["RNN", "LSTM"])
def test_flatten_right_behind_a_recurrent_layer(kind: str, steps: int) -> None:
    """In Caffe its gradients are 0: Flatten's backward pass gives its bottom another diff than the unrolled net has."""
    found = []
    for flat in (False, True):
        shape = (steps, 10) if flat else (steps, 2, 5)
        flatten = 'layer { name: "f" type: "Flatten" bottom: "y" top: "f" }' if flat else ""
        net = net_of(f"""
        {inputs(("x", (steps, 2, 4)), ("cont", (steps, 2)), ("target", shape))}
        layer {{ name: "r" type: "{kind}" bottom: "x" bottom: "cont" top: "y" recurrent_param {{ num_output: 5
          weight_filler {{ type: "uniform" min: -0.5 max: 0.5 }} }} }}
        {flatten}
        layer {{ name: "loss" type: "EuclideanLoss" bottom: "{"f" if flat else "y"}" bottom: "target" top: "loss" }}
        """)
        feed(net)
        CPU.fill(net.blobs["cont"].data, 1)
        run(net)
        found.append([blob.host_diff().copy() for layer in net.layers if layer.name == "r" for blob in layer.blobs])
    assert all(plain.any() for plain in found[0][:2])
    for plain, flattened in zip(*found, strict=True):
        np.testing.assert_allclose(flattened, plain, rtol=1e-6, atol=1e-7)


# -- what ends the program in Caffe ---------------------------------------------------------------------------


def test_softmax_with_loss_takes_a_weight_for_each_top() -> None:
    """Caffe's inner Softmax layer gets both weights and has one top."""
    net = net_of(f"""
    {inputs(("x", (2, 3)), ("label", (2,)))}
    layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "x" bottom: "label" top: "loss" top: "p"
      loss_weight: 2 loss_weight: 0 }}
    """)
    x = feed(net)["x"]
    CPU.fill(net.blobs["label"].data, 1)
    net.forward()
    p = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    np.testing.assert_allclose(net.blobs["p"].host_data(), p, rtol=1e-5)
    assert net.loss() == pytest.approx(-2 * np.log(p[:, 1]).mean(), rel=1e-5)


def test_a_batch_of_0_has_a_loss_of_0() -> None:
    net = net_of(f"""
    {inputs(("x", (0, 3)), ("label", (0,)))}
    layer {{ name: "ip" type: "InnerProduct" bottom: "x" top: "y" inner_product_param {{ num_output: 3 }} }}
    layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "y" bottom: "label" top: "loss" }}
    """)
    run(net)
    assert net.loss() == 0
    assert not parameter_diff(net, "ip").any()


# -- solvers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["RNN", "LSTM"])
def test_clipping_counts_the_gradients_that_are_applied(kind: str) -> None:
    """Caffe's norm includes those of RNN's and LSTM's parameters that are not learned."""
    net = f"""
    layer {{ name: "data" type: "DummyData" top: "x" top: "target" dummy_data_param {{
      shape {{ dim: 3 dim: 2 dim: 4 }} shape {{ dim: 3 dim: 2 dim: 5 }}
      data_filler {{ type: "gaussian" std: 1 }} data_filler {{ type: "gaussian" std: 1 }} }} }}
    layer {{ name: "cont" type: "DummyData" top: "cont" dummy_data_param {{
      shape {{ dim: 3 dim: 2 }} data_filler {{ value: 1 }} }} }}
    layer {{ name: "r" type: "{kind}" bottom: "x" bottom: "cont" top: "y" param {{ lr_mult: 0 }} recurrent_param {{
      num_output: 5 weight_filler {{ type: "uniform" min: -0.5 max: 0.5 }} bias_filler {{ value: 0.1 }} }} }}
    layer {{ name: "loss" type: "EuclideanLoss" bottom: "y" bottom: "target" top: "loss" }}
    """
    with build_solver('base_lr: 1 lr_policy: "fixed" clip_gradients: 0.01 random_seed: 1', net) as solver:
        before = weights_of(solver.net)
        solver.step(1)
        after = weights_of(solver.net)
    changes = {name: after[name].astype(np.float64) - before[name] for name in before}
    assert not changes["r_0"].any()
    assert np.sqrt(sum((change**2).sum() for change in changes.values())) == pytest.approx(0.01, rel=1e-4)


def test_a_loss_that_was_not_finite_leaves_the_smoothed_loss() -> None:
    """Caffe adds the difference to the loss that leaves, which stays NaN."""
    window = LossWindow(2)
    found = []
    for loss in (1.0, float("nan"), 2.0, 4.0):
        window.add(loss)
        found.append(window.mean())
    assert np.isnan(found[1:3]).all()
    assert found[3] == 3

"""Fused layers compute what the layers by themselves compute: losses, gradients, statistics."""

from __future__ import annotations

import numpy as np
import pytest
from fusion_nets import CPU, DATA, LOSS, build, changed, convolution, layer, norm, relu, run, total
from google.protobuf import text_format

from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import LayerContext
from caffepy.net import Net


def shuffle(bottom: str, parts: str, order: str, whole: str) -> str:
    """Reshape to the parts, Permute and Reshape to the whole."""
    reshape = 'layer {{ name: "{0}" type: "Reshape" bottom: "{1}" top: "{0}" reshape_param {{ shape {{ {2} }} }} }}'
    return (
        reshape.format("parts", bottom, parts)
        + f'layer {{ name: "turn" type: "Permute" bottom: "parts" top: "turn" permute_param {{ {order} }} }}'
        + reshape.format("whole", "turn", whole)
    )


def dense(name: str, bottom: str, outputs: int, setting: str = "") -> str:
    """An InnerProduct."""
    return f"""layer {{ name: "{name}" type: "InnerProduct" bottom: "{bottom}" top: "{name}" inner_product_param {{
      num_output: {outputs} weight_filler {{ type: "xavier" }} bias_filler {{ type: "uniform" min: -1 max: 1 }}
      {setting} }} }}"""


END = 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }'
TURN = "order: 0 order: 2 order: 1"
NETS = {
    **{
        f"channels shuffled, {name}": (
            DATA
            + convolution("c", "data", "c")
            + shuffle("c", parts, TURN, "dim: 0 dim: 8 dim: 6 dim: 7")
            + convolution("d", "whole", "d")
            + LOSS % "d",
            groups,
        )
        for name, parts, groups in (
            ("pixels joined", "dim: 0 dim: 2 dim: 4 dim: -1", ["c", "parts + turn + whole"]),
            ("five axes", "dim: 0 dim: 4 dim: 2 dim: 6 dim: 7", ["parts + turn + whole"]),
            ("rows among them", "dim: 0 dim: 2 dim: 24 dim: 7", ["parts", "turn", "whole"]),
        )
    },
    "convolution and ReLU": (DATA + convolution("c", "data", "c", bias=True) + relu("c") + LOSS % "c", ["c + c_relu"]),
    "not in place": (DATA + convolution("c", "data", "c") + relu("c", "r") + LOSS % "r", ["c + r_relu"]),
    "inner product, ReLU and dropout": (
        DATA
        + """layer { name: "i" type: "InnerProduct" bottom: "data" top: "i" inner_product_param {
          num_output: 9 weight_filler { type: "xavier" } } }"""
        + relu("i")
        + 'layer { name: "drop" type: "Dropout" bottom: "i" top: "i" }'
        + """layer { name: "ip" type: "InnerProduct" bottom: "i" top: "ip" inner_product_param { num_output: 4
          weight_filler { type: "xavier" } } }
          layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }""",
        ["i + i_relu"],
    ),
    "inner product without a bias": (
        DATA
        + """layer { name: "i" type: "InnerProduct" bottom: "data" top: "i" inner_product_param {
          num_output: 9 bias_term: false weight_filler { type: "xavier" } } }"""
        + relu("i")
        + """layer { name: "ip" type: "InnerProduct" bottom: "i" top: "ip" inner_product_param { num_output: 4
          weight_filler { type: "xavier" } } }
          layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }""",
        ["i", "i_relu"],
    ),
    "inner products with Sigmoid and TanH": (
        DATA
        + dense("i", "data", 9)
        + layer("Sigmoid", "i")
        + dense("j", "i", 6, "transpose: true")
        + layer("TanH", "j", "t")
        + dense("ip", "t", 4)
        + END,
        ["i + Sigmoid_i", "j + TanH_t"],
    ),
    "an activation that several layers read": (
        DATA
        + dense("i", "data", 4)
        + layer("TanH", "i")
        + dense("ip", "i", 4)
        + END
        + layer("EuclideanLoss", "i ip", "far", "loss_weight: 0.3"),
        ["i + TanH_i"],
    ),
    "an activation whose top a layer overwrites": (
        DATA + dense("i", "data", 9) + layer("Sigmoid", "i") + layer("Dropout", "i") + dense("ip", "i", 4) + END,
        ["i", "Sigmoid_i"],
    ),
    "an activation without a bias before it": (
        DATA + dense("i", "data", 9, "bias_term: false") + layer("TanH", "i") + dense("ip", "i", 4) + END,
        ["i", "TanH_i"],
    ),
    "an activation over three axes": (
        DATA + dense("i", "data", 9, "axis: 2") + layer("TanH", "i") + dense("ip", "i", 4) + END,
        ["i", "TanH_i"],
    ),
    "an activation with a loss weight": (
        DATA + dense("i", "data", 9) + layer("TanH", "i", "t", "loss_weight: 0.1") + dense("ip", "data", 4) + END,
        ["i", "TanH_t"],
    ),
    "normalisation in place": (
        DATA + convolution("c", "data", "c") + norm("n", "c", "c") + relu("c") + LOSS % "c",
        ["c", "n + n_scale + c_relu"],
    ),
    "normalisation behind a ReLU": (
        DATA + convolution("c", "data", "c") + relu("c") + norm("n", "c", "c", bias=False) + LOSS % "c",
        ["c + c_relu", "n + n_scale"],
    ),
    "before the convolution": (
        DATA
        + convolution("a", "data", "a", bias=True)
        + norm("n", "a", "m")
        + relu("m")
        + convolution("b", "m", "b")
        + LOSS % "b",
        ["n + n_scale + m_relu"],
    ),
    "a residual block with a projection": (
        DATA
        + convolution("p", "data", "p")
        + norm("np", "p", "p")
        + convolution("a", "data", "a")
        + norm("na", "a", "a")
        + relu("a")
        + convolution("b", "a", "b")
        + norm("nb", "b", "b")
        + total("sum", "p", "b")
        + relu("sum")
        + LOSS % "sum",
        ["p", "np + np_scale", "a", "na + na_scale + a_relu", "b", "nb + nb_scale + sum + sum_relu"],
    ),
    "two residual blocks": (
        DATA
        + convolution("a", "data", "a")
        + norm("na", "a", "a")
        + relu("a")
        + convolution("b", "a", "b")
        + norm("nb", "b", "b")
        + total("s", "a", "b")
        + relu("s")
        + convolution("c", "s", "c")
        + norm("nc", "c", "c")
        + total("t", "s", "c")
        + relu("t")
        + convolution("d", "t", "d")
        + norm("nd", "d", "d")
        + total("u", "t", "d")
        + LOSS % "u",
        ["nb + nb_scale + s + s_relu + s_s_relu_0_split", "nd + nd_scale + u"],
    ),
    "a sum in place on the normalised branch": (
        DATA
        + convolution("p", "data", "p")
        + norm("np", "p", "p")
        + convolution("b", "data", "b")
        + norm("nb", "b", "b")
        + total("sum", "b", "p", "b")
        + relu("b")
        + LOSS % "b",
        ["np + np_scale", "b", "nb + nb_scale + sum + b_relu"],
    ),
    "a sum in place on the other branch": (
        DATA
        + convolution("p", "data", "p", bias=True)
        + relu("p")
        + convolution("b", "data", "b")
        + norm("nb", "b", "b")
        + total("sum", "p", "b", "p")
        + relu("p", "r")
        + LOSS % "r",
        ["p", "p_relu", "b", "nb + nb_scale", "sum", "r_relu"],
    ),
    "a sum in place of two normalised branches": (
        DATA
        + convolution("p", "data", "p")
        + norm("np", "p", "np")
        + convolution("b", "data", "b")
        + norm("nb", "b", "nb")
        + total("sum", "np", "nb", "np")
        + relu("np")
        + LOSS % "np",
        ["p", "b", "nb + nb_scale", "np + np_scale + sum + np_relu"],
    ),
    "a sum in place behind a convolution and a ReLU": (
        DATA
        + convolution("a", "data", "a", bias=True)
        + relu("a")
        + convolution("b", "data", "b", bias=True)
        + relu("b")
        + total("sum", "a", "b", "a")
        + relu("a", "r")
        + LOSS % "r",
        ["a", "a_relu", "b + b_relu", "sum", "r_relu"],
    ),
    "channels at axis 2": (
        DATA + changed(convolution("c", "data", "c", bias=True), "axis: 2", 2) + relu("c") + LOSS % "c",
        ["c", "c_relu"],
    ),
    "channels at axis 2 behind a normalisation": (
        DATA + changed(convolution("c", "data", "c"), "axis: 2", 2) + norm("n", "c", "c") + relu("c") + LOSS % "c",
        ["c", "n + n_scale + c_relu"],
    ),
    "a kernel that reaches past the image": (
        DATA
        + changed(convolution("c", "data", "c"), "stride: 3", 8)
        + norm("n", "c", "n")
        + relu("n")
        + changed(convolution("d", "n", "d", bias=True), "stride: 4", 3)
        + relu("d")
        + LOSS % "d",
        ["c", "n + n_scale + n_relu", "d + d_relu"],
    ),
    "a convolution over vectors": (
        DATA
        + """layer { name: "i" type: "InnerProduct" bottom: "data" top: "i" inner_product_param {
          num_output: 10 weight_filler { type: "xavier" } } }"""
        + convolution("c", "i", "c", bias=True)
        + relu("c")
        + """layer { name: "ip" type: "InnerProduct" bottom: "c" top: "ip" inner_product_param { num_output: 4
          weight_filler { type: "xavier" } } }
          layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }""",
        ["i", "c + c_relu"],
    ),
    "NVIDIA's scale and bias": (
        DATA
        + convolution("c", "data", "c")
        + 'layer { name: "n" type: "BatchNorm" bottom: "c" top: "n" batch_norm_param { scale_bias: true } }'
        + relu("n")
        + LOSS % "n",
        ["n + n_relu"],
    ),
    "BN with stored statistics": (
        DATA
        + convolution("c", "data", "c")
        + 'layer { name: "n" type: "BN" bottom: "c" top: "n" bn_param { slope_filler { value: 2 } } }'
        + relu("n")
        + convolution("d", "n", "d")
        + 'layer { name: "m" type: "BN" bottom: "d" top: "m" bn_param { slope_filler { value: 1 } inverse_std: true } }'
        + relu("m")
        + LOSS % "m",
        ["n + n_relu", "m + m_relu"],
    ),
    "SegNet's BN": (
        DATA
        + convolution("c", "data", "c")
        + convolution("p", "data", "p")
        + 'layer { name: "n" type: "BN" bottom: "c" top: "n" bn_param { scale_filler { value: 2 } } }'
        + total("sum", "p", "n")
        + relu("sum")
        + LOSS % "sum",
        ["c", "n + sum + sum_relu"],
    ),
}


@pytest.mark.parametrize("name", NETS)
def test_fused_layers_give_what_the_single_ones_give(name: str) -> None:
    text, expected = NETS[name]
    fused = build(text, True)
    names = [node.layer.name for node in fused.schedule]
    assert all(group in names for group in expected), names
    ours, plain = run(fused, 2), run(build(text, False), 2)
    assert ours.keys() == plain.keys()
    for key, values in plain.items():
        np.testing.assert_allclose(ours[key], values, rtol=2e-4, atol=2e-5, err_msg=key)


@pytest.mark.parametrize("name", [name for name, (text, _) in NETS.items() if "BatchNorm" in text])
def test_nvidias_statistics_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three passes: two are copied, the third is blended."""
    monkeypatch.setenv("CAFFEPY_DIALECT", "nvidia")
    text, expected = NETS[name]
    fused = build(text, True)
    assert fused.context.nvidia and all(group in [node.layer.name for node in fused.schedule] for group in expected)
    ours, plain = run(fused, 3), run(build(text, False), 3)
    for key, values in plain.items():
        np.testing.assert_allclose(ours[key], values, rtol=2e-4, atol=2e-5, err_msg=key)


@pytest.mark.parametrize("name", NETS)
def test_in_testing_too(name: str) -> None:
    text, _ = NETS[name]
    ours, plain = run(build(text, True, caffe_pb2.TEST), 1), run(build(text, False, caffe_pb2.TEST), 1)
    assert ours["loss 0"] == pytest.approx(plain["loss 0"], rel=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        ("relu_param { negative_slope: 0.1 }", "ReLU"),
        ("eltwise_param { coeff: 1 coeff: -1 }", "Eltwise"),
        ("eltwise_param { operation: MAX }", "Eltwise"),
        ("scale_param { axis: 2 num_axes: 1 }", "Scale"),
    ],
)
def test_other_settings_are_left_alone(change: tuple[str, str]) -> None:
    setting, type_name = change
    text, _ = NETS["a residual block with a projection"]
    param = text_format.Parse(text, caffe_pb2.NetParameter())
    for one in param.layer:
        if one.type == type_name:
            one.ClearField("scale_param")
            text_format.Merge(setting, one)
    net = Net(param, LayerContext(CPU, seed=7), fuse=True)
    groups = [node.layer.type.split(" + ") for node in net.schedule]
    assert [type_name] in groups
    assert all(len(group) == 1 or type_name not in group for group in groups)


def test_shuffled_images_may_change_their_shape() -> None:
    """With the reshaped sizes written down, images of as many pixels come out as others."""
    text, _ = NETS["channels shuffled, pixels joined"]
    losses = []
    for net in (build(text, True), build(text, False)):
        first = run(net, 1)["loss 0"]
        net.blobs["data"].reshape((3, 5, 7, 6))
        losses.append((first, *run(net, 1).values()))
    for fused, plain in zip(*losses, strict=True):
        np.testing.assert_allclose(fused, plain, rtol=2e-4, atol=2e-5)


def test_the_bottom_may_change_its_shape() -> None:
    text, _ = NETS["two residual blocks"]
    nets = [build(text, fuse) for fuse in (True, False)]
    losses = []
    for net in nets:
        run(net, 1)
        net.blobs["data"].reshape((2, 5, 4, 5))
        net.blobs["label"].reshape((2,))
        losses.append(run(net, 1)["loss 0"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)

"""Fused layers compute what the layers by themselves compute: losses, gradients, statistics."""

from __future__ import annotations

import numpy as np
import pytest
from fusion_nets import (
    CPU,
    DATA,
    LOSS,
    build,
    chain,
    changed,
    check_alike,
    convolution,
    in_place,
    layer,
    names_of,
    norm,
    relu,
    run,
    total,
)
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


BRANCHES = "biased a data a; biased b a b; "
MEAN = layer("Pooling", "b", "mean", "pooling_param { pool: AVE global_pooling: true }")
ROWS, GRIDS = dense("g", "mean", 8), changed(convolution("g", "mean", "g"), "pad: 0", 1)
SCALED = layer("Scale", "b g", "scaled", "scale_param { axis: 0 }") + total("sum", "scaled", "n")
AXPY = layer("Axpy", "g b n", "sum")


def gated(factors: str, gate: str, after: str = LOSS % "sum") -> str:
    """Two branches, factors for the channels of the second, a gate and its sum, a ReLU and other layers."""
    branches = DATA + convolution("a", "data", "a") + norm("n", "a", "n") + relu("n") + convolution("b", "n", "b")
    return branches + MEAN + factors + layer("Sigmoid", "g") + gate + relu("sum") + after


READ_TWICE = convolution("c", "sum", "c") + total("t", "c", "sum") + LOSS % "t"


def summed(setting: str = "", bottoms: str = "a b", after: str = "") -> str:
    """Two convolutions, a sum of their tops, a ReLU, other layers in place, and a loss."""
    branches = DATA + convolution("a", "data", "a", bias=True) + convolution("b", "a", "b", bias=True)
    return branches + layer("Eltwise", bottoms, "s", setting) + relu("s") + after + LOSS % "s"


LAST = "order: 0 order: 2 order: 3"
FLATTEN = layer("Flatten", "turn", "rows")
WEIGHTED = layer("Flatten", "turn", "rows", "loss_weight: 0.1")
JOINED = FLATTEN + layer("Flatten", "data", "more") + layer("Concat", "rows more", "all")


def reshaped(bottom: str, top: str, dims: str) -> str:
    """A Reshape to sizes as in `0 -1`."""
    shape = " ".join(f"dim: {size}" for size in dims.split())
    return layer("Reshape", bottom, top, f"reshape_param {{ shape {{ {shape} }} }}")


def turned(rows: str = FLATTEN, order: str = LAST, setting: str = "", dims: str = "0 0 0 0", last: str = "rows") -> str:
    """A convolution and its ReLU, a Reshape, a Permute, layers that make rows, and a loss of the last blob."""
    text = DATA + convolution("c", "data", "c") + relu("c") + reshaped("c", "d", dims)
    text += layer("Permute", "d", "turn", f"permute_param {{ {order} }} {setting}") + rows
    return text + dense("ip", last, 4) + END


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
    **{
        f"rows with channels last, {name}": (text, [f"Permute_turn + {kind}_rows"])
        for name, kind, text in (
            ("flattened", "Flatten", turned()),
            ("flattened in part", "Flatten", turned(layer("Flatten", "turn", "rows", "flatten_param { axis: 2 }"))),
            ("reshaped", "Reshape", turned(reshaped("turn", "rows", "0 -1"))),
            ("reshaped to boxes", "Reshape", turned(reshaped("turn", "rows", "0 -1 4"))),
            ("of volumes", "Flatten", turned(order=LAST + " order: 4 order: 1", dims="0 4 2 6 7")),
            ("overwritten", "Flatten", turned(FLATTEN + in_place("rows", "TanH", "Power power_param { power: 2 }"))),
            ("joined with others", "Flatten", turned(JOINED, last="all")),
            ("whose images get no gradient", "Flatten", turned(setting="propagate_down: false")),
        )
    },
    **{
        f"rows left alone, {name}": (text, ["Permute_turn", f"{kind}_rows"])
        for name, kind, text in (
            ("another order", "Flatten", turned(order="order: 0 order: 3 order: 2")),
            ("three axes", "Flatten", turned(order="order: 0 order: 2", dims="0 8 42")),
            ("images again", "Reshape", turned(reshaped("turn", "rows", "0 -1 8 1"))),
            ("read twice", "Flatten", turned(FLATTEN + layer("Reduction", "turn", "sum", "loss_weight: 0.1"))),
            ("a loss weight", "Flatten", turned(setting="loss_weight: 0.1")),
            ("a loss weight of the rows", "Flatten", turned(WEIGHTED, last="data")),
        )
    },
    "convolution and ReLU": (chain("biased c data c; relu c", "c"), ["c + c_relu"]),
    "not in place": (chain("conv c data c; relu c r", "r"), ["c + r_relu"]),
    "inner product, ReLU and dropout": (
        DATA
        + dense("i", "data", 9)
        + relu("i")
        + 'layer { name: "drop" type: "Dropout" bottom: "i" top: "i" }'
        + dense("ip", "i", 4)
        + END,
        ["i + i_relu"],
    ),
    "inner product without a bias": (
        DATA + dense("i", "data", 9, "bias_term: false") + relu("i") + dense("ip", "i", 4) + END,
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
        chain("conv c data c; norm n c c; relu c", "c"),
        ["c", "n + n_scale + c_relu"],
    ),
    "normalisation behind a ReLU": (
        chain("conv c data c; relu c; unbiased n c c", "c"),
        ["c + c_relu", "n + n_scale"],
    ),
    "before the convolution": (
        chain("biased a data a; norm n a m; relu m; conv b m b", "b"),
        ["n + n_scale + m_relu"],
    ),
    "a residual block with a projection": (
        chain(
            "conv p data p; norm np p p; conv a data a; norm na a a; relu a; conv b a b; norm nb b b; "
            "sum sum p b; relu sum",
            "sum",
        ),
        ["p", "np + np_scale", "a", "na + na_scale + a_relu", "b", "nb + nb_scale + sum + sum_relu"],
    ),
    "two residual blocks": (
        chain(
            "conv a data a; norm na a a; relu a; conv b a b; norm nb b b; sum s a b; relu s; conv c s c; "
            "norm nc c c; sum t s c; relu t; conv d t d; norm nd d d; sum u t d",
            "u",
        ),
        ["nb + nb_scale + s + s_relu + s_s_relu_0_split", "nd + nd_scale + u"],
    ),
    "a sum in place on the normalised branch": (
        chain("conv p data p; norm np p p; conv b data b; norm nb b b; sum sum b p b; relu b", "b"),
        ["np + np_scale", "b", "nb + nb_scale + sum + b_relu"],
    ),
    "a sum in place on the other branch": (
        chain("biased p data p; relu p; conv b data b; norm nb b b; sum sum p b p; relu p r", "r"),
        ["p", "p_relu", "b", "nb + nb_scale", "sum", "r_relu"],
    ),
    "a sum in place of two normalised branches": (
        chain("conv p data p; norm np p np; conv b data b; norm nb b nb; sum sum np nb np; relu np", "np"),
        ["p", "b", "nb + nb_scale", "np + np_scale + sum + np_relu"],
    ),
    "a sum in place behind a convolution and a ReLU": (
        chain("biased a data a; relu a; biased b data b; relu b; sum sum a b a; relu a r", "r"),
        ["a", "a_relu", "b + b_relu", "sum", "r_relu"],
    ),
    "a sum and its ReLU": (
        chain(BRANCHES + "sum s a b; relu s r", "r"),
        ["a", "b", "s + r_relu"],
    ),
    "a sum with the data": (
        chain("biased a data a; conv b a b 5; sum s data b; relu s", "s"),
        ["s + s_relu"],
    ),
    "sums that several layers read": (
        chain(
            BRANCHES + "sum s a b; relu s; conv c s c; conv d s d; sum t s c; relu t; sum u t d; relu u; "
            "conv e u e; conv f u f; conv g u g; sum v e f; sum w v g; sum x u w; relu x",
            "x",
        ),
        ["s + s_relu + s_s_relu_0_split", "t + t_relu", "u + u_relu + u_u_relu_0_split", "v", "w", "x + x_relu"],
    ),
    "a gate and its sum": (gated(ROWS, SCALED), ["Scale_scaled + sum + sum_relu"]),
    "a gate and its sum that several layers read": (
        gated(ROWS, SCALED, READ_TWICE),
        ["Scale_scaled + sum + sum_relu + sum_sum_relu_0_split"],
    ),
    "a gate that passes no gradient to its factors": (
        gated(ROWS, SCALED.replace("scale_param", "propagate_down: [true, false] scale_param", 1)),
        ["Scale_scaled + sum + sum_relu"],
    ),
    "a gate of which only the sum's other bottom gets no gradient": (
        gated(ROWS, SCALED.replace('type: "Eltwise"', 'type: "Eltwise" propagate_down: [true, false]')),
        ["Scale_scaled", "sum + sum_relu"],
    ),
    "a gate and its sum without ReLU": (
        gated(ROWS, SCALED).replace(relu("sum"), ""),
        ["Scale_scaled", "sum"],
    ),
    "a gate in place": (
        gated(ROWS, SCALED.replace('"scaled"', '"b"')).replace(MEAN, MEAN.replace('"b"', '"n"')),
        ["Scale_scaled", "sum + sum_relu"],
    ),
    "an Axpy": (gated(ROWS, AXPY), ["Axpy_sum + sum_relu"]),
    "an Axpy with factors as images that several layers read": (
        gated(GRIDS, AXPY, READ_TWICE),
        ["Axpy_sum + sum_relu + sum_sum_relu_0_split"],
    ),
    "a sum before Dropout": (
        summed(after=layer("Dropout", "s")),
        ["Eltwise_s + s_relu"],
    ),
    "a sum with one gradient": (
        summed("propagate_down: false propagate_down: true"),
        ["Eltwise_s + s_relu"],
    ),
    "a sum with one gradient that several layers read": (
        chain(BRANCHES + "sum s a b; relu s; conv c s c; sum t s c; sum u t s", "u").replace(
            'top: "s"', 'top: "s" propagate_down: true propagate_down: false', 1
        ),
        ["s + s_relu + s_s_relu_0_split", "t", "u"],
    ),
    "a sum with a loss weight": (
        chain(BRANCHES + "sum s a b; relu s r", "r").replace('top: "s"', 'top: "s" loss_weight: 0.1'),
        ["s", "r_relu"],
    ),
    "a sum before a loss weight": (
        chain(BRANCHES + "sum s a b; relu s r", "b").replace('top: "r"', 'top: "r" loss_weight: 0.1'),
        ["s", "r_relu"],
    ),
    "a sum whose reader has a loss weight": (
        chain(BRANCHES + "sum s a b; relu s r", "r").replace('top: "r"', 'top: "r" loss_weight: 0.1'),
        ["s + r_relu", "r_r_relu_0_split"],
    ),
    "a sum of one blob with itself": (
        summed(bottoms="a a").replace('bottom: "b" top: "b"', 'bottom: "data" top: "b"') + layer("Silence", "b", " "),
        ["Eltwise_s + s_relu"],
    ),
    **{
        f"a sum left alone, {name}": (text, ["Eltwise_s", "s_relu"])
        for name, text in (
            ("overwritten", summed(after=in_place("s", "Dropout", "TanH"))),
            ("a factor", summed("eltwise_param { coeff: 1 coeff: -1 }")),
            ("a maximum", summed("eltwise_param { operation: MAX }")),
            ("three bottoms", summed(bottoms="a b a")),
            ("a slope", summed().replace('type: "ReLU"', 'type: "ReLU" relu_param { negative_slope: 0.1 }')),
        )
    },
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
        DATA + dense("i", "data", 10) + convolution("c", "i", "c", bias=True) + relu("c") + dense("ip", "c", 4) + END,
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
    names = names_of(check_alike(text))
    assert all(group in names for group in expected), names


@pytest.mark.parametrize("name", [name for name, (text, _) in NETS.items() if "BatchNorm" in text])
def test_nvidias_statistics_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three passes: two are copied, the third is blended."""
    monkeypatch.setenv("CAFFEPY_DIALECT", "nvidia")
    text, expected = NETS[name]
    fused = check_alike(text, passes=3)
    assert fused.context.nvidia and all(group in names_of(fused) for group in expected)


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


@pytest.mark.parametrize("kind", ["flattened in part", "overwritten"])
def test_images_that_become_rows_may_change_their_shape(kind: str) -> None:
    text = NETS[f"rows with channels last, {kind}"][0]
    losses = []
    for net in (build(text, True), build(text, False)):
        first = run(net, 1)["loss 0"]
        net.blobs["data"].reshape((4, 5, 7, 6))
        net.blobs["label"].reshape((4,))
        losses.append((first, *run(net, 1).values()))
    for fused, plain in zip(*losses, strict=True):
        np.testing.assert_allclose(fused, plain, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind, shares", [("flattened", True), ("overwritten", False)])
def test_rows_share_the_memory_of_the_images_unless_they_are_overwritten(kind: str, shares: bool) -> None:
    net = build(NETS[f"rows with channels last, {kind}"][0], True)
    run(net, 1)
    images, rows = net.blobs["d"], net.blobs["rows"]
    assert np.shares_memory(images.data, rows.data) == shares
    assert np.shares_memory(images.diff, rows.diff)


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

"""Fused layers compute what the layers by themselves compute: losses, gradients, statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.backend import create_backend
from caffepy.backend.types import NormalisedBottom
from caffepy.layers.core.base import LayerContext
from caffepy.net import Net
from caffepy.net.fusion.fused import FusedNormalisation
from caffepy.proto import caffe_pb2

CPU = create_backend(None, 1)
DATA = """
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 3 dim: 5 dim: 6 dim: 7 } shape { dim: 3 }
  data_filler { type: "gaussian" std: 1 } data_filler { type: "constant" value: 1 } } }
"""
LOSS = """
layer { name: "pool" type: "Pooling" bottom: "%s" top: "pool" pooling_param { pool: AVE global_pooling: true } }
layer { name: "ip" type: "InnerProduct" bottom: "pool" top: "ip"
  inner_product_param { num_output: 4 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


def convolution(name: str, bottom: str, top: str, outputs: int = 8, bias: bool = False) -> str:
    return f"""layer {{ name: "{name}" type: "Convolution" bottom: "{bottom}" top: "{top}" convolution_param {{
      num_output: {outputs} kernel_size: 3 pad: 1 bias_term: {str(bias).lower()} weight_filler {{ type: "msra" }}
      bias_filler {{ type: "uniform" min: -1 max: 1 }} }} }}"""


def changed(text: str, setting: str, kernel: int) -> str:
    """A convolution with another setting in place of its padding, and another kernel."""
    return text.replace("pad: 1", setting).replace("kernel_size: 3", f"kernel_size: {kernel}")


def norm(name: str, bottom: str, top: str, bias: bool = True) -> str:
    return f"""layer {{ name: "{name}" type: "BatchNorm" bottom: "{bottom}" top: "{top}" }}
    layer {{ name: "{name}_scale" type: "Scale" bottom: "{top}" top: "{top}" scale_param {{
      filler {{ type: "uniform" min: 0.5 max: 2 }} bias_term: {str(bias).lower()}
      bias_filler {{ type: "uniform" min: -1 max: 1 }} }} }}"""


def relu(blob: str, top: str = "") -> str:
    return f'layer {{ name: "{top or blob}_relu" type: "ReLU" bottom: "{blob}" top: "{top or blob}" }}'


def total(name: str, first: str, second: str, top: str = "") -> str:
    return f'layer {{ name: "{name}" type: "Eltwise" bottom: "{first}" bottom: "{second}" top: "{top or name}" }}'


NETS = {
    "convolution and ReLU": (
        DATA + convolution("c", "data", "c", bias=True) + relu("c") + LOSS % "c", ["c + c_relu"]),
    "not in place": (
        DATA + convolution("c", "data", "c") + relu("c", "r") + LOSS % "r", ["c + r_relu"]),
    "inner product, ReLU and dropout": (
        DATA + """layer { name: "i" type: "InnerProduct" bottom: "data" top: "i" inner_product_param {
          num_output: 9 weight_filler { type: "xavier" } } }""" + relu("i")
        + 'layer { name: "drop" type: "Dropout" bottom: "i" top: "i" }'
        + """layer { name: "ip" type: "InnerProduct" bottom: "i" top: "ip" inner_product_param { num_output: 4
          weight_filler { type: "xavier" } } }
          layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }""",
        ["i + i_relu"]),
    "inner product without a bias": (
        DATA + """layer { name: "i" type: "InnerProduct" bottom: "data" top: "i" inner_product_param {
          num_output: 9 bias_term: false weight_filler { type: "xavier" } } }""" + relu("i")
        + """layer { name: "ip" type: "InnerProduct" bottom: "i" top: "ip" inner_product_param { num_output: 4
          weight_filler { type: "xavier" } } }
          layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }""",
        ["i", "i_relu"]),
    "normalisation in place": (
        DATA + convolution("c", "data", "c") + norm("n", "c", "c") + relu("c") + LOSS % "c",
        ["c", "n + n_scale + c_relu"]),
    "normalisation behind a ReLU": (
        DATA + convolution("c", "data", "c") + relu("c") + norm("n", "c", "c", bias=False) + LOSS % "c",
        ["c + c_relu", "n + n_scale"]),
    "before the convolution": (
        DATA + convolution("a", "data", "a", bias=True) + norm("n", "a", "m") + relu("m") + convolution("b", "m", "b")
        + LOSS % "b", ["n + n_scale + m_relu"]),
    "a residual block with a projection": (
        DATA + convolution("p", "data", "p") + norm("np", "p", "p")
        + convolution("a", "data", "a") + norm("na", "a", "a") + relu("a")
        + convolution("b", "a", "b") + norm("nb", "b", "b") + total("sum", "p", "b") + relu("sum") + LOSS % "sum",
        ["p", "np + np_scale", "a", "na + na_scale + a_relu", "b", "nb + nb_scale + sum + sum_relu"]),
    "two residual blocks": (
        DATA + convolution("a", "data", "a") + norm("na", "a", "a") + relu("a")
        + convolution("b", "a", "b") + norm("nb", "b", "b") + total("s", "a", "b") + relu("s")
        + convolution("c", "s", "c") + norm("nc", "c", "c") + total("t", "s", "c") + relu("t")
        + convolution("d", "t", "d") + norm("nd", "d", "d") + total("u", "t", "d") + LOSS % "u",
        ["nb + nb_scale + s + s_relu + s_s_relu_0_split", "nd + nd_scale + u"]),
    "a sum in place on the normalised branch": (
        DATA + convolution("p", "data", "p") + norm("np", "p", "p")
        + convolution("b", "data", "b") + norm("nb", "b", "b") + total("sum", "b", "p", "b")
        + relu("b") + LOSS % "b", ["np + np_scale", "b", "nb + nb_scale + sum + b_relu"]),
    "a sum in place on the other branch": (
        DATA + convolution("p", "data", "p", bias=True) + relu("p")
        + convolution("b", "data", "b") + norm("nb", "b", "b") + total("sum", "p", "b", "p") + relu("p", "r")
        + LOSS % "r", ["p", "p_relu", "b", "nb + nb_scale", "sum", "r_relu"]),
    "a sum in place of two normalised branches": (
        DATA + convolution("p", "data", "p") + norm("np", "p", "np")
        + convolution("b", "data", "b") + norm("nb", "b", "nb") + total("sum", "np", "nb", "np") + relu("np")
        + LOSS % "np", ["p", "b", "nb + nb_scale", "np + np_scale + sum + np_relu"]),
    "a sum in place behind a convolution and a ReLU": (
        DATA + convolution("a", "data", "a", bias=True) + relu("a")
        + convolution("b", "data", "b", bias=True) + relu("b") + total("sum", "a", "b", "a") + relu("a", "r")
        + LOSS % "r", ["a", "a_relu", "b + b_relu", "sum", "r_relu"]),
    "channels at axis 2": (
        DATA + changed(convolution("c", "data", "c", bias=True), "axis: 2", 2) + relu("c") + LOSS % "c",
        ["c", "c_relu"]),
    "channels at axis 2 behind a normalisation": (
        DATA + changed(convolution("c", "data", "c"), "axis: 2", 2) + norm("n", "c", "c") + relu("c") + LOSS % "c",
        ["c", "n + n_scale + c_relu"]),
    "a kernel that reaches past the image": (
        DATA + changed(convolution("c", "data", "c"), "stride: 3", 8)
        + norm("n", "c", "n") + relu("n") + changed(convolution("d", "n", "d", bias=True), "stride: 4", 3)
        + relu("d") + LOSS % "d", ["c", "n + n_scale + n_relu", "d + d_relu"]),
    "a convolution over vectors": (
        DATA + """layer { name: "i" type: "InnerProduct" bottom: "data" top: "i" inner_product_param {
          num_output: 10 weight_filler { type: "xavier" } } }""" + convolution("c", "i", "c", bias=True) + relu("c")
        + """layer { name: "ip" type: "InnerProduct" bottom: "c" top: "ip" inner_product_param { num_output: 4
          weight_filler { type: "xavier" } } }
          layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }""",
        ["i", "c + c_relu"]),
    "NVIDIA's scale and bias": (
        DATA + convolution("c", "data", "c")
        + 'layer { name: "n" type: "BatchNorm" bottom: "c" top: "n" batch_norm_param { scale_bias: true } }'
        + relu("n") + LOSS % "n", ["n + n_relu"]),
}  # fmt: skip


def build(text: str, fuse: bool, phase: int = caffe_pb2.TRAIN) -> Net:
    param = text_format.Parse(text, caffe_pb2.NetParameter())
    return Net(param, LayerContext(CPU, phase=phase, seed=7), fuse=fuse)


def run(net: Net, passes: int) -> dict[str, Any]:
    """Losses and the parameters' values and gradients of some passes, gradients added up."""
    found: dict[str, Any] = {}
    net.clear_param_diffs()
    for index in range(passes):
        net.forward()
        found[f"loss {index}"] = net.loss()
        if net.phase == caffe_pb2.TRAIN:
            net.backward()
    for layer in net.layers:
        for index, blob in enumerate(layer.blobs):
            found[f"{layer.name}[{index}]"] = blob.host_data()
            if net.phase == caffe_pb2.TRAIN and layer.propagate_to_params[index]:
                found[f"d {layer.name}[{index}]"] = blob.host_diff()
    return found


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
    for layer in param.layer:
        if layer.type == type_name:
            layer.ClearField("scale_param")
            text_format.Merge(setting, layer)
    net = Net(param, LayerContext(CPU, seed=7), fuse=True)
    groups = [node.layer.type.split(" + ") for node in net.schedule]
    assert [type_name] in groups
    assert all(len(group) == 1 or type_name not in group for group in groups)


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


def layer(kind: str, bottoms: str, tops: str = "", setting: str = "") -> str:
    """In place unless tops are given."""
    tops = tops or bottoms
    names = "".join(f' bottom: "{b}"' for b in bottoms.split()) + "".join(f' top: "{t}"' for t in tops.split())
    return f'layer {{ name: "{kind}_{tops.replace(" ", "_")}" type: "{kind}"{names} {setting} }}\n'


def in_place(blob: str, *kinds: str) -> str:
    """Layers that work in place one after the other; settings may follow a type's name."""
    text = ""
    for number, kind in enumerate(kinds):
        name, _, setting = kind.partition(" ")
        text += layer(name, blob, "", setting).replace(f'name: "{name}_', f'name: "{name}{number}_')
    return text


def check_alike(text: str, passes: int = 2) -> Net:
    """Compare the fused net with the plain one; returns the fused one."""
    fused = build(text, True)
    ours, plain = run(fused, passes), run(build(text, False), passes)
    assert ours.keys() == plain.keys()
    for key, values in plain.items():
        np.testing.assert_allclose(ours[key], values, rtol=2e-4, atol=2e-5, err_msg=key)
    return fused


def names_of(net: Net) -> list[str]:
    return [node.layer.name for node in net.schedule]


SCALE = 'Scale scale_param { bias_term: true filler { type: "uniform" min: 0.5 max: 2 } }'
STORED = "BatchNorm batch_norm_param { use_global_stats: true eps: 1 }"
KEEPING = [
    "PReLU", SCALE, "AbsVal", "Power power_param { power: 2 shift: 0.3 }", "Clip clip_param { min: -0.4 max: 0.7 }",
    "Swish", "BNLL", "AbsVal\nLog log_param { shift: 1.5 }", "ReLU relu_param { negative_slope: -0.3 }",
]  # fmt: skip
"""Layers that need their bottom for the gradient and keep it where they work in place."""


@pytest.mark.parametrize("kind", KEEPING)
def test_a_group_behind_a_layer_in_place_leaves_it_in_place(kind: str) -> None:
    before = kind.split("\n")
    text = DATA + convolution("c", "data", "c") + in_place("c", *before, "BatchNorm", SCALE, "ReLU") + LOSS % "c"
    fused = check_alike(text)
    group = f"BatchNorm{len(before)}_c + Scale{len(before) + 1}_c + ReLU{len(before) + 2}_c"
    assert group in names_of(fused)
    node = next(n for n in fused.schedule if n.layer.name == group)
    assert node.tops[0] is fused.blobs["c"]
    assert node.bottoms[0] is not node.tops[0]
    for other in fused.schedule[: fused.schedule.index(node)]:
        assert fused.blobs["c"] not in (*other.bottoms, *other.tops)


def test_two_groups_in_place_on_one_blob() -> None:
    chain = ("BatchNorm", SCALE, "PReLU", "BatchNorm", SCALE, "ReLU", "Dropout")
    fused = check_alike(DATA + convolution("c", "data", "c") + in_place("c", *chain) + LOSS % "c")
    assert names_of(fused)[2:5] == ["BatchNorm0_c + Scale1_c", "PReLU2_c", "BatchNorm3_c + Scale4_c + ReLU5_c"]


@pytest.mark.parametrize(
    "text",
    [
        convolution("c", "data", "c") + in_place("c", "PReLU", "BatchNorm", "Sigmoid"),  # a BatchNorm by itself
        layer("TanH", "data", "c") + in_place("c", STORED, SCALE),  # statistics that are not the batch's
        in_place("data", "BatchNorm", SCALE) + convolution("c", "data", "c"),  # data are written in one place alone
    ],
)
def test_where_nothing_is_fused_nothing_is_rewired(text: str) -> None:
    fused = check_alike(DATA + text + LOSS % "c", passes=1)
    assert names_of(fused) == fused.layer_names
    for ours, written in zip(fused.schedule, fused.nodes, strict=True):
        assert [id(blob) for blob in ours.bottoms] == [id(blob) for blob in written.bottoms]
        assert [id(blob) for blob in ours.tops] == [id(blob) for blob in written.tops]


@pytest.mark.parametrize("last", [*KEEPING, "TanH", "Bias", "ELU", "Exp", "Sigmoid", "BatchNorm"])
@pytest.mark.parametrize("first", ["Convolution", "InnerProduct"])
def test_a_relu_that_a_third_layer_overwrites_stays_alone(first: str, last: str) -> None:
    top = convolution("c", "data", "c", bias=True)
    if first == "InnerProduct":
        top = layer(first, "data", "c", 'inner_product_param { num_output: 9 weight_filler { type: "xavier" } }')
    text = DATA + top + in_place("c", "ReLU", "Dropout", *last.split("\n"))
    text += layer("InnerProduct", "c", "i", 'inner_product_param { num_output: 4 weight_filler { type: "xavier" } }')
    fused = check_alike(text + layer("SoftmaxWithLoss", "i label", "loss"))
    assert "ReLU0_c" in names_of(fused)


def test_a_relu_before_several_dropouts_is_fused() -> None:
    text = DATA + convolution("c", "data", "c", bias=True) + in_place("c", "ReLU", "Dropout", "Dropout") + LOSS % "c"
    assert "c + ReLU0_c" in names_of(check_alike(text))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("readers", [2, 4, 5, 6, 9])
def test_a_group_may_have_any_number_of_readers(readers: int, residual: bool) -> None:
    text = DATA + convolution("c", "data", "c") + in_place("c", "BatchNorm", SCALE)
    if residual:
        text += convolution("d", "data", "d") + total("s", "d", "c")
    blob = "s" if residual else "c"
    text += relu(blob)
    for number in range(readers):
        text += convolution(f"r{number}", blob, f"r{number}", outputs=2, bias=True)
    text += layer("Concat", " ".join(f"r{number}" for number in range(readers)), "all")
    fused = check_alike(text + LOSS % "all")
    assert any(name.endswith("_split") and "BatchNorm" in name for name in names_of(fused))


def test_a_residual_that_wants_no_gradient_gets_none() -> None:
    """It comes from a Split, whose other reader's gradient would have another added."""
    text = DATA + convolution("a", "data", "a") + convolution("b", "a", "b") + in_place("b", "BatchNorm", "Scale")
    text += total("s", "b", "a").replace(" }", " propagate_down: true propagate_down: false }") + relu("s")
    fused = check_alike(text + LOSS % "s")
    assert "BatchNorm0_b + Scale1_b + s + s_relu" in names_of(fused)


@pytest.mark.parametrize(
    ("where", "group"),
    [("Eltwise", "BatchNorm0_b + Scale1_b"), ("ReLU", "BatchNorm0_b + Scale1_b + s"), ("Scale", "BatchNorm0_b")],
)
def test_parameters_that_propagate_down_cuts_off_get_no_gradient(where: str, group: str) -> None:
    text = DATA + convolution("a", "data", "a") + convolution("b", "data", "b") + in_place("b", "BatchNorm", SCALE)
    param = text_format.Parse(text + total("s", "b", "a") + relu("s") + LOSS % "s", caffe_pb2.NetParameter())
    cut = next(one for one in param.layer if one.type == where)
    cut.propagate_down.extend([False, True][: len(cut.bottom)])
    fused = check_alike(text_format.MessageToString(param))
    assert any(name.startswith(group) for name in names_of(fused))


def test_a_gradient_that_is_not_handed_down_in_place_stays_in_the_blob() -> None:
    """The Split adds up what lies there."""
    text = DATA + convolution("c", "data", "c") + layer("Split", "c", "s t") + in_place("s", "BatchNorm", SCALE)
    text = text.replace('type: "BatchNorm"', 'type: "BatchNorm" propagate_down: false')
    fused = check_alike(text + total("u", "s", "t") + LOSS % "u")
    assert "BatchNorm0_s" in names_of(fused)


def test_shared_statistics_are_updated_in_the_same_order() -> None:
    shared = "".join(f' param {{ name: "m{i}" lr_mult: 0 }}' for i in range(3))
    text = DATA + convolution("a", "data", "a") + convolution("b", "data", "b")
    text += layer("BatchNorm", "a", "m", shared) + layer("BatchNorm", "b", "n", shared)
    text += layer("Scale", "n") + layer("Scale", "m") + layer("Concat", "m n", "all")
    fused = check_alike(text + LOSS % "all")
    assert {"BatchNorm_m", "BatchNorm_n + Scale_n"} <= set(names_of(fused))


def test_a_group_stays_before_a_layer_that_shares_its_parameters() -> None:
    """Its gradients are complete with the first layer that has them, and are exchanged from then on."""
    shared = 'param { name: "w" } param { name: "b" } convolution_param {'
    first, second = (convolution(name, "data", name, bias=True).replace("convolution_param {", shared) for name in "cd")
    text = DATA + first + second + relu("c") + relu("d") + total("s", "c", "d") + LOSS % "s"
    names = names_of(check_alike(text))
    assert "c" in names
    assert "d + d_relu" in names


def test_a_layer_with_a_loss_weight_stays_alone() -> None:
    text = DATA + convolution("c", "data", "c", bias=True) + layer("ReLU", "c", "r", "loss_weight: 0.1")
    text += convolution("d", "data", "d") + norm("n", "d", "d") + layer("ReLU", "d", "", "loss_weight: 0.1")
    names = names_of(build(text, True))
    assert {"c", "ReLU_r", "n + n_scale", "ReLU_d"} <= set(names)


def test_scale_and_bias_may_be_one_parameter() -> None:
    """Its gradient is the sum of the two that it has as scale and as bias."""
    text = DATA + convolution("c", "data", "c") + in_place("c", "BatchNorm", SCALE) + LOSS % "c"
    filler = 'filler { type: "uniform" min: 0.5 max: 2 }'
    text = text.replace(filler, 'filler { value: 0.7 type: "constant" } bias_filler { value: 0.7 type: "constant" }')
    one = text.replace('name: "Scale1_c"', 'name: "Scale1_c" param { name: "both" } param { name: "both" }')
    apart, together = (run(build(each, True), 2) for each in (text, one))
    wanted = apart["d Scale1_c[0]"] + apart["d Scale1_c[1]"]
    np.testing.assert_allclose(together["d Scale1_c[0]"], wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(together["d c[0]"], apart["d c[0]"], rtol=1e-4, atol=1e-5)


class GradientsInOnePass:
    """A convolution that computes both gradients and a normalisation's sums at once, by the parts that there are.

    Args:
        plan: the convolution.
    """

    def __init__(self, plan: Any) -> None:
        self._plan = plan
        self.calls = self.forward_calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def forward_normalised(self, bottom: NormalisedBottom, weights: Any, y: Any, sums: Any) -> None:
        assert sums is None
        self.forward_calls += 1
        x = CPU.zeros(bottom.x.shape)
        CPU.batch_norm_forward(bottom.x, bottom.n, x, None, bottom.relu, None)
        self._plan.forward(x, weights, None, y)

    def backward_normalised(
        self, bottom: NormalisedBottom, dy: Any, weights: Any, dx: Any, dweights: Any, accumulate: bool
    ) -> None:
        self.calls += 1
        y = CPU.zeros(bottom.x.shape)
        CPU.batch_norm_forward(bottom.x, bottom.n, y, None, bottom.relu, None)
        self._plan.backward_weights(y, dy, dweights, accumulate)
        self._plan.backward_data(dy, weights, dx)
        CPU.batch_norm_backward_sums(bottom.x, [dx], bottom.n, bottom.sums, bottom.relu)


SEPARABLE = (
    DATA + convolution("a", "data", "a") + norm("na", "a", "a") + "%s"
    + convolution("b", "a", "b").replace("pad: 1", "pad: 1 group: 8") + norm("nb", "b", "b") + relu("b") + LOSS % "b"
)  # fmt: skip


@pytest.fixture
def in_one_pass(monkeypatch: pytest.MonkeyPatch) -> list[GradientsInOnePass]:
    """The convolutions that were planned, all of which can compute both gradients at once."""
    planned: list[GradientsInOnePass] = []
    plan = CPU.plan_convolution

    def wrapped(*arguments: Any) -> GradientsInOnePass:
        planned.append(GradientsInOnePass(plan(*arguments)))
        return planned[-1]

    monkeypatch.setattr(CPU, "plan_convolution", wrapped)
    return planned


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("between", [relu("a"), ""])
def test_gradients_in_one_pass_are_those_of_the_single_layers(
    in_one_pass: list[GradientsInOnePass], between: str, passes: int
) -> None:
    ours = run(build(SEPARABLE % between, True), passes)
    assert [(plan.calls, plan.forward_calls) for plan in in_one_pass] == [(0, 0), (passes, passes)]
    for key, values in run(build(SEPARABLE % between, False), passes).items():
        np.testing.assert_allclose(ours[key], values, rtol=2e-4, atol=2e-5, err_msg=key)


def test_a_bottom_that_is_normalised_while_it_is_loaded_is_not_written(in_one_pass: list[GradientsInOnePass]) -> None:
    net = build(SEPARABLE % relu("a"), True)
    written = []
    for node in net.schedule:
        if isinstance(node.layer, FusedNormalisation):
            net.backend.fill(node.tops[0].data, 7.0)
            net.forward()
            written.append(bool((node.tops[0].data != 7.0).any()))
    assert written == [False, True]


@pytest.mark.parametrize(
    "change",
    [
        (convolution("b", "a", "b"), convolution("c", "a", "c") + convolution("b", "a", "b")),  # another reader
        ('name: "b" type', 'name: "b" propagate_down: false type'),
        ('name: "b" type', 'name: "b" param { lr_mult: 0 } type'),
        (relu("a"), relu("a").replace('"ReLU"', '"TanH"')),
        ("bias_term: false", "bias_term: true"),
    ],
)
def test_gradients_are_computed_by_themselves_where_more_is_asked_for(
    in_one_pass: list[GradientsInOnePass], change: tuple[str, str]
) -> None:
    text = (SEPARABLE % relu("a")).replace("pad: 1 group: 8", "pad: 1").replace(*change)
    ours = run(build(text, True), 1)
    assert not any(plan.calls or plan.forward_calls for plan in in_one_pass)
    for key, values in run(build(text, False), 1).items():
        np.testing.assert_allclose(ours[key], values, rtol=2e-4, atol=2e-5, err_msg=key)

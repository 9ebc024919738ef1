"""Fused groups beside layers in place, several readers, shared parameters and gradients that stop."""

from __future__ import annotations

import numpy as np
import pytest
from fusion_nets import (
    DATA,
    KEEPING,
    LOSS,
    SCALE,
    STORED,
    build,
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

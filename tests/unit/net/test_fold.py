"""Folded TEST nets give what the layers by themselves give, and fold what they should."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from compare_nets import SpoilingBackend, errors
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from wide_nets import fusible_net

from caffepy.backend import Backend, create_backend
from caffepy.errors import ShapeError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import LayerContext
from caffepy.net import Net
from caffepy.net.fold import FoldedConvolution
from caffepy.net.memory_plan import plan_memory

CPU = create_backend(None, 1)
TOLERANCE = 2e-4
FACTORS = {
    "BatchNorm": "",
    "BatchNorm with its own scale": "batch_norm_param { scale_bias: true }",
    "BN": "",
    "BN of inverse deviations": "bn_param { inverse_std: true }",
    "BN of SegNet": "bn_param { bn_mode: INFERENCE }",
    "Scale": 'scale_param { filler { type: "uniform" min: 0.5 max: 2 } }',
    "Scale and bias": 'scale_param { bias_term: true filler { type: "uniform" min: -2 max: 2 } '
    'bias_filler { type: "uniform" min: -1 max: 1 } }',
    "Bias": 'bias_param { filler { type: "uniform" min: -1 max: 1 } }',
}
"""Layers that a convolution takes in, by what they are called here: the type's name comes first."""


def layer(name: str, kind: str, bottoms: str, top: str, setting: str = "") -> str:
    names = "".join(f' bottom: "{b}"' for b in bottoms.split()) + "".join(f' top: "{t}"' for t in top.split())
    return f'layer {{ name: "{name}" type: "{kind}"{names} {setting} }}\n'


def data(*shape: int) -> str:
    dims = " ".join(f"dim: {d}" for d in shape)
    return layer("data", "Input", "", "data", f"input_param {{ shape {{ {dims} }} }}")


def convolution(name: str, bottom: str, setting: str = "kernel_size: 3 pad: 1", outputs: int = 6) -> str:
    fillers = 'weight_filler { type: "gaussian" std: 0.3 } bias_filler { type: "uniform" min: -1 max: 1 }'
    setting = f"convolution_param {{ num_output: {outputs} {setting} {fillers} }}"
    return layer(name, "Convolution", bottom, name, setting)


@dataclass
class Case:
    """A convolution and what follows it.

    Args:
        size: the bottom's spatial axes.
        kernel: for all of them, as `stride`, `pad` and `dilation`.
        group: of the convolution, which has four inputs and eight outputs.
        bias: whether it has one.
        factors: keys of FACTORS.
        in_place: for each of them, and for what follows, whether it works in place.
        residual: the index of the convolution among the sum's bottoms; None: there is no sum.
        relu: whether one follows.
        readers: how many layers read the result.
    """

    size: list[int] = field(default_factory=lambda: [5, 6])
    kernel: int = 3
    stride: int = 1
    pad: int = 1
    dilation: int = 1
    group: int = 1
    bias: bool = True
    factors: list[str] = field(default_factory=list)
    in_place: bool = True
    residual: int | None = None
    relu: bool = False
    readers: int = 1

    @property
    def text(self) -> str:
        """The net."""
        window = f"kernel_size: {self.kernel} stride: {self.stride} pad: {self.pad} dilation: {self.dilation}"
        window += f" group: {self.group} bias_term: {str(self.bias).lower()}"
        text, blob = data(2, 4, *self.size), "c"
        if self.residual is not None:  # before the convolution, so that the sum goes to that one
            text += convolution("other", "data", window, 8) + layer("other_abs", "AbsVal", "other", "other")
        text += convolution("c", "data", window, 8)
        for index, factor in enumerate(self.factors):
            top = blob if self.in_place else f"f{index}"
            text += layer(f"factor{index}", factor.split()[0], blob, top, FACTORS[factor])
            blob = top
        if self.residual is not None:
            bottoms = [blob, "other"] if self.residual == 0 else ["other", blob]
            text += layer("sum", "Eltwise", " ".join(bottoms), "sum")
            blob = "sum"
        if self.relu:
            top = blob if self.in_place else "r"
            text += layer("relu", "ReLU", blob, top)
            blob = top
        for reader in range(self.readers):
            text += layer(f"reader{reader}", "Sigmoid", blob, f"out{reader}")
        return text

    @property
    def types(self) -> list[str]:
        """Of the layers that are to be one."""
        found = ["Convolution", *(factor.split()[0] for factor in self.factors)]
        found += ["Eltwise"] * (self.residual is not None) + ["ReLU"] * self.relu
        return found + ["Split"] * (self.readers > 1 and len(found) > 1)


CASES = st.builds(
    Case,
    size=st.lists(st.integers(3, 7), min_size=1, max_size=3),
    kernel=st.sampled_from([1, 2, 3]),
    stride=st.sampled_from([1, 2, 3]),
    pad=st.sampled_from([0, 1]),
    dilation=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 2, 4]),
    bias=st.booleans(),
    factors=st.lists(st.sampled_from(sorted(FACTORS)), max_size=4),
    in_place=st.booleans(),
    residual=st.sampled_from([None, 0, 1]),
    relu=st.booleans(),
    readers=st.sampled_from([1, 2, 3]),
)


def build(text: str, fuse: bool, backend: Backend = CPU, share: bool = False) -> Net:
    """A TEST net with numbers that no filler makes."""
    param = text_format.Parse(text, caffe_pb2.NetParameter())
    context = LayerContext(backend, phase=caffe_pb2.TEST, seed=7)
    net = Net(param, context, fuse=fuse)
    if share:
        plan = plan_memory(param, LayerContext(backend, phase=caffe_pb2.TEST, seed=7), fuse=fuse)
        plan.bind(net, plan.new_arena(backend))
    fill(net, 1)
    return net


def fill(net: Net, seed: int) -> None:
    """Give BatchNorms statistics, their scale and bias too, and inputs values."""
    generator = np.random.default_rng(seed)
    for each in net.layers:
        for index, blob in enumerate(each.blobs if each.type in ("BatchNorm", "BN") else ()):
            signed = index in ((0, 4) if each.type == "BatchNorm" else (1, 2))
            values = generator.standard_normal(blob.shape) if signed else generator.uniform(0.5, 2, blob.shape)
            net.backend.from_host(values.astype(np.float32), blob.data)
    for name in net.inputs:
        blob = net.blobs[name]
        net.backend.from_host(generator.standard_normal(blob.shape).astype(np.float32), blob.data)


def outputs(net: Net) -> dict[str, Any]:
    net.forward()
    return {name: blob.host_data() for name, blob in net.outputs.items()}


def groups(net: Net) -> list[str]:
    return [node.layer.type for node in net.schedule]


def check_alike(text: str, **how: Any) -> Net:
    """Compare the folded net with the plain one; returns the folded one."""
    folded, plain = build(text, True, **how), build(text, False)
    wanted = outputs(plain)
    for _ in range(2):
        found = outputs(folded)
        assert found.keys() == wanted.keys()
        assert max(errors(found, wanted).values()) < TOLERANCE
    return folded


@settings(max_examples=120)
@given(case=CASES, nvidia=st.booleans(), share=st.booleans())
def test_a_chain_is_one_layer_and_gives_the_same(case: Case, nvidia: bool, share: bool) -> None:
    if any((case.kernel - 1) * case.dilation + 1 > size + 2 * case.pad + case.stride - 1 for size in case.size):
        case.size = [max(size, 5) for size in case.size]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAFFEPY_DIALECT", "nvidia" if nvidia else "bvlc")
        backend = SpoilingBackend(1) if share else CPU
        folded = check_alike(case.text, backend=backend, share=share)
    assert " + ".join(case.types) in groups(folded)


@pytest.mark.parametrize("factors", [["BatchNorm"], ["Scale and bias"], []])
def test_a_kernel_that_reaches_past_the_image(factors: list[str]) -> None:
    case = Case(size=[5, 4], kernel=6, stride=4, pad=0, factors=factors, residual=0, relu=True)
    assert " + ".join(case.types) in groups(check_alike(case.text))


def test_channels_by_themselves() -> None:
    """Convolutions over vectors take in what multiplies and adds, not a sum: its bottoms have other axes."""
    text = data(3, 4) + convolution("c", "data", "") + layer("n", "BatchNorm", "c", "c")
    text += convolution("d", "data", "") + layer("sum", "Eltwise", "c d", "sum") + layer("r", "ReLU", "sum", "sum")
    assert groups(check_alike(text)) == ["Input", "Split", "Convolution + BatchNorm", "Convolution", "Eltwise + ReLU"]


def test_a_residual_block_with_a_projection() -> None:
    """The sum goes to the branch that is computed last, whichever bottom it is."""
    for bottoms in ("p b", "b p"):
        text = data(2, 4, 5, 5) + convolution("p", "data") + layer("pn", "BatchNorm", "p", "p")
        text += convolution("a", "data") + layer("an", "BatchNorm", "a", "a") + layer("ar", "ReLU", "a", "a")
        text += convolution("b", "a") + layer("bn", "BatchNorm", "b", "b")
        text += layer("sum", "Eltwise", bottoms, "sum") + layer("relu", "ReLU", "sum", "sum")
        text += convolution("x", "sum", "kernel_size: 1") + layer("y", "TanH", "sum", "y")
        names = [node.layer.name for node in check_alike(text).schedule]
        assert names[2:] == ["p + pn", "a + an + ar", "b + bn + sum + relu + sum_relu_0_split", "x", "y"]


def test_a_sum_in_place_goes_to_the_branch_whose_blob_is_written() -> None:
    text = data(2, 4, 5, 5) + convolution("p", "data") + convolution("b", "data")
    into_b = text + layer("sum", "Eltwise", "b p", "b") + layer("relu", "ReLU", "b", "b")
    assert groups(check_alike(into_b))[-1] == "Convolution + Eltwise + ReLU"
    into_p = text + layer("sum", "Eltwise", "p b", "p") + layer("relu", "ReLU", "p", "p")
    folded = check_alike(into_p)
    assert [node.layer.name for node in folded.schedule][2:] == ["b", "p + sum + relu"]


def test_a_normalisation_in_place_behind_a_folded_layer_is_fused() -> None:
    text = data(2, 4, 5, 5) + convolution("c", "data") + layer("r", "ReLU", "c", "c")
    text += layer("n", "BatchNorm", "c", "c") + layer("s", "Scale", "c", "c", FACTORS["Scale"])
    assert groups(check_alike(text)) == ["Input", "Convolution + ReLU", "BatchNorm + Scale"]


def folded_layer(net: Net) -> FoldedConvolution:
    """The first one."""
    return next(node.layer for node in net.schedule if isinstance(node.layer, FoldedConvolution))


WEIGHTS_KEPT = {
    "tiles": Case(kernel=3, stride=2, factors=["BatchNorm", "Scale and bias"]),
    "narrow": Case(kernel=3, group=4, factors=["BatchNorm"]),
    "product": Case(size=[1, 1], kernel=1, pad=0, factors=["Scale"]),
}


@pytest.mark.parametrize("case", WEIGHTS_KEPT.values(), ids=WEIGHTS_KEPT)
def test_weights_that_were_packed_are_not_kept_folded_as_well(case: Case) -> None:
    net = check_alike(case.text)
    layer = folded_layer(net)
    assert [array.shape for array in layer.folded] == [(8,), (8,)]
    assert layer.members[0].plan.kept is not None


def test_folding_takes_memory_for_the_packed_weights_alone() -> None:
    """512 KiB as learned, as much packed for 24 columns at a time; the folded ones are there during `prepare` only."""
    text = data(1, 128, 5, 5) + convolution("c", "data", "kernel_size: 4", 64) + layer("n", "BatchNorm", "c", "c")
    net = build(text, True)
    outputs(net)
    folded_layer(net).members[0].plan.kept = None
    learned = net.layers[1].blobs[0].count * 4
    tracemalloc.start()
    try:
        net.fold_parameters()
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1.3 * learned
    assert peak > 1.9 * learned  # so that what is counted above is what was meant


def test_weights_of_a_convolution_over_one_axis_are_kept_folded() -> None:
    """They are brought into another order in each pass."""
    net = check_alike(Case(size=[5], factors=["BatchNorm"]).text)
    assert [array.shape for array in folded_layer(net).folded] == [(8,), (8,), (8, 4, 3)]


@pytest.mark.parametrize("case", WEIGHTS_KEPT.values(), ids=WEIGHTS_KEPT)
def test_another_shape_and_parameters_that_moved_are_folded_again(case: Case) -> None:
    """Without `prepare`: a plan of a new shape has no weights yet, and those of the old array are asked for no more."""
    folded, plain = build(case.text, True), build(case.text, False)
    outputs(folded)
    for net in (folded, plain):
        blob = net.blobs["data"]
        blob.reshape((3, 4, *(size + 2 for size in blob.shape[2:])))
        blob.data[...] = np.random.default_rng(5).standard_normal(blob.shape)
    folded.folds_parameters = False
    assert max(errors(outputs(folded), outputs(plain)).values()) < TOLERANCE
    before = folded.layers[1].blobs[0].data
    for parameter in folded.parameters.parameters:
        parameter.blob.move(CPU.zeros(parameter.blob.shape))
    before[...] = np.nan
    assert max(errors(outputs(folded), outputs(plain)).values()) < TOLERANCE


def test_shared_parameters_are_folded_for_each_layer() -> None:
    shared = 'param { name: "w" } param { name: "b" }'
    text = data(2, 4, 5, 5)
    for name in "cd":
        text += convolution(name, "data").replace("convolution_param", f"{shared} convolution_param")
        text += layer(f"{name}n", "BatchNorm", name, name)
    folded = check_alike(text)
    assert groups(folded).count("Convolution + BatchNorm") == 2
    first, second = (node.layer for node in folded.schedule if isinstance(node.layer, FoldedConvolution))
    assert second.members[0].blobs[0].gradient_owner is first.members[0].blobs[0]


@pytest.mark.parametrize(
    "text, alone",
    [
        (layer("r", "ReLU", "c", "c", "relu_param { negative_slope: 0.1 }"), "ReLU"),
        (layer("s", "Scale", "c", "c", "scale_param { axis: 2 num_axes: 1 }"), "Scale"),
        (layer("s", "Scale", "c", "c", "scale_param { axis: 0 num_axes: -1 }"), "Scale"),
        (layer("s", "Bias", "c", "c", "bias_param { num_axes: 0 }"), "Bias"),
        (layer("n", "BatchNorm", "c", "c", "batch_norm_param { use_global_stats: false }"), "BatchNorm"),
        (layer("n", "BN", "c", "c", "bn_param { bn_mode: LEARN scale_filler { value: 2 } }"), "BN"),
        (layer("s", "Eltwise", "c data", "s", "eltwise_param { coeff: 1 coeff: -1 }"), "Eltwise"),
        (layer("s", "Eltwise", "c data", "s", "eltwise_param { operation: MAX }"), "Eltwise"),
        (layer("s", "Eltwise", "c data other", "s"), "Eltwise"),
    ],
)
def test_other_settings_are_left_alone(text: str, alone: str) -> None:
    inputs = (
        data(2, 4, 5, 5) + data(2, 4, 5, 5).replace('"data"', '"x"') + data(2, 4, 5, 5).replace('"data"', '"other"')
    )
    folded = check_alike(inputs + convolution("c", "x", outputs=4) + text)
    assert alone in groups(folded)


@pytest.mark.parametrize("share", [False, True])
def test_heads_of_a_detector_become_rows(share: bool) -> None:
    """Outputs and what a Concat joins."""
    text = data(2, 4, 5, 5)
    for name, kind, setting in (
        ("a", "Flatten", ""),
        ("b", "Reshape", "reshape_param { shape { dim: 0 dim: -1 dim: 6 } }"),
        ("c", "Flatten", ""),
    ):
        order = "permute_param { order: 0 order: 2 order: 3 order: 1 }"
        text += convolution(name, "data") + layer(f"{name}_turn", "Permute", name, f"{name}_turn", order)
        text += layer(f"{name}_rows", kind, f"{name}_turn", f"{name}_rows", setting)
    folded = check_alike(text + layer("all", "Concat", "a_rows c_rows", "all"), share=share)
    found = groups(folded)
    assert (found.count("Permute + Flatten"), found.count("Permute + Reshape")) == (2, 1)
    assert sorted(folded.outputs) == ["all", "b_rows"]


def test_channels_at_axis_2_are_left_alone() -> None:
    text = data(2, 4, 5, 5) + convolution("c", "data", "axis: 2 kernel_size: 2") + layer("r", "ReLU", "c", "c")
    assert groups(check_alike(text)) == ["Input", "Convolution", "ReLU"]


def test_several_bottoms_are_left_alone() -> None:
    text = data(2, 4, 5, 5) + layer("x", "Power", "data", "x", "power_param { scale: 2 }")
    text += convolution("c", "data").replace('top: "c"', 'bottom: "x" top: "c" top: "d"')
    assert groups(check_alike(text + layer("r", "ReLU", "c", "c")))[-2:] == ["Convolution", "ReLU"]


def test_tops_that_others_overwrite_are_their_own() -> None:
    """A Split that somebody wrote, on whose tops layers work in place."""
    text = data(2, 4, 5, 5) + convolution("c", "data") + layer("r", "ReLU", "c", "c") + layer("s", "Split", "c", "a b")
    text += layer("ta", "TanH", "a", "a") + layer("pb", "Power", "b", "b", "power_param { shift: 3 }")
    assert groups(check_alike(text))[:3] == ["Input", "Convolution + ReLU", "Split"]


def test_a_convolution_reads_what_is_reshaped_and_overwritten_later() -> None:
    """Its group runs where the last of its layers stands, behind those that work on other views of its bottom."""
    text = data(2, 4, 5, 5) + layer("a", "TanH", "data", "a") + convolution("c", "a")
    text += layer("f", "Reshape", "a", "f", "reshape_param { shape { dim: 0 dim: 0 dim: 25 dim: 1 } }")
    text += layer("fr", "Power", "f", "f", "power_param { scale: 5 shift: 3 }")
    text += layer("n", "BatchNorm", "c", "c") + layer("r", "ReLU", "c", "c")
    assert groups(check_alike(text))[-1] == "Convolution + BatchNorm + ReLU"


def test_losses_of_inner_blobs_count() -> None:
    text = data(2, 4, 5, 5) + convolution("c", "data") + layer("r", "ReLU", "c", "r", "loss_weight: 0.5")
    text += layer("t", "TanH", "r", "t")
    folded, plain = check_alike(text), build(text, False)
    plain.forward()
    assert folded.loss() == pytest.approx(plain.loss(), rel=1e-5)
    assert folded.loss() != 0
    assert "Split" in groups(folded)  # it carries the weight


def test_blobs_that_nobody_reads_are_seen() -> None:
    text = data(2, 4, 5, 5) + convolution("a", "data") + layer("an", "BatchNorm", "a", "a")
    text += convolution("b", "a") + layer("br", "ReLU", "b", "b") + layer("s", "Softmax", "a", "s")
    assert list(check_alike(text).outputs) == ["b", "s"]


def test_values_of_parameters_are_taken_anew_in_each_pass() -> None:
    text = data(2, 4, 5, 5) + convolution("c", "data") + layer("n", "BatchNorm", "c", "c")
    folded, plain = build(text, True), build(text, False)
    before = outputs(folded)["c"]
    for net in (folded, plain):
        net.backend.fill(net.layers[1].blobs[1].data, 3)
        fill(net, 2)
    after = outputs(folded)["c"]
    assert np.abs(after - before).max() > 0.1
    np.testing.assert_allclose(after, outputs(plain)["c"], rtol=1e-4, atol=1e-5)


def test_parameters_of_the_net_that_they_are_shared_with() -> None:
    text = data(2, 4, 5, 5) + convolution("c", "data") + layer("n", "BatchNorm", "c", "c")
    folded, plain = build(text, True), build(text, False)
    fill(folded, 3)  # the inputs too
    fill(plain, 3)
    plain.backend.fill(plain.layers[1].blobs[1].data, 2)
    folded.share_trained_layers_with(plain)
    np.testing.assert_allclose(outputs(folded)["c"], outputs(plain)["c"], rtol=1e-4, atol=1e-5)


def test_the_bottom_may_change_its_shape() -> None:
    case = Case(factors=["BatchNorm"], residual=1, relu=True, readers=2)
    nets = [build(case.text, fuse) for fuse in (True, False)]
    found = []
    for net in nets:
        outputs(net)
        net.blobs["data"].reshape((3, 4, 7, 4))
        fill(net, 4)
        found.append(outputs(net))
    assert found[0]["out0"].shape == (3, 8, 7, 4)
    assert max(errors(*found).values()) < TOLERANCE


def test_the_sums_bottoms_must_have_one_shape() -> None:
    case = Case(residual=0)
    net = build(case.text, True)
    node = net.schedule[-2]
    assert node.layer.type == "Convolution + Eltwise"
    node.bottoms[1].reshape((2, 8, 5, 7))
    with pytest.raises(ShapeError, match="the sum's bottoms must have one shape"):
        node.reshape()


def test_a_folded_net_has_no_backward_pass() -> None:
    net = build(Case(relu=True).text, True)
    net.forward()
    with pytest.raises(AssertionError, match="a folded net runs forward"):
        net.backward()


def test_where_something_is_not_finite_is_found() -> None:
    net = build(Case(factors=["BatchNorm"], relu=True).text, True)
    net.backend.fill(net.layers[2].blobs[0].data, float("nan"))
    net.forward()
    node = net.first_non_finite(anew=True)
    assert node is not None
    assert node.layer.name == "c + factor0 + relu"


NETS, PARTS = 80, 4


@pytest.mark.parametrize("part", range(PARTS))
def test_random_nets(part: int) -> None:
    """In the TEST phase, with statistics, half of them in shared memory."""
    folded = 0
    for seed in range(part, NETS, PARTS):
        wide = fusible_net(seed)
        param, inputs = wide.param(), wide.values(seed)
        found = []
        for fuse in (False, True):
            share = fuse and seed // PARTS % 2 == 1
            backend = SpoilingBackend(1) if share else CPU
            net = build(text_format.MessageToString(param), fuse, backend, share)
            for name, values in inputs.items():
                net.backend.from_host(values, net.blobs[name].data)
            found.append({**outputs(net), "loss": np.float32(net.loss())})
            folded += sum(isinstance(node.layer, FoldedConvolution) for node in net.schedule)
        far = {name: e for name, e in errors(found[1], found[0]).items() if not e <= 2e-3}
        assert not far, f"net {seed} differs: {far}"
    assert folded >= NETS // PARTS // 2

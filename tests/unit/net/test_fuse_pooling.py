"""Maximum poolings that apply the gradient of the ReLU before them."""

from __future__ import annotations

import numpy as np
import pytest
from fusion_nets import DATA, LOSS, build, check_alike, convolution, in_place, layer, norm, relu, run, total

from caffepy.net import Net
from caffepy.net.fused_layers import RectifiedPooling


def pooled(setting: str = "kernel_size: 2 stride: 2", after: str = "", before: str = "", last: str = "p") -> str:
    """Two convolutions with a ReLU each, the second's maxima, layers behind or before the pooling, and a loss."""
    text = DATA + convolution("a", "data", "a", bias=True) + relu("a") + convolution("c", "a", "c", bias=True)
    pooling = layer("Pooling", "c", "p", f"pooling_param {{ {setting} }}")
    return text + relu("c") + before + pooling + after + LOSS % last


def poolings(net: Net) -> list[str]:
    """The poolings that apply a ReLU's gradient."""
    return [node.layer.name for node in net.schedule if isinstance(node.layer, RectifiedPooling)]


SHARED = 'type: "Convolution" param { } param { name: "bias" }'
FROZEN = 'type: "Convolution" param { lr_mult: 0 } param { lr_mult: 0 }'
POOLED = {
    "in place": pooled(),
    "apart": pooled()
    .replace('bottom: "c" top: "c"', 'bottom: "c" top: "r"')
    .replace('type: "Pooling" bottom: "c"', 'type: "Pooling" bottom: "r"'),
    "windows that overlap, and padding": pooled("kernel_size: 3 stride: 2 pad: 1"),
    "more maxima than elements": pooled("kernel_size: 2 stride: 1 pad: 1"),
    "windows beyond the image": pooled("kernel_h: 4 kernel_w: 5 stride_h: 3 stride_w: 4"),
    "dilation": pooled("kernel_size: 2 stride: 1 dilation: 2"),
    "the whole image": pooled("global_pooling: true"),
    "Dropout behind": pooled(after=layer("Dropout", "p")),
    "several readers": pooled(
        after=convolution("d", "p", "d") + convolution("e", "p", "e") + total("s", "d", "e"), last="s"
    ),
    "a view overwritten": pooled(
        after=layer("Flatten", "p", "f")
        + in_place("f", "TanH")
        + layer("Reshape", "f", "v", "reshape_param { shape { dim: 0 dim: 8 dim: 3 dim: 3 } }"),
        last="v",
    ).replace("stride: 2", "stride: 2 round_mode: FLOOR"),
    "no bias": pooled().replace(convolution("c", "a", "c", bias=True), convolution("c", "a", "c")),
    "frozen parameters": pooled().replace('name: "c" type: "Convolution"', 'name: "c" ' + FROZEN),
    "a frozen bias": pooled().replace(
        'name: "c" type: "Convolution"', 'name: "c" type: "Convolution" param { } param { lr_mult: 0 }'
    ),
    "a bias that two convolutions share": pooled().replace('type: "Convolution"', SHARED),
    "all gradients": pooled() + "force_backward: true",
    "a group in place behind": pooled(after=in_place("p", "BatchNorm", "ReLU")),
}
UNPOOLED = {
    "the average": pooled("kernel_size: 2 pool: AVE"),
    "a random element": pooled("kernel_size: 2 pool: STOCHASTIC"),
    "overwritten": pooled(after=in_place("p", "Dropout", "TanH")),
    "another reader": pooled(after=layer("Silence", "c", " ")),
    "a layer between": pooled(before=layer("Dropout", "c")),
    "a mask": pooled().replace('top: "p" pooling', 'top: "p" top: "m" pooling') + layer("Silence", "m", " "),
    "a loss weight": pooled(last="a").replace('top: "p" pooling', 'top: "p" loss_weight: 0.1 pooling'),
    "no gradient": pooled().replace('top: "p" pooling', 'top: "p" propagate_down: false pooling'),
    "a frozen convolution": pooled()
    .replace('type: "Convolution"', FROZEN)
    .replace('top: "p" pooling', 'top: "p" propagate_down: true pooling'),
    "a slope": pooled().replace('type: "ReLU"', 'type: "ReLU" relu_param { negative_slope: 0.1 }'),
    "a BatchNorm before the ReLU": pooled().replace(relu("c"), norm("n", "c", "c") + relu("c")),
    "a shared parameter between": pooled(
        before=convolution("d", "a", "d", bias=True) + layer("Silence", "d", " ")
    ).replace('type: "Convolution"', SHARED),
}


@pytest.mark.parametrize("name", POOLED)
def test_a_pooling_applies_the_gradient_of_the_relu_before_it(name: str) -> None:
    assert poolings(check_alike(POOLED[name])) == ["Pooling_p"]


@pytest.mark.parametrize("name", UNPOOLED)
def test_other_poolings_leave_the_gradient_to_the_relu(name: str) -> None:
    assert poolings(check_alike(UNPOOLED[name])) == []


def test_a_bias_is_complete_when_its_convolution_is() -> None:
    """All-reduces start when a layer's backward pass is over, also where two convolutions share a bias."""
    net = build(POOLED["a bias that two convolutions share"], True)
    bias = net.layers[net.layer_names.index("a")].blobs[1]
    found = {}
    net.after_backward.append(lambda node: found.update({node.layer.name: bias.host_diff()}))
    run(net, 1)
    assert not np.array_equal(found["c + c_relu"], found["a + a_relu"])
    np.testing.assert_array_equal(found["a + a_relu"], bias.host_diff())

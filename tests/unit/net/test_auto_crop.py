"""AutoCrop: the offsets follow from the layers on the two ways from a common blob."""

from __future__ import annotations

import numpy as np
import pytest
from training import build_net

from caffepy.errors import ConfigError, ShapeError

INPUT = 'layer { name: "d" type: "Input" top: "data" input_param { shape { dim: 1 dim: 1 dim: %d dim: %d } } }'


def layer(kind: str, bottom: str, top: str, settings: str = "") -> str:
    bottoms = "".join(f' bottom: "{b}"' for b in bottom.split())
    return f'layer {{ name: "{top}" type: "{kind}"{bottoms} top: "{top}" {settings} }}'


def convolution(bottom: str, top: str, window: str, kind: str = "Convolution") -> str:
    return layer(kind, bottom, top, f"convolution_param {{ num_output: 1 {window} }}")


def pooling(bottom: str, top: str, window: str = "kernel_size: 2 stride: 2") -> str:
    return layer("Pooling", bottom, top, f"pooling_param {{ {window} }}")


def net(*layers: str, size: tuple[int, int] = (17, 24)):
    return build_net(INPUT % size + "".join(layers))


def offsets_of(*layers: str, size: tuple[int, int] = (17, 24)) -> list[int]:
    return list(net(*layers, size=size).layers[-1].param.crop_param.offset)


@pytest.mark.parametrize(
    ("layers", "offset"),
    [
        ([pooling("data", "p"), convolution("p", "u", "kernel_size: 4 stride: 2", "Deconvolution")], 1),
        (
            [
                pooling("data", "p"),
                pooling("p", "q"),
                convolution("q", "u", "kernel_size: 8 stride: 4", "Deconvolution"),
            ],
            2,
        ),
        ([convolution("data", "c", "kernel_size: 3 pad: 100"), layer("ReLU", "c", "u")], 99),
        ([convolution("data", "u", "kernel_size: 3 pad: 3 dilation: 2")], 1),
        ([convolution("data", "u", "kernel_size: 3 pad: 3 hole: 2")], 1),
        ([convolution("data", "u", "kernel_h: 3 kernel_w: 3 pad_h: 2 pad_w: 2")], 1),
    ],
)
def test_the_offset_over_the_input(layers: list[str], offset: int):
    assert offsets_of(*layers, layer("AutoCrop", "u data", "y")) == [offset, offset]


def test_height_and_width_have_their_own():
    window = "kernel_h: 3 kernel_w: 5 pad_h: 3 pad_w: 2"
    assert offsets_of(convolution("data", "u", window), layer("AutoCrop", "u data", "y")) == [2, 0]


def test_the_crop_lies_over_the_image():
    """A position of the top depends on the same position of the input."""
    made = net(convolution("data", "c", "kernel_size: 1 pad: 4"), layer("AutoCrop", "c data", "y"))
    x = np.random.default_rng(0).standard_normal((1, 1, 17, 24)).astype(np.float32)
    made.blobs["data"].data[...] = x
    next(each for each in made.layers if each.blobs).blobs[0].data[...] = 1
    made.forward()
    assert np.array_equal(made.blobs["y"].host_data(), x)


def test_the_second_bottom_may_be_any_blob():
    layers = [
        convolution("data", "c", "kernel_size: 3"),
        pooling("c", "p"),
        convolution("p", "u", "kernel_size: 4 stride: 2", "Deconvolution"),
        layer("AutoCrop", "u c", "y"),
    ]
    assert offsets_of(*layers) == [1, 1]
    crops = [convolution("data", "c", "kernel_size: 1 pad: 5"), layer("AutoCrop", "c data", "d")]
    assert offsets_of(*crops, convolution("d", "e", "kernel_size: 3 pad: 2"), layer("AutoCrop", "e data", "y")) == [
        1,
        1,
    ]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([pooling("data", "u")], "'u' has 0.5 pixels for each of 'data' and an offset of -0.5"),
        ([convolution("data", "u", "kernel_size: 3")], "has 1 pixels for each of 'data' and an offset of -1"),
        ([convolution("data", "u", "kernel_size: 2 pad: 1")], "an offset of 0.5; a crop needs 1 and a whole offset"),
        ([layer("DummyData", "", "u", "dummy_data_param { shape { dim: 1 } }")], "come from no common blob"),
        ([pooling("data", "u", "global_pooling: true")], "global pooling in layer 'u' has no offset"),
    ],
)
def test_what_has_no_offset(layers: list[str], message: str):
    with pytest.raises(ConfigError, match=rf"layer 'y' \(AutoCrop\): .*{message}"):
        net(*layers, layer("AutoCrop", "u data", "y"))


def test_shapes_and_bottoms_that_do_not_fit():
    with pytest.raises(ConfigError, match="needs two bottoms"):
        net(layer("AutoCrop", "data", "y"))
    with pytest.raises(ShapeError, match="both bottoms must have four axes"):
        net(layer("Flatten", "data", "u"), layer("AutoCrop", "u u", "y"))

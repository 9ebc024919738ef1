"""Transpose, Reverse, Gather, Scatter, Flip, CropCenter, ShuffleChannel, Reorg, PixelShuffle and AutoCrop."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from layer_harness import Runner, check_layer, gaussian
from training import build_net

from caffepy.errors import CaffepyError, ConfigError, ShapeError


@pytest.mark.parametrize("dims", [(0, 2, 3, 1), (3, 2, 0, 1), (0, 1, 2, 3)])
def test_transpose(dims: tuple[int, ...]):
    text = " ".join(f"dim: {dim}" for dim in dims)
    check_layer(
        f"type: 'Transpose' transpose_param {{ {text} }}", [gaussian((5, 2, 3, 4))], lambda x: x.transpose(dims)
    )


@pytest.mark.parametrize("dims", [(0, 2, 1), (0, 1, 1, 3), (0, 1, 2, 4)])
def test_transpose_names_each_axis_once(dims: tuple[int, ...]):
    text = " ".join(f"dim: {dim}" for dim in dims)
    with pytest.raises(ConfigError, match="give each of the bottom's 4 axes once"):
        Runner(f"type: 'Transpose' transpose_param {{ {text} }}", [gaussian((5, 2, 3, 4))])


@pytest.mark.parametrize("axis", range(4))
def test_reverse(axis: int):
    text = f"type: 'Reverse' reverse_param {{ axis: {axis} }}"
    check_layer(text, [gaussian((5, 2, 3, 4))], lambda x: np.flip(x, axis))


@pytest.mark.parametrize("shape", [(6,), (3, 2), (2, 3, 2, 2, 2)])
def test_reverse_of_other_shapes(shape: tuple[int, ...]):
    check_layer("type: 'Reverse'", [gaussian(shape)], lambda x: x[::-1])


def test_the_axis_must_be_there():
    with pytest.raises(ShapeError, match="axis 3 does not exist"):
        Runner("type: 'Reverse' reverse_param { axis: 3 }", [gaussian((2, 3))])


# -- Gather and Scatter of labels ------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["type: 'Gather'", "type: 'Scatter'"])
def test_each_top_is_its_bottom(text: str):
    check_layer(text, [gaussian((4, 3, 2, 2)), gaussian((4,), 1)], lambda *bottoms: bottoms)


def test_labels_may_go_along():
    """As in TSN's nets: the loss gives the label's part of Gather no gradient."""
    net = build_net(
        "layer { name: 'd' type: 'Input' top: 'x' top: 'l' "
        "input_param { shape { dim: 3 dim: 4 } shape { dim: 3 } } } "
        "layer { name: 'a' type: 'InnerProduct' bottom: 'x' top: 'a' inner_product_param { num_output: 5 "
        "weight_filler { type: 'xavier' } } } "
        "layer { name: 'g' type: 'Gather' bottom: 'a' bottom: 'l' top: 'all' top: 'labels' } "
        "layer { name: 's' type: 'SoftmaxWithLoss' bottom: 'all' bottom: 'labels' top: 'loss' }"
    )
    net.blobs["x"].data[...] = gaussian((3, 4))
    net.blobs["l"].data[...] = [0, 4, 2]
    net.clear_param_diffs()
    net.forward()
    net.backward()
    assert net.blobs["labels"].host_data().tolist() == [0, 4, 2]
    chances = np.exp(net.blobs["a"].host_data())
    chances /= chances.sum(axis=1, keepdims=True)
    slopes = (chances - np.eye(5)[[0, 4, 2]]) / 3
    np.testing.assert_allclose(net.layers[1].blobs[0].host_diff(), slopes.T @ gaussian((3, 4)), atol=1e-6)
    net.close()


# -- Gather of elements, and Flip ------------------------------------------------------------------------


X = gaussian((2, 5, 3, 4))


@pytest.mark.parametrize(
    "axis, indices, shape",
    [(0, [1, 0, 1], None), (1, [0, 1, 2, 4, 4, 3], (2, 3)), (3, [2], ()), (-2, [2, 0], (2, 1)), (1, [3], (1,))],
)
def test_gather(axis: int, indices: list[int], shape: tuple[int, ...] | None) -> None:
    shapes = "" if shape is None else " ".join(f"shape: {size}" for size in shape or (0,))
    text = f"type: 'Gather' gather_param {{ axis: {axis} {' '.join(f'indices: {i}' for i in indices)} {shapes} }}"
    index = np.array(indices).reshape((len(indices),) if shape is None else shape)
    check_layer(text, [X], lambda x: np.take(x, index, axis))


def test_gather_of_other_axes() -> None:
    check_layer("type: 'Gather' gather_param { indices: 2 indices: 0 }", [gaussian((3,))], lambda x: x[[2, 0]])


def test_gather_of_tsn_keeps_each_devices_part() -> None:
    check_layer("type: 'Gather'", [X, gaussian((3,))], lambda x, label: (x, label), tops=2)


def test_bad_indices() -> None:
    for settings, message in (
        ("", "0 indices"),
        ("indices: 1 shape: 2", "1 indices for the shape"),
        ("indices: 2", "index 2 is outside axis 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            Runner(f"type: 'Gather' gather_param {{ {settings} }}", [X])


@pytest.mark.parametrize("width, height", [(True, False), (False, True), (True, True), (False, False)])
def test_flip(width: bool, height: bool) -> None:
    text = f"type: 'Flip' flip_param {{ flip_width: {width} flip_height: {height} }}"
    check_layer(
        text.replace("True", "true").replace("False", "false"),
        [X],
        lambda x: x[:, :, :: -1 if height else 1, :: -1 if width else 1],
    )


def test_flip_of_no_image() -> None:
    with pytest.raises(ShapeError, match="four axes"):
        Runner("type: 'Flip'", [X[0]])


# -- ShuffleChannel, Reorg and AutoCrop ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "group"), [((2, 6, 3, 4), 3), ((2, 6, 3, 4), 2), ((3, 8), 4), ((2, 4, 5), 1), ((1, 6, 2, 2, 2), 6)]
)
def test_shuffle_channel(shape, group):
    def reference(x):
        parts = x.reshape(shape[0], group, shape[1] // group, *shape[2:])
        return np.swapaxes(parts, 1, 2).reshape(shape)

    check_layer(f"type: 'ShuffleChannel' shuffle_channel_param {{ group: {group} }}", [gaussian(shape)], reference)


def test_shuffle_channel_refuses():
    with pytest.raises(ShapeError, match="shuffle_channel_param.group is 4; it must divide the channels"):
        Runner("type: 'ShuffleChannel' shuffle_channel_param { group: 4 }", [gaussian((2, 6, 3, 4))])


def test_crop_center():
    text = "type: 'CropCenter' crop_center_param { crop_size: 0 crop_size: 0 crop_size: 1 crop_size: 2 }"
    check_layer(text, [gaussian((2, 3, 4, 5))], lambda x: x[:, :, 1:-1, 2:-2])
    text = "type: 'CropCenter' crop_center_param { crop_size: 1 crop_size: 0 }"
    check_layer(text, [gaussian((5, 3))], lambda x: x[1:-1])
    with pytest.raises(ConfigError, match="has 2 crop_size; give one for each of 4 axes"):
        Runner(text, [gaussian((2, 3, 4, 5))])
    with pytest.raises(ShapeError, match=r"crop_size \[1, 0\] leaves nothing"):
        Runner(text, [gaussian((2, 3))])


@pytest.mark.parametrize("factor, shape", [(2, (2, 8, 3, 4)), (3, (1, 9, 2, 3)), (1, (2, 3, 2, 2))])
def test_pixel_shuffle(factor, shape):
    """Element by element."""

    def reference(x):
        y = np.zeros((shape[0], shape[1] // factor**2, shape[2] * factor, shape[3] * factor))
        for n, c, h, w in itertools.product(*map(range, shape)):
            row, column = c // factor % factor, c % factor
            y[n, c // factor**2, h * factor + row, w * factor + column] = x[n, c, h, w]
        return y

    check_layer(f"type: 'PixelShuffle' reshape_param {{ pixelshuffler: {factor} }}", [gaussian(shape)], reference)


def test_pixel_shuffle_refuses():
    text = "type: 'PixelShuffle' reshape_param { pixelshuffler: %d }"
    with pytest.raises(ConfigError, match="must be at least 1"):
        Runner(text % 0, [gaussian((1, 4, 2, 2))])
    with pytest.raises(ShapeError, match="C divided by 4"):
        Runner(text % 2, [gaussian((1, 6, 2, 2))])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("stride, shape", [(2, (2, 8, 4, 6)), (3, (1, 9, 6, 3)), (1, (2, 3, 2, 2))])
def test_reorg(reverse, stride, shape):
    """Element by element, as darknet counts them."""
    images, channels, height, width = shape
    inner = channels // stride**2

    def reference(x):
        source = x.reshape(images, -1)
        moved = np.empty_like(source)
        for c, h, w in itertools.product(range(channels), range(height), range(width)):
            row, column = h * stride + c // inner // stride, w * stride + c // inner % stride
            block, pixel = (c * height + h) * width + w, (c % inner * height * stride + row) * width * stride + column
            if reverse:
                moved[:, pixel] = source[:, block]
            else:
                moved[:, block] = source[:, pixel]
        if reverse:
            return moved.reshape(images, inner, height * stride, width * stride)
        return moved.reshape(images, channels * stride**2, height // stride, width // stride)

    text = f"type: 'Reorg' reorg_param {{ stride: {stride} reverse: {str(reverse).lower()} }}"
    check_layer(text, [gaussian(shape)], reference)


@pytest.mark.parametrize(
    "settings, shape, message",
    [
        ("stride: 0", (1, 4, 2, 2), "stride is 0"),
        ("stride: 2", (1, 6, 2, 2), "C divided by 4"),
        ("stride: 2", (1, 4, 3, 2), "H and W by 2"),
        ("stride: 2 reverse: true", (1, 6, 3, 3), "C divided by 4"),
    ],
)
def test_mistakes_of_reorg_are_named(settings, shape, message):
    with pytest.raises(CaffepyError, match=message):
        Runner(f"type: 'Reorg' reorg_param {{ {settings} }}", [gaussian(shape)])


def test_auto_crop_with_the_offset_that_the_net_sets():
    text = "type: 'AutoCrop' crop_param { axis: 2 offset: 1 offset: 2 }"
    check_layer(text, [gaussian((2, 3, 6, 7)), gaussian((2, 3, 4, 3))], lambda x, _: x[:, :, 1:5, 2:5])

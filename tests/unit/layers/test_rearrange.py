"""Permute, Crop, Tile, ShuffleChannel and Reorg: every field, odd shapes, what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_harness import BACKENDS, Runner, check_layer, gaussian

from caffepy.errors import CaffepyError, ConfigError, ShapeError


@settings(max_examples=25)
@given(st.integers(1, 5).flatmap(lambda n: st.tuples(
    st.lists(st.integers(1, 4), min_size=n, max_size=n), st.permutations(range(n)), st.integers(0, n))))  # fmt: skip
def test_permute(case):
    shape, order, named = case
    fields = " ".join(f"order: {axis}" for axis in order[:named])
    full = [*order[:named], *(axis for axis in range(len(shape)) if axis not in order[:named])]
    check_layer(f"type: 'Permute' permute_param {{ {fields} }}", [gaussian(tuple(shape))], lambda x: x.transpose(full))


@pytest.mark.parametrize("fields", ["order: 1 order: 1", "order: 3"])
def test_permute_refuses(fields):
    with pytest.raises(ConfigError, match=r"layer 'L' \(Permute\): permute_param.order is .* below 3, each once"):
        Runner(f"type: 'Permute' permute_param {{ {fields} }}", [gaussian((2, 3, 4))])


CROPS = [
    ("", (slice(None), slice(None), slice(0, 3), slice(0, 2))),
    ("axis: 2 offset: 1", (slice(None), slice(None), slice(1, 4), slice(1, 3))),
    ("axis: -1 offset: 4", (slice(None), slice(None), slice(None), slice(4, 6))),
    ("axis: 1 offset: 2 offset: 0 offset: 3", (slice(None), slice(2, 3), slice(0, 3), slice(3, 5))),
    ("axis: 0 offset: 1 offset: 0 offset: 2 offset: 1", (slice(1, 2), slice(0, 1), slice(2, 5), slice(1, 3))),
]


@pytest.mark.parametrize(("fields", "part"), CROPS)
def test_crop(fields, part):
    small = gaussian((1, 1, 3, 2), 1)
    check_layer(f"type: 'Crop' crop_param {{ {fields} }}", [gaussian((2, 3, 5, 6)), small], lambda x, _: x[part])


def test_crop_of_three_axes():
    part = (slice(None), slice(1, 3), slice(1, 3))
    inputs = [gaussian((2, 4, 5)), gaussian((9, 2, 2), 1)]
    check_layer("type: 'Crop' crop_param { axis: 1 offset: 1 }", inputs, lambda x, _: x[part])


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ("axis: 2 offset: 1 offset: 2 offset: 3", ConfigError, "crop_param has 3 offsets; give one, or one for each"),
        ("axis: 2 offset: 3", ShapeError, "axis 2: .* 3 elements from offset 3"),
        ("axis: 4", ShapeError, "axis 4 does not exist"),
    ],
)  # fmt: skip
def test_crop_refuses(fields, kind, message):
    with pytest.raises(kind, match=message):
        Runner(f"type: 'Crop' crop_param {{ {fields} }}", [gaussian((2, 3, 5, 6)), gaussian((2, 3, 3, 2))])


@pytest.mark.parametrize(
    ("shape", "axis", "tiles"),
    [((2, 3), 1, 4), ((2, 3, 2, 2), -1, 3), ((2, 3, 2, 2), 0, 2), ((2, 3, 4, 1, 2), 2, 3), ((3,), 0, 1)],
)  # fmt: skip
def test_tile(shape, axis, tiles):
    repeat = [1] * len(shape)
    repeat[axis] = tiles
    check_layer(
        f"type: 'Tile' tile_param {{ axis: {axis} tiles: {tiles} }}", [gaussian(shape)], lambda x: np.tile(x, repeat)
    )


def test_tile_refuses():
    with pytest.raises(ConfigError, match="tile_param.tiles is 0; give the number of copies"):
        Runner("type: 'Tile'", [gaussian((2, 3))])


@pytest.mark.parametrize(("shape", "group"), [((2, 6, 3, 4), 3), ((2, 6, 3, 4), 2), ((3, 8), 4), ((2, 4, 5), 1),
                                              ((1, 6, 2, 2, 2), 6)])  # fmt: skip
def test_shuffle_channel(shape, group):
    def reference(x):
        parts = x.reshape(shape[0], group, shape[1] // group, *shape[2:])
        return np.swapaxes(parts, 1, 2).reshape(shape)

    check_layer(f"type: 'ShuffleChannel' shuffle_channel_param {{ group: {group} }}", [gaussian(shape)], reference)


def test_shuffle_channel_refuses():
    with pytest.raises(ShapeError, match="shuffle_channel_param.group is 4; it must divide the channels"):
        Runner("type: 'ShuffleChannel' shuffle_channel_param { group: 4 }", [gaussian((2, 6, 3, 4))])


@pytest.mark.parametrize(("backend", "kind"), list(itertools.product(BACKENDS, ("Permute", "Tile", "ShuffleChannel"))))
def test_in_place_is_refused(backend, kind):
    text = f"type: '{kind}' tile_param {{ tiles: 2 }}"
    with pytest.raises(ConfigError, match="cannot work in place"):
        Runner(text, [gaussian((2, 3, 4, 5))], backend, in_place=True)


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
        ("", (1, 4, 2, 2), "stride is needed"),
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

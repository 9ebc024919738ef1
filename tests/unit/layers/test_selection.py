"""Gather of elements, Flip, and the Filter of channel-pruning's Caffe."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import Runner, check_layer, gaussian

from caffepy.errors import ConfigError, DataError, ShapeError

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
        text.replace("True", "true").replace("False", "false"), [X],
        lambda x: x[:, :, :: -1 if height else 1, :: -1 if width else 1],
    )  # fmt: skip


def test_flip_of_no_image() -> None:
    with pytest.raises(ShapeError, match="four axes"):
        Runner("type: 'Flip'", [X[0]])


@pytest.mark.parametrize("axis, selector", [(1, [1, 0, 1, 1, 0]), (3, [0, 0, 1, 2.5]), (0, [0, 1])])
def test_filter_by_a_parameter(axis: int, selector: list[float]) -> None:
    chosen = np.flatnonzero(selector)
    text = f"type: 'Filter' filter_param {{ axis: {axis} num_output: {len(chosen)} }}"
    check_layer(text, [X], lambda x, _: np.take(x, chosen, axis), params=[np.array(selector)], learned=[])
    pair = Runner(text, [X, 2 * X], params=[np.array(selector)], tops=2).forward()
    np.testing.assert_array_equal(pair[1], 2 * np.take(X, chosen, axis))


def test_filter_of_all_takes_the_first() -> None:
    runner = Runner("type: 'Filter' filter_param { num_output: 3 }", [X])
    np.testing.assert_array_equal(runner.forward()[0], X[:, :3])
    assert runner.layer.param.param[0].lr_mult == 0


def test_bad_filters() -> None:
    with pytest.raises(ConfigError, match="from 1 to 5"):
        Runner("type: 'Filter' filter_param { num_output: 6 }", [X])
    with pytest.raises(ConfigError, match="a top for each bottom: 2"):
        Runner("type: 'Filter' filter_param { num_output: 3 }", [X, X], tops=1)
    with pytest.raises(ConfigError, match="the selector: 0"):
        Runner("type: 'Filter'", [X])
    with pytest.raises(DataError, match="selects 2 elements"):
        Runner("type: 'Filter' filter_param { num_output: 3 }", [X], params=[np.array([1, 0, 0, 1, 0])]).forward()

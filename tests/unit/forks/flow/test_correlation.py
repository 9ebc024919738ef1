"""Correlation and Correlation1D, ChannelNorm and ExpMax."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from layer_harness import Runner, check_layer, gaussian, spread

from caffepy.errors import ConfigError, ShapeError


def correlation(pad: int, kernel: int, reach: int, stride_1: int, stride_2: int, subtract: bool = False) -> Any:
    """FlowNet 2's formula over images with `pad` zeros around them."""

    def formula(a: Any, b: Any) -> Any:
        a, b = (np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad))) for x in (a, b))
        radius, border = reach // stride_2, reach + (kernel - 1) // 2
        height, width = (-(-(size - 2 * border) // stride_1) for size in a.shape[2:])
        shifts = list(itertools.product(range(-radius, radius + 1), repeat=2))
        y = np.zeros((a.shape[0], len(shifts), height, width))
        for (number, (p, q)), i, j in itertools.product(enumerate(shifts), range(height), range(width)):
            h, w = i * stride_1 + reach, j * stride_1 + reach
            left = a[:, :, h : h + kernel, w : w + kernel]
            h, w = h + p * stride_2, w + q * stride_2
            right = b[:, :, h : h + kernel, w : w + kernel]
            both = np.abs(left - right) if subtract else left * right
            y[:, number, i, j] = both.mean(axis=(1, 2, 3))
        return y

    return formula


def text(settings: str, head: str = "type: 'Correlation'") -> str:
    return f"{head} correlation_param {{ {settings} }}"


@pytest.mark.parametrize(
    "settings",
    [(4, 1, 4, 1, 1), (0, 1, 2, 1, 1), (3, 3, 2, 1, 1), (2, 3, 2, 2, 2), (1, 1, 3, 2, 3), (3, 5, 1, 3, 1)],
)
def test_products(settings: tuple[int, ...]) -> None:
    pad, kernel, reach, stride_1, stride_2 = settings
    bottoms = [gaussian((2, 3, 7, 8), seed) for seed in (1, 2)]
    fields = f"pad: {pad} kernel_size: {kernel} max_displacement: {reach} stride_1: {stride_1} stride_2: {stride_2}"
    check_layer(text(fields), bottoms, correlation(*settings))


def test_differences() -> None:
    bottoms = [spread((1, 2, 5, 5), seed, step=0.2) + shift for seed, shift in ((1, 0.03), (2, 0.0))]
    fields = "pad: 2 kernel_size: 3 max_displacement: 2 stride_2: 2 correlation_type: SUBTRACT"
    check_layer(text(fields), bottoms, correlation(2, 3, 2, 1, 2, subtract=True), step=1e-3)


@pytest.mark.parametrize(("direction", "shifts"), [(0, (-4, -2, 0, 2, 4)), (1, (0, 2, 4)), (-1, (-6, -4, -2))])
def test_rows(direction: int, shifts: tuple[int, ...]) -> None:
    """Along rows, to both sides or to one; what lies beyond the padding is 0."""

    def formula(a: Any, b: Any) -> Any:
        left = np.pad(a, ((0, 0), (0, 0), (0, 0), (4, 4)))
        right = np.pad(b, ((0, 0), (0, 0), (0, 0), (10, 10)))
        columns = range(4, left.shape[3] - 4)
        parts = [[(left[..., j] * right[..., j + 6 + s]).mean(axis=1) for j in columns] for s in shifts]
        return np.array(parts).transpose(2, 0, 3, 1)

    bottoms = [gaussian((2, 3, 4, 7), seed) for seed in (3, 4)]
    fields = f"pad: 4 kernel_size: 1 max_displacement: 4 stride_2: 2 single_direction: {direction}"
    check_layer(text(fields, "type: 'Correlation1D'"), bottoms, formula)


def test_bad_settings() -> None:
    bottoms = [gaussian((1, 2, 4, 4))] * 2
    good = "kernel_size: 1 max_displacement: 1"
    for fields, words in (
        ("kernel_size: 1", "needs kernel_size and max_displacement"),
        ("kernel_size: 2 max_displacement: 1", "must be odd"),
        (f"{good} stride_2: 0", "at least 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            Runner(text(fields), bottoms)
    with pytest.raises(ConfigError, match="-1, 0 or 1"):
        Runner(text(f"{good} single_direction: 2", "type: 'Correlation1D'"), bottoms)
    with pytest.raises(ShapeError, match="too small"):
        Runner(text("kernel_size: 1 max_displacement: 2"), bottoms)
    with pytest.raises(ShapeError, match="same four axes"):
        Runner(text(good), [bottoms[0], gaussian((1, 2, 4, 5))])


# -- ChannelNorm and ExpMax ------------------------------------------------------------------------------


def test_norm() -> None:
    for shape in ((2, 3, 4, 5), (1, 1, 3, 3)):
        norm = lambda x: np.sqrt((x * x).sum(axis=1, keepdims=True))  # noqa: E731
        check_layer("type: 'ChannelNorm'", [spread(shape, step=0.3)], norm)


def test_norm_of_zeros_has_a_gradient_of_zero() -> None:
    result = Runner("type: 'ChannelNorm'", [np.zeros((1, 2, 3, 3), np.float32)]).run([gaussian((1, 1, 3, 3))])
    assert not np.any(result.bottom_diffs[0])


@pytest.mark.parametrize(
    ("fields", "base", "scale", "shift"),
    [("", np.e, 1, 0), ("base: 2 scale: -0.5 shift: 3", 2, -0.5, 3), ("scale: 2 shift: -1", np.e, 2, -1)],
)
def test_power_below_the_largest_channel(fields: str, base: float, scale: float, shift: float) -> None:
    formula = lambda x: base ** (shift + scale * (x - x.max(axis=1, keepdims=True)))  # noqa: E731
    check_layer(f"type: 'ExpMax' expmax_param {{ {fields} }}", [spread((2, 5, 3, 4), step=0.03)], formula, step=1e-3)


def test_bad_bases_and_shapes() -> None:
    for base in (0, -2):
        with pytest.raises(ConfigError, match="base"):
            Runner(f"type: 'ExpMax' expmax_param {{ base: {base} }}", [gaussian((1, 2, 3, 3))])
    with pytest.raises(ShapeError):
        Runner("type: 'ChannelNorm'", [gaussian((2, 3))])

"""ChannelNorm and ExpMax."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import Runner, check_layer, gaussian, spread

from caffepy.errors import ConfigError, ShapeError


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

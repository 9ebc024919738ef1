"""Transpose and Reverse of CTPN."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import Runner, check_layer, gaussian

from caffepy.errors import ConfigError, ShapeError


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

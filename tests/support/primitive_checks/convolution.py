"""Convolutions: forward with bias, residual and ReLU, both gradients."""

from __future__ import annotations

from typing import Any

import convolution_reference
import numpy as np
import pytest
from backend_arrays import close, dirty, normal, to_device, window
from hypothesis import given

from caffepy.backend import Backend, Geometry
from caffepy.backend.types import spatial_output
from primitive_checks.strategies import convolutions, often

TOLERANCE = 2e-5

CONVOLUTIONS = {
    "3x3": ((2, 32, 14, 14), 32, window(3, 1, 1)),
    "depthwise": ((2, 32, 14, 14), 32, window(3, 1, 1, 1, 32)),
    "depthwise, few channels": ((3, 6, 8, 8), 6, window(3, 1, 1, 1, 6)),
    "four groups / 2": ((2, 32, 9, 9), 64, window(3, 2, 1, 1, 4)),
    "7x7 / 2 on 3 channels": ((1, 3, 23, 23), 16, window(7, 2, 3)),
    "11x11 / 4 on 3 channels": ((1, 3, 23, 23), 24, window(11, 4)),
    "5x5 on one channel": ((2, 1, 12, 12), 20, window(5)),
    "dilation": ((1, 8, 13, 13), 8, window(3, 1, 2, 2)),
    "unequal sides": ((1, 4, 11, 9), 6, Geometry((3, 2), (2, 1), (1, 0), (1, 2))),
    "taps beside the image": ((2, 20, 5, 5), 24, window(3, 1, 6, 6)),
    "1x1": ((1, 64, 7, 7), 32, window(1)),
    "1x1, several images": ((4, 16, 9, 9), 32, window(1)),
    "1x1 / 2": ((4, 16, 9, 9), 32, window(1, 2)),
    "1x1, more pixels than outputs": ((64, 40, 6, 6), 50, window(1)),
    "1x1, one image": ((1, 40, 6, 6), 50, window(1)),
    "1x1, one output": ((1, 1024, 1, 1), 1, window(1)),
    "1x1 images": ((8, 200, 1, 1), 100, window(1)),
    "whole images": ((3, 40, 5, 7), 50, window((5, 7))),
    "whole images with padding": ((1, 40, 6, 6), 50, window((6, 6), 1, 1)),
    "whole columns": ((1, 40, 6, 6), 50, window((6, 5))),
    "one axis": ((2, 3, 12), 4, Geometry((3,), (2,), (1,), (1,))),
    "one axis, many channels": ((2, 48, 70), 64, Geometry((3,), (1,), (1,), (1,))),
    "one axis, depthwise": ((1, 20, 50), 20, Geometry((5,), (2,), (4,), (2,), 20)),
    "one axis, one tap": ((3, 19, 64), 33, Geometry((1,), (1,), (0,), (1,))),
    "one axis, taps beside the image": ((3, 19, 64), 33, Geometry((2,), (1,), (40,), (40,))),
    "three axes": ((2, 4, 5, 6, 7), 6, Geometry((3, 2, 3), (1, 2, 1), (1, 0, 1), (1, 1, 2))),
    "three axes, two groups": ((2, 4, 5, 6, 7), 6, Geometry((3, 2, 3), (1, 2, 1), (1, 0, 1), (1, 1, 1), 2)),
    "three axes, dilated groups": ((1, 4, 5, 4, 3), 6, Geometry((3, 2, 2), (1, 2, 1), (1, 0, 1), (1, 1, 2), 2)),
    "three axes, flat windows": ((2, 17, 3, 19, 18), 33, Geometry((1, 2, 3), (1, 2, 1), (0, 1, 1), (1, 1, 2))),
    "three axes, eight groups / 2": ((2, 32, 4, 9, 9), 32, Geometry((3,) * 3, (2,) * 3, (1,) * 3, (1,) * 3, 8)),
    "three axes / 3": ((1, 3, 9, 9, 9), 4, Geometry((2,) * 3, (3,) * 3, (0, 1, 0), (1,) * 3)),
    "four axes": ((1, 2, 3, 4, 3, 4), 3, Geometry((2,) * 4, (1,) * 4, (0, 1, 0, 1), (1,) * 4)),
    "four axes, groups": ((2, 5, 6, 7, 3, 4), 10, Geometry((2,) * 4, (1, 2, 1, 2), (1, 0, 1, 1), (1,) * 4, 5)),
}


def convolution_shape(x_shape: tuple[int, ...], outputs: int, g: Geometry) -> tuple[int, ...]:
    """The shape of a convolution's output."""
    sizes = zip(x_shape[2:], g.kernel, g.stride, g.pad, g.dilation, strict=True)
    return (x_shape[0], outputs, *(spatial_output(*s) for s in sizes))


def check_convolution(backend: Backend, x_shape: tuple[int, ...], outputs: int, geometry: Geometry) -> None:
    """Forward with and without bias, residual and ReLU; both gradients, the weights' overwritten and added to."""
    weights_shape = (outputs, x_shape[1] // geometry.group, *geometry.kernel)
    y_shape = convolution_shape(x_shape, outputs, geometry)
    x, weights, bias, dy = normal(1, x_shape), normal(2, weights_shape), normal(3, (outputs,)), normal(4, y_shape)
    residual = normal(5, y_shape)
    on_x, on_weights, on_bias, on_dy, on_residual = (to_device(backend, a) for a in (x, weights, bias, dy, residual))
    plan = backend.plan_convolution(x_shape, weights_shape, geometry)
    without, dx_expected, dw_expected = convolution_reference.convolution(x, weights, dy, geometry)
    expected = without + bias.reshape((-1,) + (1,) * len(geometry.kernel))
    y = dirty(backend, y_shape)
    plan.forward(on_x, on_weights, on_bias, y)
    close(backend.to_host(y), expected, TOLERANCE)
    plan.forward(on_x, on_weights, on_bias, y, relu=True)
    close(backend.to_host(y), np.maximum(expected, 0), 2 * TOLERANCE)
    plan.forward(on_x, on_weights, None, y)
    close(backend.to_host(y), without, 2 * TOLERANCE)
    for relu in (False, True):
        backend.convolve_and_add(plan, on_x, on_weights, on_bias, on_residual, y, relu)
        total = expected + residual
        close(backend.to_host(y), np.maximum(total, 0) if relu else total, 2 * TOLERANCE)
    dweights = dirty(backend, weights_shape)
    plan.backward_weights(on_x, on_dy, dweights, accumulate=False)
    close(backend.to_host(dweights), dw_expected, TOLERANCE)
    plan.backward_weights(on_x, on_dy, dweights, accumulate=True)
    close(backend.to_host(dweights), 2 * dw_expected, TOLERANCE)
    dx = dirty(backend, x_shape)
    plan.backward_data(on_dy, on_weights, dx)
    close(backend.to_host(dx), dx_expected, TOLERANCE)


@often
@given(case=convolutions())
def test_convolution(backend: Backend, case: tuple[tuple[int, ...], int, Geometry]) -> None:
    check_convolution(backend, *case)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_shapes(backend: Backend, name: str) -> None:
    check_convolution(backend, *CONVOLUTIONS[name])


NAN = {
    "LeNet": ((8, 20, 12, 12), 50, window(5)),
    "3x3": ((4, 64, 14, 14), 64, window(3, 1, 1)),
    "3x3 on 3 channels": ((2, 3, 9, 9), 8, window(3, 1, 1)),
    "1x1": ((4, 16, 8, 8), 32, window(1)),
    "1x1, two groups": ((2, 8, 6, 6), 8, window(1, group=2)),
    "7x7 / 2": ((2, 3, 23, 21), 16, window(7, 2, 3)),
    "one channel": ((16, 1, 28, 28), 20, window(5)),
    "two groups": ((2, 32, 9, 9), 64, window(3, 1, 1, 1, 2)),
    "one axis": ((2, 3, 12), 4, Geometry((3,), (2,), (1,), (1,))),
    "one axis / 1": ((2, 3, 9), 4, Geometry((3,), (1,), (1,), (1,))),
}


@pytest.mark.parametrize("name", NAN)
def test_a_convolution_with_relu_passes_nan_on(backend: Backend, dtype: str, name: str) -> None:
    """NaN in one image is in every output that it reaches."""
    x_shape, outputs, geometry = NAN[name]
    x = normal(1, x_shape)
    x[(0,) * len(x_shape)] = np.nan
    weights: Any = np.abs(normal(2, (outputs, x_shape[1] // geometry.group, *geometry.kernel))) + np.float32(0.1)
    plan = backend.plan_convolution(x_shape, weights.shape, geometry, dtype)
    on_x, on_weights = to_device(backend, x, dtype), to_device(backend, weights, dtype)
    for bias in (None, to_device(backend, normal(3, (outputs,)))):
        y = dirty(backend, convolution_shape(x_shape, outputs, geometry), dtype)
        plan.forward(on_x, on_weights, bias, y, relu=True)
        found = backend.to_host(y)
        reached = found[(0, slice(0, outputs // geometry.group), *(0,) * len(geometry.kernel))]
        assert np.isnan(reached).all()
        assert (found[np.isfinite(found)] >= 0).all()

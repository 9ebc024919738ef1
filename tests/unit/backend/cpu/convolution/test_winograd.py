"""Winograd's convolution on the CPU beside float64: all passes, their errors, and where it is chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_arrays import dirty, to_device
from convolution_reference import convolution
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.backend import Geometry
from caffepy.backend.cpu.backend import CpuBackend
from caffepy.backend.cpu.convolution.direct import TileConvolution
from caffepy.backend.cpu.convolution.winograd import WinogradConvolution
from caffepy.backend.cpu.jit.vector import WIDTH
from caffepy.backend.cpu.memory import Workspace

BACKEND = CpuBackend(1)
ERROR = 2e-6
"""The error of an element of any pass, by the largest one; direct sums have up to 1.2e-6 at the same shapes."""


def windows(pad: tuple[int, int], **other: Any) -> Geometry:
    return Geometry(**{"kernel": (3, 3), "stride": (1, 1), "pad": pad, "dilation": (1, 1), "group": 1, **other})


class Case:
    """Rectified images, weights and gradients of a convolution, and what float64 makes of them."""

    def __init__(
        self, x: tuple[int, ...], outputs: int, pad: tuple[int, int] = (1, 1), dilation: tuple[int, int] = (1, 1)
    ) -> None:
        random = np.random.default_rng(sum(x) + outputs)
        self.geometry = windows(pad, dilation=dilation)
        out = (size + 2 * p - 2 * d for size, p, d in zip(x[2:], pad, dilation, strict=True))
        self.y_shape = (x[0], outputs, *out)
        shapes = (x, (outputs, x[1], 3, 3), self.y_shape, self.y_shape, (outputs,))
        arrays = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
        arrays[0] = np.maximum(arrays[0], 0)
        self.x, self.weights, self.dy, self.residual, self.bias = (to_device(BACKEND, array) for array in arrays)
        self.expected = convolution(arrays[0], arrays[1], arrays[2], self.geometry)

    def plan(self, threads: int = 1, kind: type[TileConvolution] = WinogradConvolution) -> TileConvolution:
        return kind(threads, Workspace(), self.x.shape, self.weights.shape, self.geometry)

    def passes(self, plan: TileConvolution) -> tuple[Any, Any, Any]:
        """y, dx and dweights."""
        y, dx, dweights = (dirty(BACKEND, shape) for shape in (self.y_shape, self.x.shape, self.weights.shape))
        plan.forward(self.x, self.weights, None, y)
        plan.backward_data(self.dy, self.weights, dx)
        plan.backward_weights(self.x, self.dy, dweights, accumulate=False)
        return y, dx, dweights

    def errors(self, plan: TileConvolution) -> list[float]:
        """The largest of each pass, by the largest element."""
        found = zip(self.passes(plan), self.expected, strict=True)
        return [float(np.abs(array - wanted).max() / np.abs(wanted).max()) for array, wanted in found]


CHANNELS = st.integers(1, 5).map(lambda vectors: vectors * WIDTH)
CASES = st.builds(
    Case,
    st.tuples(st.integers(1, 3), CHANNELS, st.integers(2, 11), st.integers(2, 11)),
    CHANNELS,
    st.tuples(st.integers(1, 2), st.integers(1, 2)) | st.just((1, 1)),
)


@settings(max_examples=25, derandomize=True)
@given(case=CASES)
def test_all_passes_are_what_float64_gives(case: Case) -> None:
    assert max(case.errors(case.plan())) < ERROR


def test_without_padding_the_gradient_of_the_image_has_two_zeros_before() -> None:
    case = Case((2, 2 * WIDTH, 9, 6), WIDTH, pad=(0, 0))
    assert max(case.errors(case.plan())) < ERROR


@pytest.mark.parametrize(("images", "channels", "size"), [(1, 64, 56), (1, 128, 28), (2, 256, 14), (4, 512, 7)])
def test_the_error_of_the_layers_of_a_resnet_is_that_of_direct_sums(images: int, channels: int, size: int) -> None:
    case = Case((images, channels, size, size), channels)
    errors, direct = case.errors(case.plan()), case.errors(case.plan(kind=TileConvolution))
    assert max(errors) < ERROR
    assert all(error < 2.5 * other for error, other in zip(errors, direct, strict=True)), (errors, direct)


AXES = st.tuples(st.integers(2, 17), st.integers(1, 6), st.integers(0, 12)).filter(
    lambda axis: axis[2] <= 2 * axis[1] < axis[0] + 2 * axis[2]
)
"""Size, dilation and padding along an axis."""


@settings(max_examples=25, derandomize=True)
@given(images=st.integers(1, 2), channels=CHANNELS, outputs=CHANNELS, axes=st.tuples(AXES, AXES))
def test_dilated_windows_are_what_float64_gives(
    images: int, channels: int, outputs: int, axes: tuple[tuple[int, int, int], tuple[int, int, int]]
) -> None:
    sizes, (h_gap, w_gap), (h_pad, w_pad) = zip(*axes, strict=True)
    case = Case((images, channels, *sizes), outputs, (h_pad, w_pad), (h_gap, w_gap))
    assert max(case.errors(case.plan(2))) < ERROR


@settings(max_examples=10, derandomize=True)
@given(case=CASES)
def test_bits_do_not_depend_on_the_threads(case: Case) -> None:
    alone = case.passes(case.plan())
    for threads in (2, 3, 7):
        for found, wanted in zip(case.passes(case.plan(threads)), alone, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_the_sum_over_many_tiles_is_made_in_parts_whatever_the_threads() -> None:
    case = Case((3, 8 * WIDTH, 30, 28), 8 * WIDTH)
    alone, both = (case.passes(case.plan(threads)) for threads in (1, 2))
    for found, wanted in zip(both, alone, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert max(case.errors(case.plan(2))) < ERROR


@settings(max_examples=10, derandomize=True)
@given(case=CASES, relu=st.booleans(), kept=st.booleans())
def test_bias_residual_and_relu_are_added_on_the_way_to_memory(case: Case, relu: bool, kept: bool) -> None:
    plan, y = case.plan(2), dirty(BACKEND, case.y_shape)
    plain = case.passes(plan)[0]
    if kept:
        plan.keep(case.weights)
    plan.forward(case.x, case.weights, case.bias, y, relu, residual=case.residual)
    wanted = plain + case.bias[:, None, None] + case.residual
    np.testing.assert_allclose(y, np.maximum(wanted, 0) if relu else wanted, rtol=1e-6, atol=1e-5)


def test_the_gradient_of_weights_is_added_to_what_is_there() -> None:
    case = Case((2, 2 * WIDTH, 5, 6), 3 * WIDTH)
    plan = case.plan(2)
    once = case.passes(plan)[2]
    twice = once.copy(order="K")
    plan.backward_weights(case.x, case.dy, twice, accumulate=True)
    np.testing.assert_array_equal(twice, 2 * once)


def test_kept_weights_are_used_until_they_are_kept_again() -> None:
    case = Case((1, 2 * WIDTH, 6, 6), 2 * WIDTH)
    plan, y = case.plan(), dirty(BACKEND, case.y_shape)
    plan.keep(case.weights)
    case.weights[...] *= 2
    plan.forward(case.x, case.weights, None, y)
    np.testing.assert_allclose(y, case.expected[0], rtol=1e-3, atol=1e-4)
    plan.keep(case.weights)
    plan.forward(case.x, case.weights, None, y)
    np.testing.assert_allclose(y, 2 * case.expected[0], rtol=1e-3, atol=1e-4)


SQUARE = (8, 64, 14, 14)


@pytest.mark.parametrize(
    ("x", "weights", "geometry", "chosen"),
    [
        (SQUARE, (64, 64, 3, 3), windows((1, 1)), True),
        ((8, 512, 7, 7), (512, 512, 3, 3), windows((1, 1)), True),
        (SQUARE, (64, 64, 3, 3), windows((0, 2)), True),
        (SQUARE, (64, 64, 3, 3), windows((3, 1)), False),
        (SQUARE, (64, 64, 3, 3), windows((1, 1), stride=(2, 2)), False),
        (SQUARE, (64, 64, 3, 3), windows((1, 1), stride=(1, 2)), False),
        (SQUARE, (64, 64, 3, 3), windows((5, 2), dilation=(2, 2)), False),
        ((1, 64, 32, 32), (64, 64, 3, 3), windows((2, 4), dilation=(2, 4)), True),
        ((1, 64, 33, 33), (64, 64, 3, 3), windows((18, 18), dilation=(18, 18)), False),
        ((1, 64, 28, 28), (64, 64, 3, 3), windows((6, 6), dilation=(6, 6)), False),
        (SQUARE, (64, 32, 3, 3), windows((1, 1), group=2), False),
        (SQUARE, (64, 64, 1, 1), windows((0, 0), kernel=(1, 1)), False),
        (SQUARE, (64, 64, 5, 5), windows((2, 2), kernel=(5, 5)), False),
        (SQUARE, (60, 64, 3, 3), windows((1, 1)), False),
        ((8, 3, 14, 14), (64, 3, 3, 3), windows((1, 1)), False),
        ((1, 512, 7, 7), (512, 512, 3, 3), windows((1, 1)), False),
        ((8, 64, 14, 14, 14), (64, 64, 3, 3, 3), Geometry((3,) * 3, (1,) * 3, (1,) * 3, (1,) * 3, 1), False),
        ((8, 64, 14), (64, 64, 3), Geometry((3,), (1,), (1,), (1,), 1), False),
    ],
)
def test_3x3_windows_of_stride_1_are_computed_so_where_it_saves_products(
    x: tuple[int, ...], weights: tuple[int, ...], geometry: Geometry, chosen: bool
) -> None:
    assert isinstance(BACKEND.plan_convolution(x, weights, geometry), WinogradConvolution) == chosen

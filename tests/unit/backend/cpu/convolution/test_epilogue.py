"""What convolutions on the CPU do on the way to memory, and weights that are packed once for many passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.backend import Geometry, create_backend
from caffepy.backend.cpu.backend import CpuBackend

ONE, BOTH = CpuBackend(1), CpuBackend(2)
COUNT = st.integers(1, 70)


def filled(backend: Any, shape: tuple[int, ...], seed: int) -> Any:
    array = backend.zeros(shape)
    array[...] = np.random.default_rng(seed).standard_normal(shape)
    return array


class Case:
    """A convolution with its arrays, on one backend."""

    def __init__(self, backend: Any, x: tuple[int, ...], outputs: int, geometry: Geometry) -> None:
        self.backend = backend
        shape = (outputs, x[1] // geometry.group, *geometry.kernel)
        self.plan = backend.plan_convolution(x, shape, geometry)
        self.x, self.weights, self.bias = (filled(backend, s, i) for i, s in enumerate((x, shape, (outputs,))))
        sizes = zip(x[2:], geometry.kernel, geometry.stride, geometry.pad, strict=True)
        self.y_shape = (x[0], outputs, *((size + 2 * p - k) // s + 1 for size, k, s, p in sizes))
        self.residual = filled(backend, self.y_shape, 4)

    def plain(self, relu: bool = False) -> Any:
        y = self.backend.zeros(self.y_shape)
        self.plan.forward(self.x, self.weights, self.bias, y, relu)
        return y

    def summed(self, relu: bool) -> Any:
        y = self.backend.zeros(self.y_shape)
        self.backend.convolve_and_add(self.plan, self.x, self.weights, self.bias, self.residual, y, relu)
        return y


@settings(max_examples=25, derandomize=True)
@given(
    images=st.integers(1, 3),
    read=COUNT,
    made=COUNT,
    group=st.sampled_from([1, 1, 1, 2, 9]),
    size=st.integers(3, 16),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    pad=st.integers(0, 1),
    axes=st.sampled_from([2, 2, 2, 1, 3]),
)
def test_residual_and_relu_are_what_passes_of_their_own_give(
    images: int, read: int, made: int, group: int, size: int, kernel: int, stride: int, pad: int, axes: int
) -> None:
    geometry = Geometry((kernel,) * axes, (stride,) * axes, (pad,) * axes, (1,) * axes, group)
    x = (images, group * max(1, read // group), *((size, size + 1, 4)[:axes]))
    case, alone = (Case(backend, x, group * max(1, made // group), geometry) for backend in (BOTH, ONE))
    plain = case.plain()
    np.testing.assert_array_equal(case.plain(relu=True), np.maximum(plain, 0))
    for relu in (False, True):
        wanted = plain + case.residual
        np.testing.assert_allclose(case.summed(relu), np.maximum(wanted, 0) if relu else wanted, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(case.summed(relu), alone.summed(relu))
    before = case.summed(relu=True), plain
    for one in (case, alone):
        one.backend.keep_weights(one.plan, one.weights)
    for found, wanted in zip((case.summed(relu=True), case.plain()), before, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(case.plain(), alone.plain())


LAYERS = {
    "winograd": ((1, 20, 9, 9), 40, Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)),
    "tiles": ((1, 20, 9, 9), 40, Geometry((5, 5), (1, 1), (2, 2), (1, 1), 1)),
    "few channels": ((1, 3, 9, 9), 40, Geometry((1, 1), (1, 1), (0, 0), (1, 1), 1)),
    "few channels, depthwise": ((1, 3, 19, 20), 3, Geometry((3, 3), (1, 1), (1, 1), (1, 1), 3)),
    "product": ((1, 20, 4, 4), 40, Geometry((1, 1), (1, 1), (0, 0), (1, 1), 1)),
    "narrow": ((1, 20, 9, 9), 20, Geometry((3, 3), (1, 1), (1, 1), (1, 1), 20)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_kept_weights_hold_until_they_are_given_again(kind: str) -> None:
    case = Case(BOTH, *LAYERS[kind])
    BOTH.keep_weights(case.plan, case.weights)
    first = case.plain()
    case.weights *= 2
    np.testing.assert_array_equal(case.plain(), first)
    BOTH.keep_weights(case.plan, case.weights)
    np.testing.assert_allclose(
        case.plain() - case.bias.reshape(-1, 1, 1), 2 * (first - case.bias.reshape(-1, 1, 1)), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("kind", LAYERS)
def test_other_weights_than_those_kept_are_read_anew(kind: str) -> None:
    case = Case(BOTH, *LAYERS[kind])
    wanted = case.plain()
    others = filled(BOTH, case.weights.shape, 9)
    BOTH.keep_weights(case.plan, others)
    np.testing.assert_array_equal(case.plain(), wanted)


@pytest.mark.parametrize("kind", LAYERS)
def test_kept_weights_stand_in_for_others(kind: str) -> None:
    case = Case(BOTH, *LAYERS[kind])
    others = filled(BOTH, case.weights.shape, 9)
    case.weights, learned = others, case.weights
    assert BOTH.keep_weights(case.plan, others)
    wanted = case.plain()
    assert BOTH.keep_weights(case.plan, others, learned)
    case.weights = learned
    others[...] = np.nan  # which are not needed any more
    np.testing.assert_array_equal(case.plain(), wanted)


def test_a_plan_that_reads_weights_anew_says_so() -> None:
    case = Case(BOTH, (1, 4, 9), 6, Geometry((3,), (1,), (1,), (1,), 1))
    assert not BOTH.keep_weights(case.plan, case.weights)


@pytest.mark.parametrize("kind", LAYERS)
def test_relu_keeps_what_is_no_number(kind: str) -> None:
    case = Case(BOTH, *LAYERS[kind])
    case.x[...] = np.nan
    BOTH.keep_weights(case.plan, case.weights)
    assert np.isnan(case.plain(relu=True)).all()


@pytest.mark.parametrize("pixels", [7, 14])
def test_few_pixels_share_out_panels(pixels: int) -> None:
    """Each thread reads a part of the weights; every channel is computed once."""
    layer = (1, 64, pixels, pixels), 1000, Geometry((1, 1), (1, 1), (0, 0), (1, 1), 1)
    results = []
    for threads in (1, 2, 5):
        case = Case(create_backend(None, threads), *layer)
        case.backend.keep_weights(case.plan, case.weights)
        results.append(case.plain())
    for one in results[1:]:
        np.testing.assert_array_equal(one, results[0])
    wanted = np.einsum("oi,nihw->nohw", case.weights[:, :, 0, 0], case.x) + case.bias.reshape(-1, 1, 1)
    np.testing.assert_allclose(results[0], wanted, rtol=1e-4, atol=1e-4)

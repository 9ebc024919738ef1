"""Convolutions on the CPU by tiles: what is left out beside the image, small images taken together, few channels."""

from __future__ import annotations

from typing import Any

import backend_checks as checks
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.backend import Geometry, create_backend
from caffepy.backend.cpu.convolution import direct, weight_gradient
from caffepy.backend.cpu.convolution.correlation import Correlation, Padding
from caffepy.backend.cpu.convolution.product import ThinConvolution
from caffepy.backend.cpu.gemm.microkernel import HALF
from caffepy.backend.cpu.gemm.packing import Panels
from caffepy.backend.cpu.jit.vector import WIDTH

BACKEND = create_backend(None, 2)
ONE = (1, 1)
SMALL = st.integers(1, 3)


def planned(backend: Any, x_shape: tuple[int, ...], outputs: int, geometry: Geometry) -> Any:
    return backend.plan_convolution(x_shape, (outputs, x_shape[1] // geometry.group, *geometry.kernel), geometry)


@pytest.mark.parametrize(("channels", "outputs"), [(20, 33), (48, 20), (3, 48), (33, 9)])
@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    images=st.integers(1, 7), size=st.tuples(st.integers(1, 6), st.integers(1, 9)), kernel=st.tuples(SMALL, SMALL),
    stride=st.tuples(SMALL, SMALL), dilation=st.tuples(SMALL, SMALL), pad=st.tuples(st.integers(0, 4), SMALL),
)  # fmt: skip
def test_small_images(
    channels: int, outputs: int, images: int, size: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int],
    dilation: tuple[int, int], pad: tuple[int, int],
) -> None:  # fmt: skip
    """Several images share tiles, and some taps meet the image at a few pixels only."""
    least = [max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilation, pad, strict=True)]
    shape = (images, channels, *(max(pair) for pair in zip(size, least, strict=True)))
    checks.check_convolution(BACKEND, shape, outputs, Geometry(kernel, stride, pad, dilation, 1))


@pytest.mark.parametrize(("channels", "outputs"), [(48, 64), (64, 16)])
def test_the_gradient_of_weights_leaves_out_what_lies_beside_the_image(channels: int, outputs: int) -> None:
    """The infinite slopes of the first line and column meet no zero of the padding."""
    geometry = Geometry((3, 3), ONE, ONE, (2, 2), 1)
    plan = planned(BACKEND, (2, channels, 8, 8), outputs, geometry)
    x, dy = (checks.to_device(BACKEND, checks.normal(1, (2, c, n, n))) for c, n in ((channels, 8), (outputs, 6)))
    dweights = BACKEND.zeros((outputs, channels, 3, 3))
    dy[:, :, 0, :] = dy[:, :, :, 0] = np.inf
    plan.backward_weights(x, dy, dweights, False)
    finite = np.isfinite(BACKEND.to_host(dweights)).all(axis=(0, 1))
    assert finite.tolist() == [[True, False, False], [False, False, False], [False, False, False]]


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize(("channels", "outputs"), [(16, 300), (300, 16)])
def test_the_gradient_of_weights_whose_pixels_lie_far_apart(
    monkeypatch: pytest.MonkeyPatch, channels: int, outputs: int, kernel: int
) -> None:
    """What the next of several blocks of lines will read is fetched ahead."""
    assert max(channels, outputs) >= weight_gradient.FAR
    monkeypatch.setattr(weight_gradient, "MIN_CACHED", 1)
    pad = (kernel // 2,) * 2
    geometry = Geometry((kernel, kernel), ONE, pad, ONE, 1)
    checks.check_convolution(BACKEND, (2, channels, 30, 11), outputs, geometry)


def test_a_few_padded_images_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = Geometry((3, 3), ONE, ONE, ONE, 1)
    monkeypatch.setattr(direct, "CHUNK", 4000)
    padding = planned(BACKEND, (3, 20, 9, 8), 17, geometry).shape.padding
    assert padding.elements < 4000 < 3 * padding.elements
    checks.check_convolution(BACKEND, (3, 20, 9, 8), 17, geometry)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)), kernel=st.tuples(SMALL, SMALL),
    stride=st.tuples(st.integers(2, 5), SMALL), pad=st.tuples(SMALL, st.integers(0, 2)),
    dilation=st.tuples(SMALL, SMALL),
)  # fmt: skip
def test_all_phases_of_a_stride_in_one_pass(
    size: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int], pad: tuple[int, int],
    dilation: tuple[int, int],
) -> None:  # fmt: skip
    """Also pixels that no window meets, where the stride is wider than the kernel."""
    size = tuple(max(own, d * (k - 1) + 1) for own, d, k in zip(size, dilation, kernel, strict=True))
    checks.check_convolution(BACKEND, (2, 40, *size), 24, Geometry(kernel, stride, pad, dilation, 1))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    images=SMALL, channels=st.sampled_from([1, 5, 20]), outputs=st.sampled_from([3, 33]), read_in_place=st.booleans(),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 5)), stride=st.tuples(SMALL, SMALL),
    dilation=st.tuples(SMALL, SMALL), pad=st.tuples(st.integers(0, 4), st.integers(0, 4)),
)  # fmt: skip
def test_with_and_without_a_padded_copy(
    images: int, channels: int, outputs: int, read_in_place: bool, kernel: tuple[int, int], stride: tuple[int, int],
    dilation: tuple[int, int], pad: tuple[int, int],
) -> None:  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "FILLED", 0 if read_in_place else 2)
        checks.check_convolution(
            BACKEND, (images, channels, 13, 14), outputs, Geometry(kernel, stride, pad, dilation, 1)
        )


@pytest.mark.parametrize(("images", "kernel", "stride", "dilation"), [(3, 3, 1, 2), (1, 3, 2, 1), (1, 5, 1, 1)])
def test_many_pixels_that_meet_the_same_taps_need_no_padded_copy(
    monkeypatch: pytest.MonkeyPatch, images: int, kernel: int, stride: int, dilation: int
) -> None:
    """Nor does a bit depend on how panels are divided among threads."""
    monkeypatch.delattr(Padding, "write")
    pad = dilation * (kernel // 2)
    geometry, size = Geometry((kernel,) * 2, (stride,) * 2, (pad,) * 2, (dilation,) * 2, 1), 56 // stride
    results = []
    for backend in (create_backend(None, 1), create_backend(None, 3)):
        plan = planned(backend, (images, 20, 56, 56), 70, geometry)
        shapes = (images, 20, 56, 56), (images, 70, size, size), (70, 20, kernel, kernel)
        x, dy, weights = (checks.to_device(backend, checks.normal(i, shape)) for i, shape in enumerate(shapes))
        y, dx = checks.dirty(backend, shapes[1]), checks.dirty(backend, shapes[0])
        plan.forward(x, weights, None, y)
        plan.backward_data(dy, weights, dx)
        results.append((y, dx))
    assert all(np.array_equal(one, three) for one, three in zip(*results, strict=True))


def test_a_padded_copy_where_few_pixels_meet_the_same_taps() -> None:
    plan = planned(BACKEND, (1, 16, 20, 20), 16, Geometry((9, 9), ONE, (4, 4), ONE, 1))
    x, weights = (checks.to_device(BACKEND, checks.normal(1, s)) for s in ((1, 16, 20, 20), (16, 16, 9, 9)))
    plan.forward(x, weights, None, BACKEND.zeros((1, 16, 20, 20)))
    assert isinstance(plan._forward, Correlation)


@pytest.mark.parametrize("outputs", [1, 8, 9, 24, 25, 40, 56])
def test_the_last_of_several_vectors_may_be_half_full(outputs: int) -> None:
    """Twice as fast where it is computed with half a vector: it has a panel of its own."""
    last = Panels(9, outputs, 1000).entries[-1].tolist()
    assert not 0 < outputs % WIDTH <= HALF or (last[0], last[3]) == (1, outputs % WIDTH)
    checks.check_convolution(BACKEND, (2, 20, 7, 6), outputs, Geometry((3, 3), ONE, ONE, ONE, 1))


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    images=SMALL, size=st.tuples(st.integers(1, 9), st.integers(1, 9)), outputs=st.integers(16, 70), relu=st.booleans()
)  # fmt: skip
def test_pixels_of_few_channels(channels: int, images: int, size: tuple[int, int], outputs: int, relu: bool) -> None:
    shape, geometry = (images, channels, *size), Geometry(ONE, ONE, (0, 0), ONE, 1)
    plan = planned(BACKEND, shape, outputs, geometry)
    assert isinstance(plan, ThinConvolution)
    checks.check_convolution(BACKEND, shape, outputs, geometry)
    x, weights, bias, more = (
        checks.to_device(BACKEND, checks.normal(i, s))
        for i, s in enumerate([shape, (outputs, channels, 1, 1), (outputs,), (images, outputs, *size)])
    )
    y = checks.dirty(BACKEND, more.shape)
    plan.forward(x, weights, bias, y, relu, None, more)
    expected = np.einsum("nchw,oc->nohw", x.astype(float), weights[:, :, 0, 0]) + bias[:, None, None] + more
    checks.close(y, np.maximum(expected, 0) if relu else expected)


def test_threads_change_no_bit() -> None:
    """However many images share tiles."""
    results = []
    for threads in (1, 3):
        backend, rng = create_backend(None, threads), np.random.default_rng(1)
        for channels, kernel in ((20, 3), (3, 1)):
            geometry = Geometry((kernel, kernel), ONE, (kernel // 2, kernel // 2), ONE, 1)
            plan = planned(backend, (7, channels, 6, 7), 40, geometry)
            shapes = (7, channels, 6, 7), (7, 40, 6, 7), (40, channels, kernel, kernel)
            x, dy, weights = (checks.to_device(backend, rng.standard_normal(s)) for s in shapes)
            y, dx, dweights = (checks.dirty(backend, s) for s in (shapes[1], shapes[0], shapes[2]))
            plan.forward(x, weights, None, y)
            plan.backward_data(dy, weights, dx)
            plan.backward_weights(x, dy, dweights, False)
            results.append([y, dx, dweights])
    for one, three in zip(results[:2], results[2:], strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, three, strict=True))

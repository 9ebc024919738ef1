"""Pooling over any number of axes and with dilation, against plain loops."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layer_harness import Runner, check_layer, gaussian, spread

from caffepy.errors import ConfigError, ShapeError


def pool(x, kernel, stride, pad, dilation, average):
    """Pooling as its definition reads."""
    sizes = []
    for size, k, s, p, d in zip(x.shape[2:], kernel, stride, pad, dilation, strict=True):
        pooled = math.ceil((size + 2 * p - d * (k - 1) - 1) / s) + 1
        sizes.append(pooled - 1 if any(pad) and (pooled - 1) * s >= size + p else pooled)
    y = np.zeros((*x.shape[:2], *sizes))
    for at in itertools.product(*map(range, sizes)):
        taps = [
            [i * s - p + d * n for n in range(k)]
            for i, k, s, p, d in zip(at, kernel, stride, pad, dilation, strict=True)
        ]
        count = math.prod(sum(t < n + p for t in own) for own, n, p in zip(taps, x.shape[2:], pad, strict=True))
        inside = [[t for t in own if 0 <= t < n] for own, n in zip(taps, x.shape[2:], strict=True)]
        window = x[np.ix_(range(x.shape[0]), range(x.shape[1]), *inside)].reshape(*x.shape[:2], -1)
        y[(..., *at)] = window.sum(2) / count if average else window.max(2)
    return y


@settings(max_examples=40)
@given(st.data())
def test_pooling_over_axes(data):
    draw = data.draw
    axes = draw(st.integers(1, 4))
    kernel, dilation = ([draw(st.integers(1, 3)) for _ in range(axes)] for _ in range(2))
    stride = [draw(st.integers(1, k)) for k in kernel]
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    pad = [draw(st.integers(0, min(k - 1, 1) * d)) for k, d in zip(kernel, dilation, strict=True)]
    assume(all(p == 0 or p < r for p, r in zip(pad, reach, strict=True)))
    average = draw(st.booleans())
    shape = (2, draw(st.integers(1, 3)), *[r + draw(st.integers(0, 2)) for r in reach])
    fields = {"kernel": kernel, "stride": stride, "pad": pad}
    text = " ".join(f"{name}_shape {{ {' '.join(f'dim: {n}' for n in own)} }}" for name, own in fields.items())
    text += "".join(f" dilation: {d}" for d in dilation) + (" pool: AVE" if average else "")
    check_layer(
        f"type: 'Pooling' pooling_param {{ {text} }}",
        [spread(shape)],
        lambda x: pool(x, kernel, stride, pad, dilation, average),
    )


@pytest.mark.parametrize("size", ["kernel_size: 2 stride: 2", "kernel_shape { dim: 2 } stride_shape { dim: 2 }"])
def test_one_size_holds_for_all_axes(size):
    ones = [1, 1, 1]
    check_layer(
        f"type: 'Pooling' pooling_param {{ {size} }}",
        [spread((2, 3, 4, 5, 6))],
        lambda x: pool(x, [2, 2, 2], [2, 2, 2], [0, 0, 0], ones, average=False),
    )


def test_global_pooling_of_volumes_follows_the_volume():
    runner = Runner("type: 'Pooling' pooling_param { pool: AVE global_pooling: true }", [gaussian((2, 3, 4, 5, 2))])
    x = gaussian((2, 3, 2, 6, 3))
    runner.bottom[0].reshape(x.shape)
    runner.layer.reshape(runner.bottom, runner.top)
    assert np.allclose(runner.forward([x])[0][:, :, 0, 0, 0], x.mean((2, 3, 4)), atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1, 2, 2, 2), (1, 1, 3, 3)])
def test_the_first_of_equal_maxima_gets_the_gradient(shape):
    size = "kernel_size: 2 dilation: 2" if len(shape) == 4 else "kernel_size: 2"
    runner = Runner(f"type: 'Pooling' pooling_param {{ {size} }}", [np.ones(shape, "f")])
    result = runner.run([np.full((1,) * len(shape), 3, np.float32)])
    assert result.bottom_diffs[0].ravel().tolist() == [3] + [0] * (math.prod(shape) - 1)


def test_a_maximum_below_zero_with_elements_in_the_padding():
    """Elements outside are left out, not read as zeros."""
    text = "type: 'Pooling' pooling_param { kernel_size: 2 dilation: 2 pad: 1 }"
    x = -1 - spread((1, 2, 4, 4)) ** 2
    check_layer(text, [x], lambda x: pool(x, [2, 2], [1, 1], [1, 1], [2, 2], average=False))


@pytest.mark.parametrize(
    ("shape", "text", "message"),
    [
        ((1, 2, 5, 5, 5), "kernel_shape { dim: 2 dim: 2 }", "kernel is given for 2 axes, but here are 3 spatial axes"),
        ((1, 2, 5, 5, 5), "kernel_h: 2 kernel_w: 2", "kernel_h and kernel_w are for two spatial axes, but here are 3"),
        ((1, 2, 5, 5), "kernel_size: 2 dilation: 1 dilation: 1 dilation: 1", "dilation is given for 3 axes"),
        ((1, 2, 5, 5), "kernel_size: 2 dilation: 0", r"dilation is \(0, 0\); no entry may be 0"),
        ((1, 2, 5, 5), "kernel_shape { dim: -2 }", r"kernel is \(-2, -2\); no entry may be 0"),
        ((1, 2, 5, 5), "kernel_size: 2 pad_shape { dim: -1 }", r"pad is \(-1, -1\); no entry may be below 0"),
        ((1, 2, 5, 5), "kernel_shape { dim: 9223372036854775807 }", "or above 4294967295"),
        ((1, 2, 5, 5), "kernel_size: 2 kernel_shape { dim: 2 }", "give the window as kernel_size, or"),
        ((1, 2, 5, 5), "kernel_size: 2 stride: 1 stride_shape { dim: 2 }", "or stride_shape, not several"),
        ((1, 2, 5, 5), "kernel_size: 3 dilation: 3", "does not fit into the image"),
        ((1, 2, 5, 5, 5), "pool: STOCHASTIC kernel_size: 2", r"STOCHASTIC needs a bottom \(N, C, H, W\)"),
        ((1, 2, 5, 5), "pool: STOCHASTIC kernel_size: 2 dilation: 2", "STOCHASTIC needs .* no dilation"),
        ((1, 2, 5, 5), "global_pooling: true dilation: 2", "without dilation"),
        ((1, 2, 1, 1), "kernel_size: 2 dilation: 2 pad: 1", "has a window without an element of the 1 of its axis"),
        (
            (1, 1, 1, 2),
            "kernel_shape { dim: 1 dim: 2000000000 } stride_shape { dim: 1 dim: 4294967295 } dilation: 2",
            "makes the elements of all windows",
        ),
    ],
)
def test_settings_that_do_not_fit(shape, text, message):
    with pytest.raises((ConfigError, ShapeError), match=message):
        Runner(f"type: 'Pooling' pooling_param {{ {text} }}", [gaussian(shape)])


def test_the_mask_is_that_of_two_axes():
    with pytest.raises(ConfigError, match=r"a second top, the mask, needs a bottom \(N, C, H, W\) and no dilation"):
        Runner("type: 'Pooling' pooling_param { kernel_size: 2 }", [gaussian((1, 2, 5, 5, 5))], tops=2)

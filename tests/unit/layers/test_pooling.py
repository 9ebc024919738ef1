"""Pooling, SPP and LRN against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layer_harness import BACKENDS, TEST, Runner, assert_near, check_layer, gaussian, spread

from caffepy.errors import ConfigError, ShapeError


def output_size(size, kernel, stride, pad, rounding=math.ceil):
    pooled = rounding((size + 2 * pad - kernel) / stride) + 1
    return pooled - 1 if pad and (pooled - 1) * stride >= size + pad else pooled


def pool(x, kernel, stride, pad, average, rounding=math.ceil):
    """Pooling as its definition reads."""
    height, width = x.shape[2:]
    y = np.zeros((*x.shape[:2], *[output_size(n, kernel, stride, pad, rounding) for n in (height, width)]))
    for i in range(y.shape[2]):
        for j in range(y.shape[3]):
            top, left = i * stride - pad, j * stride - pad
            area = (min(top + kernel, height + pad) - top) * (min(left + kernel, width + pad) - left)
            window = x[:, :, max(top, 0) : top + kernel, max(left, 0) : left + kernel]
            y[:, :, i, j] = window.sum((2, 3)) / area if average else window.max((2, 3))
    return y


@settings(max_examples=25)
@given(st.data())
def test_pooling(data):
    draw = data.draw
    kernel = draw(st.integers(1, 4))
    stride = draw(st.integers(1, min(3, kernel)))
    pad = draw(st.integers(0, kernel - 1))
    average, floor = draw(st.booleans()), draw(st.booleans())
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 3)), *[kernel + draw(st.integers(0, 5)) for _ in range(2)])
    text = (
        f"type: 'Pooling' pooling_param {{ pool: {'AVE' if average else 'MAX'} kernel_size: {kernel} stride: {stride} "
        f"pad: {pad} round_mode: {'FLOOR' if floor else 'CEIL'} }}"
    )
    rounding = math.floor if floor else math.ceil
    check_layer(text, [spread(shape)], lambda x: pool(x, kernel, stride, pad, average, rounding))


@settings(max_examples=20)
@given(st.data())
def test_a_kernel_larger_than_the_padded_image_has_one_window(data):
    """As long as it reaches past it by less than the stride: Caffe's ceil of a negative number above -1 is 0."""
    draw = data.draw
    kernel, stride, pad = draw(st.integers(2, 5)), draw(st.integers(2, 4)), draw(st.integers(0, 1))
    size = kernel - 2 * pad - draw(st.integers(1, stride - 1))
    assume(size > 0)
    average = draw(st.booleans())
    shape = (2, draw(st.integers(1, 3)), *draw(st.permutations([size, size + draw(st.integers(0, 4))])))
    text = (
        f"type: 'Pooling' pooling_param {{ pool: {'AVE' if average else 'MAX'} kernel_size: {kernel} stride: {stride} "
        f"pad: {pad} }}"
    )
    starts = [(output_size(n, kernel, stride, pad) - 1) * stride - pad < n for n in shape[2:]]
    assume(all(starts))
    check_layer(text, [spread(shape)], lambda x: pool(x, kernel, stride, pad, average))


def test_global_pooling_follows_the_image():
    runner = Runner("type: 'Pooling' pooling_param { pool: AVE global_pooling: true }", [gaussian((2, 3, 4, 5))])
    x = gaussian((2, 3, 6, 3))
    runner.bottom[0].reshape(x.shape)
    runner.layer.reshape(runner.bottom, runner.top)
    assert np.allclose(runner.forward([x])[0][:, :, 0, 0], x.mean((2, 3)), atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_points_at_the_first_maximum(backend):
    x = np.zeros((1, 1, 4, 4), np.float32)
    x[0, 0, 1, 2] = x[0, 0, 3, 3] = 5
    text = "type: 'Pooling' pooling_param { kernel_size: 2 stride: 2 }"
    y, mask = Runner(text, [x], backend, tops=2).forward()
    assert y.ravel().tolist() == [0, 5, 0, 5]
    assert mask.ravel().tolist() == [0, 6, 8, 15]


@pytest.mark.parametrize(
    ("settings_text", "message"),
    [
        ("pool: STOCHASTIC kernel_size: 2 pad: 1", "STOCHASTIC has no padding"),
        ("pool: MAX", "give the window as kernel_size, or as kernel_h and kernel_w"),
        ("kernel_size: 2 kernel_h: 2 kernel_w: 2", "give the window as kernel_size, or"),
        ("kernel_size: 2 pad: 2", r"pad \(2, 2\) must be smaller than the kernel \(2, 2\)"),
        ("kernel_size: 2 stride: 0", r"stride is \(0, 0\)"),
        ("global_pooling: true kernel_size: 2", "global_pooling .* kernel's size"),
        ("global_pooling: true stride: 2", "pad 0 and stride 1 only"),
        ("kernel_size: 2 stride: 2 stride_h: 2 stride_w: 1", "either stride or stride_h"),
        ("kernel_size: 2 pad_h: 1", "pad_h and pad_w are needed together"),
    ],
)
def test_settings_that_do_not_fit(settings_text, message):
    with pytest.raises(ConfigError, match=message):
        Runner(f"type: 'Pooling' pooling_param {{ {settings_text} }}", [gaussian((1, 2, 5, 5))])


@pytest.mark.parametrize(
    ("shape", "settings_text", "message"),
    [
        ((2, 3), "kernel_size: 2", r"must have spatial axes: \(N, C, H, W\), or another number.*'a' is 2 3 \(6\)"),
        ((1, 2, 3, 3), "kernel_size: 9", r"kernel \(9, 9\) does not fit.*1 2 3 3"),
        ((1, 2, 3, 3), "kernel_size: 5 stride: 2", r"kernel \(5, 5\) does not fit.*1 2 3 3"),
        ((1, 2, 3, 3), "kernel_size: 4 stride: 2 round_mode: FLOOR", r"kernel \(4, 4\) does not fit.*1 2 3 3"),
        ((1, 2, 8, 8), "kernel_size: 1 stride: 2", "begin outside the image; use round_mode: FLOOR"),
    ],
)
def test_shapes_that_do_not_fit(shape, settings_text, message):
    with pytest.raises(ShapeError, match=message):
        Runner(f"type: 'Pooling' pooling_param {{ {settings_text} }}", [gaussian(shape)])


@pytest.mark.parametrize("average", [False, True])
def test_padding_of_one_axis_leaves_out_windows_of_both(average):
    """As in Caffe, where `pad_h || pad_w` decides: the third window of the columns would begin at 6 of 5."""
    kind = "AVE" if average else "MAX"
    text = f"type: 'Pooling' pooling_param {{ pool: {kind} kernel_h: 3 kernel_w: 1 stride: 3 pad_h: 1 pad_w: 0 }}"

    def reference(x):
        rows = [x[:, :, :2, ::3].sum(2) / 3, x[:, :, 2:5, ::3].mean(2)]
        if not average:
            rows = [x[:, :, :2, ::3].max(2), x[:, :, 2:5, ::3].max(2)]
        return np.stack(rows, 2)

    check_layer(text, [spread((2, 3, 5, 5))], reference)


def test_ceil_mode_of_forks_is_round_mode():
    """As DenseNet's public prototxts use it."""
    x = spread((1, 2, 6, 6))
    shapes = {}
    for extra in ("", "ceil_mode: true", "ceil_mode: false", "round_mode: FLOOR", "ceil_mode: false round_mode: FLOOR"):
        shapes[extra] = (
            Runner(f"type: 'Pooling' pooling_param {{ kernel_size: 3 stride: 2 {extra} }}", [x]).top[0].shape
        )
    assert list(shapes.values()) == [(1, 2, 3, 3)] * 2 + [(1, 2, 2, 2)] * 3
    for both in ("ceil_mode: true round_mode: FLOOR", "ceil_mode: false round_mode: CEIL"):
        with pytest.raises(ConfigError, match="ceil_mode and round_mode contradict each other"):
            Runner(f"type: 'Pooling' pooling_param {{ kernel_size: 3 stride: 2 {both} }}", [x])


def lrn_across(x, size, alpha, beta, k):
    squares = np.pad(x**2, [(0, 0), (size // 2, size // 2), (0, 0), (0, 0)])
    sums = sum(squares[:, i : i + x.shape[1]] for i in range(size))
    return x * (k + alpha / size * sums) ** -beta


@settings(max_examples=15)
@given(
    size=st.sampled_from([1, 3, 5]), channels=st.integers(1, 8), side=st.integers(1, 4), k=st.sampled_from([1.0, 2.0])
)
def test_lrn_across_channels(size, channels, side, k):
    text = f"type: 'LRN' lrn_param {{ local_size: {size} alpha: 0.5 beta: 0.75 k: {k} }}"
    check_layer(text, [gaussian((2, channels, side, side))], lambda x: lrn_across(x, size, 0.5, 0.75, k))


@pytest.mark.parametrize("size", [1, 3, 5])
def test_lrn_within_channel(size):
    def reference(x):
        return x * (1 + 0.5 * pool(x**2, size, 1, size // 2, average=True)) ** -0.75

    text = f"type: 'LRN' lrn_param {{ local_size: {size} alpha: 0.5 norm_region: WITHIN_CHANNEL }}"
    check_layer(text, [gaussian((2, 2, 6, 5))], reference)


def test_lrn_refusals():
    with pytest.raises(ConfigError, match="local_size is 4, but must be odd"):
        Runner("type: 'LRN' lrn_param { local_size: 4 }", [gaussian((1, 2, 3, 3))])
    with pytest.raises(ConfigError, match="local_size is 2147483647; at most 16384 is possible"):
        Runner("type: 'LRN' lrn_param { local_size: 2147483647 }", [gaussian((1, 2, 3, 3))])
    with pytest.raises(ShapeError, match=r"four axes, \(N, C, H, W\).*'a' is 2 3 \(6\)"):
        Runner("type: 'LRN'", [gaussian((2, 3))])
    with pytest.raises(ConfigError, match="cannot work in place"):
        Runner("type: 'LRN'", [gaussian((1, 2, 3, 3))], in_place=True)


# -- SPP -------------------------------------------------------------------------------------------------


def pyramid(x, levels, method):
    """Level after level, window by window; padding counts in means up to size + pad."""
    parts = []
    for level in range(levels):
        bins = 2**level
        edges = []
        for size in x.shape[2:]:
            kernel = math.ceil(size / bins)
            pad = (kernel * bins - size + 1) // 2
            starts = [i * kernel - pad for i in range(bins)]
            edges.append([(max(s, 0), min(s + kernel, size), min(s + kernel, size + pad) - s) for s in starts])
        out = np.zeros((*x.shape[:2], bins, bins))
        for i, (h0, h1, rows) in enumerate(edges[0]):
            for j, (w0, w1, columns) in enumerate(edges[1]):
                window = x[:, :, h0:h1, w0:w1]
                out[:, :, i, j] = window.max((2, 3)) if method == "MAX" else window.sum((2, 3)) / (rows * columns)
        parts.append(out.reshape(len(x), -1))
    return parts[0].reshape(*x.shape[:2], 1, 1) if levels == 1 else np.concatenate(parts, 1)


@pytest.mark.parametrize(
    ("shape", "levels"), [((2, 3, 9, 8), 3), ((2, 2, 4, 4), 2), ((2, 3, 5, 7), 1), ((1, 4, 7, 11), 2)]
)
@pytest.mark.parametrize("method", ["MAX", "AVE"])
def test_spp(shape, levels, method):
    text = f"type: 'SPP' spp_param {{ pyramid_height: {levels} pool: {method} }}"
    check_layer(text, [spread(shape)], lambda x: pyramid(x, levels, method))


@pytest.mark.parametrize("backend", BACKENDS)
def test_stochastic_spp(backend):
    """Without padding: in TEST the mean weighted by itself, in TRAIN an element of each window."""
    text, x = "type: 'SPP' spp_param { pyramid_height: 2 pool: STOCHASTIC }", np.abs(gaussian((2, 3, 4, 6)))
    windows = [x.reshape(2, 3, -1)] + [x[:, :, i : i + 2, j : j + 3].reshape(2, 3, -1) for i in (0, 2) for j in (0, 3)]
    means = [((w * w).sum(2) / w.sum(2))[..., None] for w in windows]
    wanted = np.concatenate([means[0].reshape(2, -1), np.concatenate(means[1:], 2).reshape(2, -1)], 1)
    assert_near(Runner(text, [x], backend, phase=TEST).forward()[0], wanted, 2e-5, "TEST")
    runner = Runner(text, [x], backend)
    drawn = runner.forward()[0]
    assert np.isin(drawn[:, :3], x).all() and np.isin(drawn[:, 3:].reshape(2, 3, 4)[:, :, 0], windows[1]).all()
    dx = runner.backward([np.ones_like(drawn)])[0]
    assert_near(dx.sum(), drawn.size, 1e-6, "each output has one source")


def test_spp_refuses():
    with pytest.raises(ConfigError, match="spp_param.pyramid_height must be at least 1"):
        Runner("type: 'SPP'", [gaussian((2, 3, 4, 5))])
    with pytest.raises(ConfigError, match="STOCHASTIC has no padding"):
        Runner("type: 'SPP' spp_param { pyramid_height: 2 pool: STOCHASTIC }", [gaussian((2, 3, 5, 5))])

"""Fields and corner cases that no reference number of either Caffe touches, against plain NumPy and SciPy.

Each case is a layer, its bottoms and the forward pass in float64; gradients are checked against its derivatives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from layer_harness import TEST, check_layer, gaussian, spread

pytest.importorskip("scipy", reason="scipy is not installed: pip install '.[test]'")

import scipy.ndimage
import scipy.special

Floats = Any


# -- plain computations ----------------------------------------------------------------------------------


def windows(size: int, kernel: int, stride: int, pad: int, floor: bool, clips: bool) -> Iterator[tuple[int, int, int]]:
    """Begin, end and Caffe's length of each pooling window along an axis."""
    count = (math.floor if floor else math.ceil)((size + 2 * pad - kernel) / stride) + 1
    if clips and (count - 1) * stride >= size + pad:
        count -= 1
    for i in range(count):
        begin = i * stride - pad
        end = min(begin + kernel, size + pad)
        yield max(begin, 0), min(end, size), end - begin


def pooled(kind: str, kernel: Any, stride: Any, pad: Any = (0, 0), floor: bool = False) -> Callable[[Floats], Floats]:
    """MAX, AVE, or STOCHASTIC in testing."""

    def compute(x: Floats) -> Floats:
        axes = [windows(x.shape[2 + i], kernel[i], stride[i], pad[i], floor, any(pad)) for i in range(2)]
        rows, columns = map(list, axes)
        y = np.zeros((*x.shape[:2], len(rows), len(columns)))
        for (i, (top, bottom, height)), (j, (left, right, width)) in itertools.product(
            enumerate(rows), enumerate(columns)
        ):
            part = x[:, :, top:bottom, left:right]
            if kind == "MAX":
                y[:, :, i, j] = part.max((2, 3))
            elif kind == "AVE":
                y[:, :, i, j] = part.sum((2, 3)) / (height * width)
            else:
                y[:, :, i, j] = (part**2).sum((2, 3)) / part.sum((2, 3))
        return y

    return compute


def convolved(stride: Any, pad: Any, dilation: Any, group: int = 1) -> Callable[..., Floats]:
    """x (N, C, spatial…) with weights and perhaps a bias, by SciPy's correlation of each pair of channels."""

    def one(x: Floats, w: Floats) -> Floats:
        spread_out = np.zeros([d * (k - 1) + 1 for d, k in zip(dilation, w.shape, strict=True)])
        spread_out[tuple(slice(None, None, d) for d in dilation)] = w
        padded = np.pad(x, [(p, p) for p in pad])
        full = scipy.ndimage.correlate(
            padded, spread_out, mode="constant", origin=[-(s // 2) for s in spread_out.shape]
        )
        valid = tuple(slice(0, n - k + 1, s) for n, k, s in zip(padded.shape, spread_out.shape, stride, strict=True))
        return full[valid]

    def compute(x: Floats, w: Floats, *bias: Floats) -> Floats:
        inner, outer = w.shape[1], w.shape[0] // group
        images = [
            [sum(one(n[o // outer * inner + c], w[o, c]) for c in range(inner)) for o in range(w.shape[0])] for n in x
        ]
        return np.array(images) + (bias[0].reshape(-1, *[1] * (x.ndim - 2)) if bias else 0)

    return compute


def deconvolved(stride: Any, pad: Any, dilation: Any, group: int) -> Callable[..., Floats]:
    """Each pixel puts its multiple of the weights into the output."""

    def compute(x: Floats, w: Floats, bias: Floats) -> Floats:
        sizes = [
            s * (n - 1) + d * (k - 1) + 1 for s, n, d, k in zip(stride, x.shape[2:], dilation, w.shape[2:], strict=True)
        ]
        y = np.zeros((x.shape[0], w.shape[1] * group, *sizes))
        inner, outer = x.shape[1] // group, w.shape[1]
        for pixel in np.ndindex(*x.shape[2:]):
            at = tuple(
                slice(p * s, p * s + d * (k - 1) + 1, d)
                for p, s, d, k in zip(pixel, stride, dilation, w.shape[2:], strict=True)
            )
            for c in range(x.shape[1]):
                first = c // inner * outer
                put = np.multiply.outer(x[(slice(None), c, *pixel)], w[c])
                y[(slice(None), slice(first, first + outer), *at)] += put
        cut = tuple(slice(p, n - p) for p, n in zip(pad, y.shape[2:], strict=True))
        return y[(slice(None), slice(None), *cut)] + bias.reshape(-1, *[1] * len(stride))

    return compute


def along(function: Callable[..., Floats], axis: int) -> Callable[[Floats], Floats]:
    return lambda x: function(x, axis=axis)


def mvn(axes: Any, divide: bool, eps: float = 1e-9) -> Callable[[Floats], Floats]:
    def compute(x: Floats) -> Floats:
        centred = x - x.mean(axes, keepdims=True)
        return centred / (x.std(axes, keepdims=True) + eps) if divide else centred

    return compute


def columns(kernel: Any, stride: Any, pad: Any, dilation: Any) -> Callable[[Floats], Floats]:
    """im2col of (N, C, spatial…)."""

    def compute(x: Floats) -> Floats:
        padded = np.pad(x, [(0, 0), (0, 0), *((p, p) for p in pad)])
        sizes = [
            (n - d * (k - 1) - 1) // s + 1
            for n, d, k, s in zip(padded.shape[2:], dilation, kernel, stride, strict=True)
        ]
        parts = []
        for offset in np.ndindex(*kernel):
            at = tuple(
                slice(o * d, o * d + s * (n - 1) + 1, s)
                for o, d, s, n in zip(offset, dilation, stride, sizes, strict=True)
            )
            parts.append(padded[(slice(None), slice(None), *at)])
        return np.stack(parts, 2).reshape(x.shape[0], -1, *sizes)

    return compute


# -- the cases -------------------------------------------------------------------------------------------

X4, X5, X3 = gaussian((2, 4, 5, 6)), gaussian((2, 3, 4, 3, 5)), gaussian((2, 3, 4))
APART = spread((2, 2, 7, 8))
RANDOM = "{ type: 'gaussian' }"
W = "weight_filler { type: 'gaussian' } bias_filler { type: 'gaussian' }"


def layer(kind: str, holder: str = "", settings: str = "") -> str:
    return f"type: '{kind}' " + (f"{holder} {{ {settings} }}" if holder else "")


def pooling(settings: str) -> str:
    return layer("Pooling", "pooling_param", settings)


def convolution(settings: str, kind: str = "Convolution") -> str:
    return layer(kind, "convolution_param", f"{settings} {W}")


def one_axis_more(compute: Callable[..., Floats]) -> Callable[..., Floats]:
    """For `axis: 2`: the first two axes are the batch."""

    def whole(x: Floats, *more: Floats) -> Floats:
        y = compute(x.reshape(-1, *x.shape[2:]), *more)
        return y.reshape(*x.shape[:2], *y.shape[1:])

    return whole


POSITIVE = np.abs(APART) + 0.1
CASES: dict[str, tuple[Any, ...]] = {
    "windows of other heights and widths": (
        pooling("kernel_h: 3 kernel_w: 2 stride_h: 1 stride_w: 3 pad_h: 2 pad_w: 1"),
        [APART],
        pooled("MAX", (3, 2), (1, 3), (2, 1)),
    ),
    "the same, averaged": (
        pooling("pool: AVE kernel_h: 3 kernel_w: 2 stride_h: 1 stride_w: 3 pad_h: 2 pad_w: 1"),
        [APART],
        pooled("AVE", (3, 2), (1, 3), (2, 1)),
    ),
    "averages rounded down": (
        pooling("pool: AVE kernel_size: 3 stride: 2 pad: 1 round_mode: FLOOR"),
        [APART],
        pooled("AVE", (3, 3), (2, 2), (1, 1), True),
    ),
    "a stride larger than the kernel": (
        pooling("kernel_size: 2 stride: 3 round_mode: FLOOR"),
        [APART],
        pooled("MAX", (2, 2), (3, 3), floor=True),
    ),
    "a stride larger than the kernel, clipped": (
        pooling("pool: AVE kernel_size: 2 stride: 5 pad: 1"),
        [APART],
        pooled("AVE", (2, 2), (5, 5), (1, 1)),
    ),
    "one image, one window": (
        pooling("pool: AVE global_pooling: true"),
        [APART[:1]],
        lambda x: x.mean((2, 3), keepdims=True),
    ),
    "stochastic in testing": (
        pooling("pool: STOCHASTIC kernel_size: 3 stride: 2"),
        [POSITIVE],
        pooled("STOCHASTIC", (3, 3), (2, 2)),
        {"phase": TEST},
    ),
    "convolution of vectors": (
        convolution("num_output: 2 kernel_size: 3 stride: 2 pad: 1"),
        [X3],
        convolved((2,), (1,), (1,)),
    ),
    "convolution behind two batch axes": (
        convolution("num_output: 2 kernel_size: 2 axis: 2"),
        [X5],
        one_axis_more(convolved((1, 1), (0, 0), (1, 1))),
    ),
    "convolution at a negative axis": (
        convolution("num_output: 2 kernel_size: 2 axis: -3 bias_term: false"),
        [X5],
        one_axis_more(convolved((1, 1), (0, 0), (1, 1))),
    ),
    "convolution without spatial axes": (
        convolution("num_output: 3"),
        [gaussian((2, 4))],
        lambda x, w, b: x @ w.T + b,
    ),
    "convolution of other strides, pads and dilations": (
        convolution(
            "num_output: 4 group: 2 kernel_size: 2 kernel_size: 3 stride: 3 stride: 1 pad: 2 pad: 3 "
            "dilation: 2 dilation: 1"
        ),
        [X4],
        convolved((3, 1), (2, 3), (2, 1), 2),
    ),
    "convolution in three dimensions": (
        convolution("num_output: 2 kernel_size: 2 pad: 1 pad: 0 pad: 1 stride: 2 stride: 1 stride: 1"),
        [X5],
        convolved((2, 1, 1), (1, 0, 1), (1, 1, 1)),
    ),
    "a group for each channel": (
        convolution("num_output: 8 group: 4 kernel_h: 1 kernel_w: 3 pad_w: 1 pad_h: 0"),
        [X4[:1]],
        convolved((1, 1), (0, 1), (1, 1), 4),
    ),
    "a pad larger than the kernel": (
        convolution("num_output: 1 kernel_size: 1 pad: 2 stride: 2"),
        [X4],
        convolved((2, 2), (2, 2), (1, 1)),
    ),
    "deconvolution with groups and dilation": (
        convolution("num_output: 6 group: 2 kernel_size: 2 stride: 3 pad: 1 dilation: 2", "Deconvolution"),
        [X4],
        deconvolved((3, 3), (1, 1), (2, 2), 2),
    ),
    "deconvolution of vectors": (
        convolution("num_output: 2 kernel_size: 3 stride: 2", "Deconvolution"),
        [X3],
        deconvolved((2,), (0,), (1,), 1),
    ),
    "deconvolution in three dimensions": (
        convolution("num_output: 2 kernel_size: 2 stride: 2 stride: 1 stride: 2", "Deconvolution"),
        [gaussian((1, 2, 2, 3, 2))],
        deconvolved((2, 1, 2), (0, 0, 0), (1, 1, 1), 1),
    ),
    "columns of vectors": (
        layer("Im2col", "convolution_param", "kernel_size: 3 stride: 2 pad: 1"),
        [X3],
        columns((3,), (2,), (1,), (1,)),
    ),
    "columns in three dimensions": (
        layer("Im2col", "convolution_param", "kernel_size: 2 pad: 1 dilation: 2"),
        [X5],
        columns((2,) * 3, (1,) * 3, (1,) * 3, (2,) * 3),
    ),
    "columns of other heights and widths": (
        layer("Im2col", "convolution_param", "kernel_h: 1 kernel_w: 3 stride_h: 2 stride_w: 1 pad_h: 1 pad_w: 0"),
        [X4],
        columns((1, 3), (2, 1), (1, 0), (1, 1)),
    ),
    "a pyramid of averages": (
        layer("SPP", "spp_param", "pyramid_height: 2 pool: AVE"),
        [APART],
        lambda x: np.concatenate(
            [pooled("AVE", (7, 8), (7, 8))(x).reshape(2, -1), pooled("AVE", (4, 4), (4, 4), (1, 0))(x).reshape(2, -1)],
            1,
        ),
    ),
    "a pyramid of one level": (
        layer("SPP", "spp_param", "pyramid_height: 1"),
        [APART],
        lambda x: x.max((2, 3), keepdims=True),
    ),
    "inner product over all axes": (
        layer("InnerProduct", "inner_product_param", f"num_output: 3 axis: 0 {W}"),
        [X3],
        lambda x, w, b: w @ x.ravel() + b,
    ),
    "inner product of the last axis": (
        layer("InnerProduct", "inner_product_param", f"num_output: 3 axis: -1 transpose: true {W}"),
        [X4],
        lambda x, w, b: x @ w + b,
    ),
    "embedding without a bias": (
        layer("Embed", "embed_param", "num_output: 3 input_dim: 5 bias_term: false weight_filler { type: 'gaussian' }"),
        [np.array([[0, 4, 2], [2, 2, 1]], np.float32)],
        lambda i, w: w[i.astype(int)],
    ),
    "mean alone": (layer("MVN", "mvn_param", "normalize_variance: false"), [X4], mvn((2, 3), False)),
    "mean alone over channels": (
        layer("MVN", "mvn_param", "normalize_variance: false across_channels: true"),
        [X4],
        mvn((1, 2, 3), False),
    ),
    "deviation over channels": (
        layer("MVN", "mvn_param", "across_channels: true eps: 1e-6"),
        [X4],
        mvn((1, 2, 3), True, 1e-6),
    ),
    "one slope for all channels": (
        layer("PReLU", "prelu_param", "channel_shared: true filler { type: 'constant' value: -0.4 }"),
        [APART],
        lambda x, a: np.where(x > 0, x, a * x),
    ),
    "concatenation along the batch": (
        layer("Concat", "concat_param", "axis: 0"),
        [X3, X3[:1], X3],
        lambda *xs: np.concatenate(xs, 0),
    ),
    "concatenation from behind": (
        layer("Concat", "concat_param", "axis: -1"),
        [X3, X3[..., :1]],
        lambda *xs: np.concatenate(xs, -1),
    ),
    "concatenation by its old name": (
        layer("Concat", "concat_param", "concat_dim: 2"),
        [X4, X4[:, :, :2]],
        lambda *xs: np.concatenate(xs, 2),
    ),
    "slices from behind": (
        layer("Slice", "slice_param", "axis: -1 slice_point: 1 slice_point: 5"),
        [X4],
        lambda x: tuple(np.split(x, [1, 5], -1)),
        {"tops": 3},
    ),
    "slices of the batch by the old name": (
        layer("Slice", "slice_param", "slice_dim: 0"),
        [X4],
        lambda x: tuple(np.split(x, 2)),
        {"tops": 2},
    ),
    "concatenated volumes": (
        layer("Concat"),
        [X5, X5[:, :1]],
        lambda *xs: np.concatenate(xs, 1),
    ),
    "slices of volumes": (
        layer("Slice", "slice_param", "slice_point: 1"),
        [X5],
        lambda x: tuple(np.split(x, [1], 1)),
        {"tops": 2},
    ),
    "volumes scaled by channel": (
        layer("Scale", "scale_param", f"bias_term: true filler {RANDOM} bias_filler {RANDOM}"),
        [X5],
        lambda x, a, b: x * a[:, None, None, None] + b[:, None, None, None],
    ),
    "volumes scaled by position": (
        layer("Scale", "scale_param", f"axis: 2 num_axes: 3 filler {RANDOM}"),
        [X5],
        lambda x, a: x * a,
    ),
    "volumes scaled by element": (
        layer("Scale", "scale_param", f"axis: 1 num_axes: -1 filler {RANDOM}"),
        [X5],
        lambda x, a: x * a,
    ),
    "softmax over the channels of volumes": (
        layer("Softmax"),
        [X5],
        lambda x: np.exp(x) / np.exp(x).sum(1, keepdims=True),
    ),
    "softmax over the rows of volumes": (
        layer("Softmax", "softmax_param", "axis: 3"),
        [X5],
        lambda x: np.exp(x) / np.exp(x).sum(3, keepdims=True),
    ),
    "inner product of volumes": (
        layer("InnerProduct", "inner_product_param", f"num_output: 3 {W}"),
        [X5],
        lambda x, w, b: x.reshape(2, -1) @ w.T + b,
    ),
    "volumes as images": (
        layer("Reshape", "reshape_param", "axis: 1 num_axes: 2 shape { dim: 12 }"),
        [X5],
        lambda x: x.reshape(2, 12, 3, 5),
    ),
    "images as volumes": (
        layer("Reshape", "reshape_param", "axis: 1 num_axes: 1 shape { dim: 2 dim: 2 }"),
        [X4],
        lambda x: x.reshape(2, 2, 2, 5, 6),
    ),
    "sums of volumes": (layer("Reduction", "reduction_param", "axis: 2"), [X5], lambda x: x.sum((2, 3, 4))),
    "three coefficients": (
        layer("Eltwise", "eltwise_param", "coeff: 2 coeff: 0 coeff: -1"),
        [X3, X3 + 1, X3 * 2],
        lambda a, b, c: 2 * a - c + 0 * b,
    ),
    "the middle axes as one": (
        layer("Flatten", "flatten_param", "axis: 1 end_axis: -2"),
        [X4],
        lambda x: x.reshape(2, 20, 6),
    ),
    "all axes as one": (layer("Flatten", "flatten_param", "axis: 0"), [X4], np.ravel),
    "an axis that stays one": (layer("Flatten", "flatten_param", "axis: -1"), [X3], lambda x: x),
    "some axes reshaped": (
        layer("Reshape", "reshape_param", "axis: 1 num_axes: 2 shape { dim: 5 dim: -1 }"),
        [X4],
        lambda x: x.reshape(2, 5, 4, 6),
    ),
    "axes added in front": (
        layer("Reshape", "reshape_param", "axis: 0 num_axes: 0 shape { dim: 1 dim: 1 }"),
        [X3],
        lambda x: x[None, None],
    ),
    "an axis added behind": (
        layer("Reshape", "reshape_param", "axis: -1 num_axes: 0 shape { dim: 1 }"),
        [X3],
        lambda x: x[..., None],
    ),
    "an axis kept and the rest as one": (
        layer("Reshape", "reshape_param", "axis: 1 shape { dim: 0 dim: -1 }"),
        [X4],
        lambda x: x.reshape(2, 4, 30),
    ),
    "a sum of everything": (
        layer("Reduction", "reduction_param", "operation: SUMSQ coeff: -0.5"),
        [X3],
        lambda x: -0.5 * (x**2).sum(),
    ),
    "a mean of the last axis": (
        layer("Reduction", "reduction_param", "operation: MEAN axis: -1 coeff: 3"),
        [X4],
        lambda x: 3 * x.mean(-1),
    ),
    "a sum of magnitudes behind two axes": (
        layer("Reduction", "reduction_param", "operation: ASUM axis: 2"),
        [APART],
        lambda x: np.abs(x).sum((2, 3)),
    ),
    "scales of two axes": (
        layer("Scale", "scale_param", f"axis: 1 num_axes: 2 bias_term: true filler {RANDOM} bias_filler {RANDOM}"),
        [X4],
        lambda x, a, b: x * a[..., None] + b[..., None],
    ),
    "scales of the last axis": (
        layer("Scale", "scale_param", "axis: -1 filler { type: 'gaussian' }"),
        [X4],
        lambda x, a: x * a,
    ),
    "one scale for everything": (
        layer("Scale", "scale_param", "num_axes: 0 bias_term: true filler { type: 'gaussian' }"),
        [X3],
        lambda x, a, b: x * a + b,
    ),
    "a scale for each sample from a bottom": (
        layer("Scale", "scale_param", "axis: 0"),
        [X4, gaussian((2,), 3)],
        lambda x, a: x * a[:, None, None, None],
    ),
    "a scale without axes from a bottom": (
        layer("Scale", "scale_param", "axis: 0 bias_term: true"),
        [X3, gaussian((), 3)],
        lambda x, a, b: x * a + b,
    ),
    "a bias of the last two axes": (
        layer("Bias", "bias_param", "axis: -2 num_axes: -1 filler { type: 'gaussian' }"),
        [X4],
        lambda x, b: x + b,
    ),
    "one bias for everything": (
        layer("Bias", "bias_param", "num_axes: 0 filler { type: 'gaussian' }"),
        [X3],
        lambda x, b: x + b,
    ),
    "a cut from behind": (
        layer("Crop", "crop_param", "axis: -1 offset: 2"),
        [X4, X4[..., :3]],
        lambda x, like: x[..., 2:5] + 0 * like,
        {"learned": []},
    ),
    "cuts with an offset each": (
        layer("Crop", "crop_param", "axis: 1 offset: 1 offset: 0 offset: 2"),
        [X4, X4[:, :2, :3, :4]],
        lambda x, like: x[:, 1:3, :3, 2:6] + 0 * like,
    ),
    "tiles of the batch": (layer("Tile", "tile_param", "axis: 0 tiles: 3"), [X3], lambda x: np.tile(x, (3, 1, 1))),
    "tiles of the last axis": (layer("Tile", "tile_param", "axis: -1 tiles: 2"), [X3], lambda x: np.tile(x, 2)),
    "softmax over the batch": (layer("Softmax", "softmax_param", "axis: 0"), [X3], along(scipy.special.softmax, 0)),
    "softmax from behind": (layer("Softmax", "softmax_param", "axis: -2"), [X4], along(scipy.special.softmax, -2)),
    "a root": (
        layer("Power", "power_param", "power: 0.5 scale: 2 shift: 1"),
        [POSITIVE],
        lambda x: np.sqrt(2 * x + 1),
    ),
    "an inverse": (layer("Power", "power_param", "power: -2 shift: 0.5"), [POSITIVE], lambda x: (x + 0.5) ** -2.0),
    "a power of zero": (layer("Power", "power_param", "power: 0 scale: 3"), [X3], lambda x: np.ones_like(x)),
    "a scale of zero": (layer("Power", "power_param", "power: 3 scale: 0 shift: 2"), [X3], lambda x: 8 + 0 * x),
    "an exponential of base 2": (
        layer("Exp", "exp_param", "base: 2 scale: 0.5 shift: -1"),
        [X3],
        lambda x: 2 ** (0.5 * x - 1),
    ),
    "a logarithm of base 10": (
        layer("Log", "log_param", "base: 10 scale: 2 shift: 0.3"),
        [POSITIVE],
        lambda x: np.log10(2 * x + 0.3),
    ),
    "a leak": (layer("ReLU", "relu_param", "negative_slope: -0.2"), [APART], lambda x: np.where(x > 0, x, -0.2 * x)),
    "a slope of elu": (
        layer("ELU", "elu_param", "alpha: 0.3"),
        [APART],
        lambda x: np.where(x > 0, x, 0.3 * np.expm1(x)),
    ),
    "windows of squares": (
        layer("LRN", "lrn_param", "norm_region: WITHIN_CHANNEL local_size: 5 alpha: 2 beta: 0.5"),
        [X4],
        lambda x: x * (1 + 2 * pooled("AVE", (5, 5), (1, 1), (2, 2))(x**2)) ** -0.5,
    ),
    "stored statistics in training": (
        layer("BatchNorm", "batch_norm_param", "use_global_stats: true eps: 0.1"),
        [X3],
        lambda x, m, v, n: (x - (m / n)[:, None]) / np.sqrt((v / n)[:, None] + 0.1),
        {"params": [gaussian((3,), 5), np.abs(gaussian((3,), 6)), np.array([2.5], "f")], "learned": []},
    ),
    "samples again and in another order": (
        layer("BatchReindex"),
        [X3, np.array([1, 1, 0, 1], np.float32)],
        lambda x, i: x[i.astype(int)],
    ),
}
IN_PLACE = ("one slope for all channels", "softmax over the batch", "a leak", "one scale for everything", "a root")


@pytest.mark.parametrize("name", CASES)
def test_against_a_plain_computation(name: str) -> None:
    text, inputs, reference, *more = CASES[name]
    check_layer(text, inputs, reference, in_place=name in IN_PLACE, **(more[0] if more else {}))

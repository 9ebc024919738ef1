"""Im2col, Interp, Upsample, SPP and depthwise convolutions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from layer_harness import BACKENDS, TEST, Runner, assert_near, check_layer, gaussian, spread

from caffepy.errors import ConfigError, DataError, ShapeError


def im2col(x, axis, kernel, stride, pad, dilation):
    """The definition, window by window."""
    lead, channels, image = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    x = np.pad(x.reshape(-1, channels, *image), [(0, 0), (0, 0), *((p, p + 99) for p in pad)])
    spans = [n + 2 * p - (d * (k - 1) + 1) for n, p, d, k in zip(image, pad, dilation, kernel, strict=True)]
    sizes = [int(span / s) + 1 for span, s in zip(spans, stride, strict=True)]
    out = np.zeros((len(x), channels, math.prod(kernel), *sizes))
    for k, element in enumerate(np.ndindex(*kernel)):
        for window in np.ndindex(*sizes):
            at = tuple(w * s + e * d for w, s, e, d in zip(window, stride, element, dilation, strict=True))
            out[(slice(None), slice(None), k, *window)] = x[(slice(None), slice(None), *at)]
    return out.reshape(*lead, -1, *sizes)


@pytest.mark.parametrize(
    ("shape", "axis", "fields", "numbers"),
    [
        ((2, 3, 5, 6), 1, "kernel_size: 3 stride: 2 pad: 1", ((3, 3), (2, 2), (1, 1), (1, 1))),
        ((2, 2, 7, 6), 1, "kernel_size: 3 dilation: 2", ((3, 3), (1, 1), (0, 0), (2, 2))),
        ((1, 2, 5, 6), 1, "kernel_h: 2 kernel_w: 3 stride_h: 1 stride_w: 2 pad_h: 1 pad_w: 0",
         ((2, 3), (1, 2), (1, 0), (1, 1))),
        ((2, 3, 8), 1, "kernel_size: 3 stride: 2 pad: 1 dilation: 2", ((3,), (2,), (1,), (2,))),
        ((2, 2, 4, 3, 4), 1, "kernel_size: 2 kernel_size: 1 kernel_size: 3 pad: 1",
         ((2, 1, 3), (1,) * 3, (1,) * 3, (1,) * 3)),
        ((2, 3, 4, 5), 2, "axis: 2 kernel_size: 2", ((2,), (1,), (0,), (1,))),
        ((2, 2, 3, 4, 5), -3, "axis: -3 kernel_size: 2 stride: 2", ((2, 2), (2, 2), (0, 0), (1, 1))),
        ((2, 2, 3, 3), 1, "kernel_size: 4 stride: 3 force_nd_im2col: true", ((4, 4), (3, 3), (0, 0), (1, 1))),
    ],
)  # fmt: skip
def test_im2col(shape, axis, fields, numbers):
    text = f"type: 'Im2col' convolution_param {{ {fields} }}"
    check_layer(text, [gaussian(shape)], lambda x: im2col(x, axis % len(shape), *numbers))


def test_im2col_refuses():
    with pytest.raises(ShapeError, match="spatial axes after axis 3"):
        Runner("type: 'Im2col' convolution_param { axis: 3 kernel_size: 2 }", [gaussian((2, 3, 4, 5))])
    with pytest.raises(ConfigError, match="kernel_size is given 0 times"):
        Runner("type: 'Im2col'", [gaussian((2, 3, 4, 5))])
    with pytest.raises(ShapeError, match="a smaller kernel or more padding"):
        Runner("type: 'Im2col' convolution_param { kernel_size: 9 }", [gaussian((2, 3, 4, 5))])


def interp(x, height, width, begin=0, end=0):
    """Bilinear, corners to corners."""
    x = x[:, :, -begin : x.shape[2] + end, -begin : x.shape[3] + end]

    def along(x, size, axis):
        old = x.shape[axis]
        at = np.arange(size) * ((old - 1) / (size - 1) if size > 1 else 0)
        low = np.minimum(at.astype(int), old - 1)
        high = np.minimum(low + 1, old - 1)
        share = (at - low).reshape([-1 if a == axis else 1 for a in range(4)])
        return np.take(x, low, axis) * (1 - share) + np.take(x, high, axis) * share

    return along(along(x, height, 2), width, 3)


@pytest.mark.parametrize(
    ("fields", "size", "pads"),
    [
        ("height: 9 width: 11", (9, 11), (0, 0)),
        ("height: 3 width: 4", (3, 4), (0, 0)),
        ("height: 5 width: 7", (5, 7), (0, 0)),
        ("height: 1 width: 13", (1, 13), (0, 0)),
        ("zoom_factor: 3", (13, 19), (0, 0)),
        ("shrink_factor: 2", (3, 4), (0, 0)),
        ("shrink_factor: 2 zoom_factor: 3", (7, 10), (0, 0)),
        ("zoom_factor: 2 pad_beg: -1 pad_end: -2", (3, 7), (-1, -2)),
    ],
)
def test_interp(fields, size, pads):
    text = f"type: 'Interp' interp_param {{ {fields} }}"
    check_layer(text, [gaussian((2, 3, 5, 7))], lambda x: interp(x, *size, *pads))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("", "give interp_param either height and width, or zoom_factor"),
        ("height: 3", "height and width of interp_param are needed together"),
        ("height: 3 width: 3 zoom_factor: 2", "give interp_param either height and width, or zoom_factor"),
        ("zoom_factor: 2 pad_end: 1", "may not be above 0"),
        ("zoom_factor: 0", "must be at least 1"),
    ],
)
def test_interp_refuses(fields, message):
    with pytest.raises(ConfigError, match=message):
        Runner(f"type: 'Interp' interp_param {{ {fields} }}", [gaussian((2, 3, 5, 7))])


@pytest.mark.parametrize(("fields", "factors"), [("scale: 2", (2, 2)), ("scale_h: 1 scale_w: 3", (1, 3)), ("", (1, 1))])
def test_upsample_repeats(fields, factors):
    check_layer(
        f"type: 'Upsample' upsample_param {{ {fields} }}", [gaussian((2, 3, 3, 4))],
        lambda x: x.repeat(factors[0], 2).repeat(factors[1], 3),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "size"),
    [("", (6, 8)), ("scale: 3", (9, 12)), ("scale: 2 pad_out_h: true pad_out_w: true", (5, 7)),
     ("scale_h: 2 scale_w: 3", (6, 12)), ("upsample_h: 7 upsample_w: 5", (7, 5)),
     ("scale: 2 upsample_h: 7 upsample_w: 5", (7, 5))],
)  # fmt: skip
def test_upsample_puts_back(fields, size):
    mask = np.stack([np.random.default_rng(i).permutation(size[0] * size[1])[:12] for i in range(6)])
    mask = mask.reshape(2, 3, 3, 4).astype(np.float32)

    def reference(x, mask):
        planes = np.zeros((2, 3, size[0] * size[1]))
        np.put_along_axis(planes, mask.reshape(2, 3, -1).astype(int), x.reshape(2, 3, -1), 2)
        return planes.reshape(2, 3, *size)

    check_layer(f"type: 'Upsample' upsample_param {{ {fields} }}", [gaussian((2, 3, 3, 4)), mask], reference)


@pytest.mark.parametrize("backend", BACKENDS)
def test_upsample_finds_masks_of_other_images(backend):
    mask = np.full((1, 1, 2, 2), 16, np.float32)
    runner = Runner("type: 'Upsample'", [gaussian((1, 1, 2, 2)), mask], backend)
    runner.forward()
    with pytest.raises(DataError, match="of the mask 'b' is outside of the top"):
        runner.layer.raise_device_errors()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("scale: 2 scale_h: 2 scale_w: 2", "has both scale and scale_h"),
        ("scale_h: 2", "scale_h and scale_w of upsample_param are needed together"),
        ("scale: 2 pad_out_h: true", "need a mask"),
        ("scale: 0", "must be at least 1"),
    ],
)
def test_upsample_refuses(fields, message):
    with pytest.raises(ConfigError, match=message):
        Runner(f"type: 'Upsample' upsample_param {{ {fields} }}", [gaussian((2, 3, 3, 4))])


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


@pytest.mark.parametrize("kind", ["DepthwiseConvolution", "ConvolutionDepthwise"])
def test_depthwise(kind):
    fields = "kernel_size: 3 pad: 1 stride: 2" + (" num_output: 6 group: 6" if kind == "DepthwiseConvolution" else "")
    x, weights, bias = gaussian((2, 6, 7, 5)), gaussian((6, 1, 3, 3), 1), gaussian((6,), 2)
    plain = Runner(
        "type: 'Convolution' convolution_param { num_output: 6 group: 6 kernel_size: 3 pad: 1 stride: 2 }", [x],
        params=[weights, bias],
    ).forward()[0]  # fmt: skip
    text = f"type: '{kind}' convolution_param {{ {fields} }}"
    for backend in BACKENDS:
        runner = Runner(text, [x], backend, params=[weights, bias])
        assert_near(runner.forward()[0], plain, 2e-5, kind)
    check_layer(text, [x], params=[weights, bias], step=0.05)


def test_depthwise_refuses():
    with pytest.raises(
        ShapeError, match="num_output is 12; a depthwise convolution has as many outputs as channels, 6"
    ):
        Runner(
            "type: 'ConvolutionDepthwise' convolution_param { num_output: 12 kernel_size: 3 }", [gaussian((2, 6, 7, 5))]
        )


def test_interp_to_the_size_of_another_blob():
    like = gaussian((1, 4, 9, 3))
    for field in ("", "interp_param { use_blob_size: true }"):
        check_layer(f"type: 'Interp' {field}", [gaussian((2, 3, 5, 7)), like], lambda x, _: interp(x, 9, 3))
    with pytest.raises(ConfigError, match="use_blob_size of interp_param needs a second bottom"):
        Runner("type: 'Interp' interp_param { use_blob_size: true }", [like])
    with pytest.raises(ConfigError, match="and so does the second bottom; keep one of them"):
        Runner("type: 'Interp' interp_param { zoom_factor: 2 }", [like, like])
    with pytest.raises(ShapeError, match="the second bottom must have four axes"):
        Runner("type: 'Interp'", [like, gaussian((2, 3))])

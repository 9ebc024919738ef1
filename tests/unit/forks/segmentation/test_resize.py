"""Interp, Upsample and Unpooling."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import BACKENDS, Runner, check_layer, gaussian

from caffepy.errors import ConfigError, DataError, ShapeError


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
        f"type: 'Upsample' upsample_param {{ {fields} }}",
        [gaussian((2, 3, 3, 4))],
        lambda x: x.repeat(factors[0], 2).repeat(factors[1], 3),
    )


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ("", (6, 8)),
        ("scale: 3", (9, 12)),
        ("scale: 2 pad_out_h: true pad_out_w: true", (5, 7)),
        ("scale_h: 2 scale_w: 3", (6, 12)),
        ("upsample_h: 7 upsample_w: 5", (7, 5)),
        ("scale: 2 upsample_h: 7 upsample_w: 5", (7, 5)),
    ],
)
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


def unpooled(x, method, kernel, stride, size):
    """Each pixel's window by a loop."""
    y = np.zeros((*x.shape[:2], *size), x.dtype)
    for row, column in np.ndindex(*x.shape[2:]):
        top, left = row * stride[0], column * stride[1]
        part = y[:, :, top : top + kernel[0], left : left + kernel[1]]
        value = x[:, :, row, column, None, None]
        if method == "MAX":
            part[:, :, :1, :1] += value
        else:
            part += value / (part.shape[2] * part.shape[3] if method == "AVE" else 1)
    return y


@pytest.mark.parametrize("method", ["MAX", "AVE", "TILE"])
@pytest.mark.parametrize(
    ("fields", "kernel", "stride", "size"),
    [
        ("kernel_size: 2 stride: 2 unpool_size: 8", (2, 2), (2, 2), (8, 8)),
        ("kernel_size: 2 stride: 2", (2, 2), (2, 2), (7, 9)),
        ("kernel_size: 3 stride: 2 unpool_h: 6 unpool_w: 9", (3, 3), (2, 2), (6, 9)),
        ("kernel_h: 1 kernel_w: 3 stride_h: 1 stride_w: 3", (1, 3), (1, 3), (4, 13)),
    ],
)
def test_unpooling_fills_windows(method, fields, kernel, stride, size):
    text = f"type: 'Unpooling' unpooling_param {{ unpool: {method} {fields} }}"
    check_layer(text, [gaussian((2, 3, 3, 4))], lambda x: unpooled(x, method, kernel, stride, size))


def test_unpooling_puts_back_what_a_mask_says():
    x = gaussian((2, 3, 2, 2))
    mask = np.stack([np.random.default_rng(i).permutation(16)[:4] for i in range(6)]).reshape(x.shape)
    text = "type: 'Unpooling' unpooling_param { kernel_size: 2 stride: 2 unpool_size: 4 }"

    def reference(x, mask):
        y = np.zeros((2, 3, 16))
        np.put_along_axis(y, mask.astype(int).reshape(2, 3, 4), x.reshape(2, 3, 4), 2)
        return y.reshape(2, 3, 4, 4)

    check_layer(text, [x, mask.astype(np.float32)], reference)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ("stride: 2", ConfigError, "kernel_size of unpooling_param must be at least 1"),
        ("kernel_size: 2 kernel_h: 2 kernel_w: 2", ConfigError, "either kernel_size, or kernel_h and kernel_w"),
        ("kernel_size: 2 unpool_h: 2", ConfigError, "either unpool_size, or unpool_h and unpool_w"),
        ("kernel_size: 2 pad: 1", ConfigError, "pad of unpooling_param must be 0"),
        ("kernel_size: 2 stride: 2 unpool_size: 4", ShapeError, "too small for the windows"),
    ],
)
def test_unpooling_refuses(fields, error, message):
    with pytest.raises(error, match=message):
        Runner(f"type: 'Unpooling' unpooling_param {{ {fields} }}", [gaussian((1, 1, 3, 3))])
    masked = "type: 'Unpooling' unpooling_param { kernel_size: 2 unpool: AVE }"
    with pytest.raises(ConfigError, match="only unpool: MAX reads a mask"):
        Runner(masked, [gaussian((1, 1, 3, 3))] * 2)

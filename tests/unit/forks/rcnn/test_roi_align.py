"""ROIAlign, PSROIAlign, ROIWarping, MaskPooling, MaskResize and padded ROIPooling against loops over points."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import BACKENDS, Runner, assert_near, check_layer, gaussian, spread

from caffepy.errors import ConfigError, DataError, ShapeError

ROIS = np.array(
    [[0, 0, 0, 31, 23], [1, 4.3, 4, 19, 15.2], [1, 8, 2, 8, 2], [0, 20, 10, 60, 60], [1, 9, 9, 3, 3]], np.float32
)
"""A whole image, a part, one pixel, one that reaches beyond, and one that ends before it begins."""


def sample(plane, h, w):
    """Bilinear interpolation in the plane (C, H, W), written for one point."""
    height, width = plane.shape[1:]
    if h < -0.5 or w < -0.5 or h > height - 0.5 or w > width - 0.5:
        return np.zeros(len(plane))
    h, w = min(max(h, 0), height - 1), min(max(w, 0), width - 1)
    top, left = int(h), int(w)
    below, right = min(top + 1, height - 1), min(left + 1, width - 1)
    a, b = h - top, w - left
    upper = (1 - b) * plane[:, top, left] + b * plane[:, top, right]
    return (1 - a) * upper + a * ((1 - b) * plane[:, below, left] + b * plane[:, below, right])


def aligned(x, rois, high=2, wide=3, scale=0.5, pad=0.25):
    out = np.zeros((len(rois), x.shape[1], high + 1, wide + 1))
    for r, (n, x1, y1, x2, y2) in enumerate(rois.reshape(-1, 5)):
        begin = np.array([y1 - (y2 - y1 + 1) * pad, x1 - (x2 - x1 + 1) * pad]) * scale - 0.5
        end = np.array([y2 + (y2 - y1 + 1) * pad, x2 + (x2 - x1 + 1) * pad]) * scale - 0.5
        for i, j in np.ndindex(high + 1, wide + 1) if (end > begin).all() else ():
            h, w = begin + (end - begin) * np.array([i / high, j / wide])
            out[r, :, i, j] = sample(x[int(n)], h, w)
    return out


@pytest.mark.parametrize("tail", [(), (1, 1)])
def test_roi_align(tail):
    check_layer(
        "type: 'ROIAlign' roi_pooling_param { pooled_h: 2 pooled_w: 3 spatial_scale: 0.5 pad_ratio: 0.25 }",
        [gaussian((2, 3, 12, 16)), ROIS.reshape(*ROIS.shape, *tail)],
        aligned,
    )


def test_roi_align_without_padding_drops_regions_of_one_pixel():
    top = Runner("type: 'ROIAlign' roi_pooling_param { pooled_h: 2 pooled_w: 2 }", [gaussian((2, 3, 40, 40)), ROIS])
    values = top.forward()[0]
    assert values.shape == (5, 3, 3, 3) and values[1].all() and not values[2].any() and not values[4].any()


def parts(x, rois, outputs=2, group=2, samples=3, scale=0.5):
    out = np.zeros((len(rois), outputs, group, group))
    height, width = x.shape[2:]
    for r, (n, x1, y1, x2, y2) in enumerate(rois):
        for d, i, j in np.ndindex(outputs, group, group):
            plane = x[int(n), (d * group + i) * group + j][None]
            axes = []
            for first, last, number, size in ((y1, y2, i, height), (x1, x2, j, width)):
                length = max((last + 1) * scale - first * scale, 0.1) / group
                begin, end = (np.clip((number + k) * length + first * scale, 0, size - 1) for k in (0, 1))
                places = begin + np.arange(1, samples + 1) * length / (samples + 1)
                axes.append([p for p in places if p < end])
            out[r, d, i, j] = sum(sample(plane, h, w)[0] for h in axes[0] for w in axes[1]) / samples**2
    return out


def test_psroi_align():
    text = "type: 'PSROIAlign' psroi_align_param { output_dim: 2 group_size: 2 spatial_scale: 0.5 sample_num: 3 }"
    check_layer(text, [gaussian((2, 8, 12, 16)), ROIS], parts)


def warped(x, rois, high=3, wide=2, scale=0.5):
    out = np.zeros((len(rois), x.shape[1], high, wide))
    for r, (n, *corners) in enumerate(rois):
        x1, y1, x2, y2 = np.floor(np.array(corners) * scale + 0.5)
        for i, j in np.ndindex(high, wide):
            out[r, :, i, j] = sample(x[int(n)], y1 + i * max(y2 - y1, 0) / high, x1 + j * max(x2 - x1, 0) / wide)
    return out


WARP = "type: 'ROIWarping' roi_warping_param { pooled_h: 3 pooled_w: 2 spatial_scale: 0.5 }"


@pytest.mark.parametrize("backend", BACKENDS)
def test_roi_warping(backend):
    x = gaussian((2, 3, 12, 16))
    runner = Runner(WARP, [x, ROIS], backend)
    top = runner.forward()[0]
    assert_near(top, warped(x, ROIS), 2e-5, "top")
    dy = gaussian(top.shape, 1)
    dx, _ = runner.backward([dy], [True, True])
    step = gaussian(x.shape, 2)
    slope = (warped(x + 0.01 * step, ROIS) - warped(x - 0.01 * step, ROIS)) / 0.02
    assert abs((dx.astype(float) * step).sum() - (slope * dy).sum()) < 1e-3 * abs(slope * dy).sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_corners_of_warped_regions_have_a_gradient_through_the_rounding(backend):
    """Central differences of the samples at corners that are not rounded; the scale moves them by whole pixels."""
    x, dy = gaussian((2, 3, 12, 16)), gaussian((3, 3, 3, 2), 1)
    rois = np.array([[0, 3, 2, 17, 15], [1, 5, 1, 11, 19], [0, 8, 8, 8, 8]], np.float32)
    runner = Runner(WARP, [x, rois], backend)
    runner.forward()
    found = runner.backward([dy], [False, True])[1]

    def moved(roi, dy_roi, corners):
        x1, y1, x2, y2 = corners
        return sum(
            (sample(x[int(roi[0])], y1 + i * (y2 - y1) / 3, x1 + j * (x2 - x1) / 2) * dy_roi[:, i, j]).sum()
            for i, j in np.ndindex(3, 2)
        )

    for roi, dy_roi, diff in zip(rois[:2], dy[:2], found[:2], strict=True):
        # The slope to the right of each corner: at whole pixels the interpolation has a kink.
        base = np.floor(roi[1:] * 0.5 + 0.5).astype(float)
        for k in range(4):
            step = np.eye(4)[k] * 1e-3
            assert diff[1 + k] == pytest.approx(
                0.5 * (moved(roi, dy_roi, base + step) - moved(roi, dy_roi, base)) / 1e-3, abs=2e-3
            )
    assert not found[:, 0].any()


def test_mask_pooling():
    check_layer("type: 'MaskPooling'", [gaussian((3, 4, 5, 6)), gaussian((3, 1, 5, 6), 1)], lambda x, m: x * m)


@pytest.mark.parametrize("sizes", [(14, 14), (3, 5), (1, 2), (7, 9), (40, 1)])
def test_mask_resize(sizes):
    def resized(x):
        out = np.zeros((*x.shape[:2], *sizes))
        for n, i, j in np.ndindex(len(x), *sizes):
            out[n, :, i, j] = sample(x[n], i * 7 / sizes[0], j * 9 / sizes[1])
        return out

    text = f"type: 'MaskResize' mask_resize_param {{ output_height: {sizes[0]} output_width: {sizes[1]} }}"
    check_layer(text, [gaussian((2, 3, 7, 9))], resized)


def test_padded_roi_pooling():
    """It is the pooling of larger regions."""
    x, p = spread((2, 3, 12, 16)), 0.25
    text = "type: 'ROIPooling' roi_pooling_param { pooled_h: 2 pooled_w: 3 spatial_scale: 0.5 pad_ratio: 0.25 }"
    larger = ROIS.copy()
    for first, last in ((1, 3), (2, 4)):
        pad = (ROIS[:, last] - ROIS[:, first] + 1) * p
        larger[:, first], larger[:, last] = ROIS[:, first] - pad, ROIS[:, last] + pad
    for backend in BACKENDS:
        padded = Runner(text, [x, ROIS.reshape(5, 5, 1, 1)], backend)
        plain = Runner(text.replace("pad_ratio: 0.25", ""), [x, larger], backend)
        tops = [runner.forward()[0] for runner in (padded, plain)]
        assert np.array_equal(*tops)
        diffs = [runner.backward([gaussian(tops[0].shape)], [True, True]) for runner in (padded, plain)]
        assert np.array_equal(diffs[0][0], diffs[1][0]) and not diffs[0][1].any()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("type: 'ROIAlign'", "needs pooled_h and pooled_w"),
        ("type: 'ROIAlign' roi_pooling_param { pooled_h: 2 pooled_w: 2 pad_ratio: -1 }", "pad_ratio is -1"),
        ("type: 'ROIPooling' roi_pooling_param { pooled_h: 2 pooled_w: 2 pad_ratio: -1 }", "pad_ratio is -1"),
        ("type: 'ROIWarping'", "needs pooled_h and pooled_w"),
        ("type: 'PSROIAlign' psroi_align_param { output_dim: 1 group_size: 2 }", "all above 0"),
        ("type: 'PSROIAlign' psroi_align_param { output_dim: 2 group_size: 2 spatial_scale: 1 }", "needs 8 channels"),
        ("type: 'MaskPooling'", "needs images N C H W and masks"),
        ("type: 'MaskResize' mask_resize_param { output_height: 1 }", "output_height and output_width"),
    ],
)
def test_refused(text, message):
    inputs = [gaussian((2, 4, 8, 8))] + ([ROIS] if "MaskResize" not in text else [])
    with pytest.raises((ConfigError, ShapeError), match=message):
        Runner(text, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_regions_of_images_that_are_not_there(backend):
    rois = np.array([[0, 0, 0, 4, 4], [2, 0, 0, 4, 4]], np.float32)
    runner = Runner("type: 'ROIAlign' roi_pooling_param { pooled_h: 2 pooled_w: 2 }", [gaussian((2, 4, 8, 8)), rois])
    assert not runner.forward()[0][1].any()
    with pytest.raises(DataError, match="region 1 of 'b' .* 'a'"):
        runner.layer.raise_device_errors()

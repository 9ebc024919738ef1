"""ROIPooling, PSROIPooling and stochastic pooling (the primitives: tests/support/primitive_checks/indexing.py)."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import BACKENDS, TEST, Runner, assert_near, check_layer, gaussian, spread

from caffepy.errors import ConfigError, DataError, ShapeError

ROIS = np.array([[0, 0, 0, 31, 23], [1, 4, 4, 19, 15], [1, 8, 2, 8, 2], [0, 20, 10, 60, 60]], np.float32)
"""A whole image, a part, one pixel, and one that reaches beyond."""


def region_max(x, rois):
    out = np.zeros((len(rois), x.shape[1], 2, 3))
    for r, (n, *corners) in enumerate(rois):
        w0, h0, w1, h1 = np.floor(np.array(corners) * 0.5 + 0.5).astype(int)
        high, wide = (max(h1 - h0 + 1, 1) / 2, max(w1 - w0 + 1, 1) / 3)
        for i in range(2):
            for j in range(3):
                rows = slice(h0 + int(np.floor(i * high)), h0 + int(np.ceil((i + 1) * high)))
                columns = slice(w0 + int(np.floor(j * wide)), w0 + int(np.ceil((j + 1) * wide)))
                part = x[int(n)][:, rows, columns]
                out[r, :, i, j] = part.max((1, 2)) if part.size else 0
    return out


@pytest.mark.parametrize("tail", [(), (1, 1)])
def test_roi_pooling(tail):
    check_layer(
        "type: 'ROIPooling' roi_pooling_param { pooled_h: 2 pooled_w: 3 spatial_scale: 0.5 }",
        [spread((2, 3, 12, 16)), ROIS.reshape(*ROIS.shape, *tail)],
        lambda x, r: region_max(x, r.reshape(-1, 5)),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_regions_and_masks_get_a_gradient_of_zero(backend):
    """They may come from layers that learn, which Caffe allows."""
    regions = "type: 'ROIPooling' roi_pooling_param { pooled_h: 2 pooled_w: 3 spatial_scale: 0.5 }"
    parts = "type: 'PSROIPooling' psroi_pooling_param { output_dim: 1 group_size: 2 spatial_scale: 0.5 }"
    mask = np.arange(4, dtype=np.float32).reshape(1, 1, 2, 2)
    for text, inputs in (
        (regions, [spread((2, 4, 12, 16)), ROIS]),
        (parts, [spread((2, 4, 12, 16)), ROIS]),
        ("type: 'Upsample'", [spread((1, 1, 2, 2)), mask]),
    ):
        runner = Runner(text, inputs, backend)
        diffs = runner.backward([np.ones_like(top) for top in runner.forward()], [True, True])
        assert diffs[0].any() and not diffs[1].any()


def test_psroi_pooling_has_derivatives():
    text = "type: 'PSROIPooling' psroi_pooling_param { output_dim: 2 group_size: 2 spatial_scale: 0.5 }"
    check_layer(text, [gaussian((2, 8, 12, 16)), ROIS], step=0.1)
    x = np.repeat(np.arange(8, dtype=np.float32), 12 * 16).reshape(1, 8, 12, 16)
    top = Runner(text, [x, ROIS[:1]]).forward()[0]
    # Bin (h, w) of output d takes channel (d * g + h) * g + w.
    assert np.array_equal(top, np.arange(8).reshape(1, 2, 2, 2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_regions_of_images_that_are_not_there(backend):
    rois = np.array([[0, 0, 0, 4, 4], [2, 0, 0, 4, 4]], np.float32)
    one = "type: 'ROIPooling' roi_pooling_param { pooled_h: 2 pooled_w: 2 }"
    other = "type: 'PSROIPooling' psroi_pooling_param { output_dim: 1 group_size: 2 spatial_scale: 1 }"
    for text in (one, other):
        runner = Runner(text, [gaussian((2, 4, 8, 8)), rois], backend)
        assert not runner.forward()[0][1].any()
        with pytest.raises(DataError, match="region 1 of 'b' .* 'a'"):
            runner.layer.raise_device_errors()


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ("type: 'ROIPooling'", (2, 5), "roi_pooling_param needs pooled_h and pooled_w"),
        ("type: 'PSROIPooling' psroi_pooling_param { output_dim: 1 group_size: 2 }", (2, 5), "all above 0"),
        (
            "type: 'PSROIPooling' psroi_pooling_param { output_dim: 2 group_size: 2 spatial_scale: 1 }",
            (2, 5),
            "needs 8 channels, output_dim",
        ),
        ("type: 'ROIPooling' roi_pooling_param { pooled_h: 2 pooled_w: 2 }", (2, 4), "five numbers for each region"),
    ],
)
def test_refused(text, shape, message):
    with pytest.raises((ConfigError, ShapeError), match=message):
        Runner(text, [gaussian((2, 4, 8, 8)), np.zeros(shape, np.float32)])


STOCHASTIC = "type: 'Pooling' pooling_param { pool: STOCHASTIC kernel_size: 3 stride: 2 }"


@pytest.mark.parametrize("backend", BACKENDS)
def test_stochastic_pooling_draws_in_proportion(backend):
    x = np.tile(np.array([[1, 2], [3, 4]], np.float32), (400, 5, 1, 1))
    text = "type: 'Pooling' pooling_param { pool: STOCHASTIC kernel_size: 2 }"
    runner = Runner(text, [x], backend)
    top = runner.forward()[0]
    shares = np.bincount(top.astype(int).reshape(-1), minlength=5)[1:] / top.size
    np.testing.assert_allclose(shares, [0.1, 0.2, 0.3, 0.4], atol=0.04)
    dx = runner.backward([np.full_like(top, 2)])[0]
    assert np.array_equal(dx, np.where(x == top, 2, 0))
    other = Runner(text, [x], backend, pass_number=1).forward()[0]
    assert 0.5 < (other != top).mean() < 0.9
    late = Runner(text, [x[100:]], backend, first_sample=100).forward()[0]
    assert np.array_equal(late, top[100:]), "numbers belong to global samples"


def test_stochastic_pooling_at_test_time():
    x = np.abs(gaussian((2, 3, 6, 7)))

    def reference(x):
        out = np.zeros((2, 3, 3, 3))
        for i in range(3):
            for j in range(3):
                window = x[:, :, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3]
                total = window.sum((2, 3))
                out[:, :, i, j] = (window**2).sum((2, 3)) / np.where(total > 0, total, 1)
        return out

    check_layer(STOCHASTIC, [x], reference, phase=TEST)


def test_stochastic_pooling_is_the_same_on_all_backends():
    x = np.abs(gaussian((3, 5, 7, 8)))
    tops = [Runner(STOCHASTIC, [x], backend).forward()[0] for backend in BACKENDS]
    for other in tops[1:]:
        assert_near(other, tops[0], 0, "drawn elements")
    with pytest.raises(ConfigError, match="pool: STOCHASTIC has no padding; remove pad"):
        Runner(STOCHASTIC.replace("stride: 2", "stride: 2 pad: 1"), [x])

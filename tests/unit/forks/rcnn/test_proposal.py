"""Proposal and BoxAnnotatorOHEM against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_harness import BACKENDS, Runner, assert_near, check_layer, gaussian

from caffepy.errors import ConfigError, DataError, ShapeError

TEXT = """
type: 'Proposal' proposal_param { ratio: 0.5 ratio: 2 scale: 2 scale: 3 base_size: 8 feat_stride: 8 min_size: 6
                                  pre_nms_topn: 60 post_nms_topn: 20 nms_thresh: 0.4 }
"""
RATIOS, SCALES = (0.5, 2.0), (2.0, 3.0)


def inputs(seed=0, anchors=4, size=(5, 7), info=(44, 60, 1.5, 2)):
    rng = np.random.default_rng(seed)
    scores = rng.permutation(2 * anchors * size[0] * size[1]).reshape(1, 2 * anchors, *size) / 1000 + 0.01
    deltas = rng.normal(0, 0.4, (1, 4 * anchors, *size))
    return [np.asarray(a, np.float32) for a in (scores, deltas, np.array([info]))]


def overlap(a, b):
    width, height = min(a[2], b[2]) - max(a[0], b[0]) + 1, min(a[3], b[3]) - max(a[1], b[1]) + 1
    shared = max(width, 0) * max(height, 0)
    return shared / (sum((c[2] - c[0] + 1) * (c[3] - c[1] + 1) for c in (a, b)) - shared)


def proposals(scores, deltas, info, leaves_out=False, limit=20, best=60, threshold=0.4, least=6):
    """(score, box) in the order of the top."""
    height, width, scale_y, scale_x = info[0]
    found = []
    for h, w in np.ndindex(scores.shape[2:]):
        for k, (ratio, scale) in enumerate((r, s) for r in RATIOS for s in SCALES):
            side = math.floor(math.sqrt(64 / ratio) + 0.5)
            wide, high = side * scale, math.floor(side * ratio + 0.5) * scale
            x, y = 3.5 + 8 * w, 3.5 + 8 * h
            dx, dy, dw, dh = deltas[0, 4 * k : 4 * k + 4, h, w].astype(float)
            # The center lies half a pixel further, because the sides count inclusive pixels.
            x, y = x + 0.5 + dx * wide, y + 0.5 + dy * high
            wide, high = wide * math.exp(dw), high * math.exp(dh)
            box = np.array([x - wide / 2, y - high / 2, x + wide / 2, y + high / 2])
            box = np.clip(box, 0, [width - 1, height - 1] * 2)
            large = box[2] - box[0] + 1 >= least * scale_x and box[3] - box[1] + 1 >= least * scale_y
            score = scores[0, 4 + k, h, w]
            if large or not leaves_out:
                found.append((score if large else 0, box))
    found.sort(key=lambda item: -item[0])
    kept = []
    for score, box in found[:best]:
        if len(kept) < limit and all(overlap(box, other) <= threshold for _, other in kept):
            kept.append((score, box))
    return kept


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(4))
def test_proposal(backend, seed):
    values = inputs(seed)
    rois, scores = Runner(TEXT, values, backend, tops=2).forward()
    wanted = proposals(*values)
    assert rois.shape == (len(wanted), 5) and not rois[:, 0].any()
    assert_near(rois[:, 1:], [box for _, box in wanted], 1e-5, "boxes")
    assert_near(scores, [score for score, _ in wanted], 1e-6, "scores")


def test_proposal_of_synopsys():
    """Its fields give 8, 16, 32 times the base's side; small boxes are left out."""
    values = inputs(1, anchors=9, info=(300, 400, 1.5))
    text = "type: 'Proposal' proposal_param { feat_stride: 8 anchor_base_size: 8 rpn_min_size: 60 max_rois: 9 }"
    rois, scores = Runner(text, values, tops=2).forward()
    assert scores.shape == (len(rois), 1) and 0 < len(rois) <= 9
    assert (rois[:, 3:] - rois[:, 1:3] + 1 >= 90).all() and (np.diff(scores[:, 0]) <= 0).all()
    one = "type: 'Proposal' proposal_param { anchor_scale: 1 anchor_ratio: 1 rpn_nms_thresh: 0.5 }"
    few = Runner(one, inputs(2, anchors=1, info=(600, 800, 1)), tops=1).forward()[0]
    assert all(overlap(a[1:], b[1:]) <= 0.5 for i, a in enumerate(few) for b in few[:i])


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), limit=st.integers(1, 8), threshold=st.sampled_from([0.0, 0.3, 0.9]))
def test_kept_boxes_do_not_overlap(seed, limit, threshold):
    text = TEXT.replace("post_nms_topn: 20", f"post_nms_topn: {limit}").replace("0.4", str(threshold))
    rois = Runner(text, inputs(seed)).forward()[0]
    assert len(rois) <= limit
    assert all(overlap(a[1:], b[1:]) <= threshold + 1e-6 for i, a in enumerate(rois) for b in rois[:i])


def test_proposal_gives_no_gradient():
    runner = Runner(TEXT, inputs())
    tops = runner.forward()
    assert not any(diff.any() for diff in runner.backward([np.ones_like(t) for t in tops], [True] * 3))


@pytest.mark.parametrize(
    ("text", "change", "message"),
    [
        ("type: 'Proposal' proposal_param { ratio: 1 }", {}, "needs ratio and scale"),
        (TEXT.replace("ratio: 2", "ratio: -1"), {}, "all above 0"),
        (TEXT.replace("feat_stride: 8", "feat_stride: 0"), {}, "must be at least 1"),
        (TEXT, {0: (1, 6, 5, 7)}, "1 8 H W, for 4 anchors"),
        (TEXT, {0: (2, 8, 5, 7)}, "1 8 H W, for 4 anchors"),
        (TEXT, {1: (1, 16, 5, 6)}, "1 16 H W"),
        (TEXT, {2: (1, 2)}, "height, width and scale"),
    ],
)
def test_proposal_refuses(text, change, message):
    values = inputs()
    for index, shape in change.items():
        values[index] = np.zeros(shape, np.float32)
    with pytest.raises((ConfigError, ShapeError), match=message):
        Runner(text, values)


OHEM = "type: 'BoxAnnotatorOHEM' box_annotator_ohem_param { roi_per_img: 2 ignore_label: 9 }"


@pytest.mark.parametrize("tail", [(), (1, 1), (2, 3)])
def test_box_annotator(tail):
    images = np.array([0, 1, 0, 2, 0, 1, 1, 0], np.float32)
    count = 8 * int(np.prod(tail))
    losses = np.random.default_rng(2).permutation(count).reshape(8, 1, *tail).astype(np.float32)
    rois = gaussian((8, 5, *tail))
    rois[:, 0] = images.reshape(8, *(1,) * len(tail))
    labels, weights = gaussian((8, 1, *tail), 1), gaussian((8, 4, *tail), 2)

    def reference(rois, losses, labels, weights):
        keep = np.zeros(losses.shape, bool)
        for image in range(3):
            mine = np.where(rois[:, :1] == image, losses, -1)
            for place in np.argsort(-mine, axis=None)[:2]:
                keep.flat[place] |= mine.flat[place] >= 0
        four = lambda a: a.reshape(*a.shape, *(1,) * (4 - a.ndim))  # noqa: E731
        return four(np.where(keep, labels, 9)), four(np.where(keep, weights, 0))

    values = [rois, losses, labels, weights]
    check_layer(OHEM, values, reference, tops=2, gradients=False)
    runner = Runner(OHEM, values, tops=2)
    tops = runner.forward()
    assert not any(diff.any() for diff in runner.backward(tops, [True] * 4))


def test_box_annotator_refuses():
    values = [gaussian((8, 5)) ** 2, gaussian((8, 1)), np.zeros(8, np.float32), gaussian((8, 4))]
    with pytest.raises(ConfigError, match="needs roi_per_img"):
        Runner("type: 'BoxAnnotatorOHEM'", values, tops=2)
    with pytest.raises(ShapeError, match="needs regions R 5 H W"):
        Runner(OHEM, [*values[:2], np.zeros(7), values[3]], tops=2)
    with pytest.raises(DataError, match="contains NaN"):
        Runner(OHEM, [values[0], np.full((8, 1), np.nan, np.float32), *values[2:]], tops=2).forward()
    with pytest.raises(DataError, match="an image below 0"):
        Runner(OHEM, [-1 - values[0], *values[1:]], tops=2).forward()

"""ProposalTarget: what it samples, and its targets against the formula."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from layer_harness import BACKENDS
from mscnn_reference import iou, run

from caffepy.errors import ConfigError, DataError, ShapeError
from caffepy.formats.proto import caffe_pb2

OBJECTS = np.array(
    [
        [0, 10, 10, 49, 39, 1, 0, 0],
        [0, 60, 60, 99, 99, 2, 0, 0],
        [0, 200, 200, 219, 219, 1, 1, 0],
        [1, 30, 20, 89, 59, 2, 0, 1],
        [-1, 0, 0, 0, 0, 0, 0, 0],
    ],
    np.float32,
).reshape(-1, 8, 1, 1)
"""Of two images; the third is ignored, the last is padding."""
SETTINGS = ("cls_num: 3", "num_img_per_batch: 2", "img_width: 300", "img_height: 300")


def proposals(count: int = 60, seed: int = 0) -> Any:
    """Half of them near objects."""
    rng = np.random.default_rng(seed)
    rows = np.zeros((count, 5), np.float32)
    rows[:, 0] = rng.integers(0, 2, count)
    rows[:, 1:3] = rng.uniform(0, 200, (count, 2))
    rows[:, 3:] = rows[:, 1:3] + rng.uniform(5, 90, (count, 2))
    for index in range(0, count, 2):
        of = OBJECTS[index // 2 % 4, :, 0, 0]
        rows[index, 0] = of[0]
        rows[index, 1:] = of[1:5] + np.tile(rng.uniform(-1, 1, 2) * (3 if index % 4 else 20), 2)
    return rows.reshape(count, 5, 1, 1)


def sizes(row: Any) -> list[float]:
    x1, y1, x2, y2 = (float(v) for v in row)
    return [x1, y1, x2 - x1 + 1, y2 - y1 + 1]


def best(row: Any, objects: Any) -> tuple[float, int]:
    """The largest overlap of a region with an object of its image, and the object."""
    found = [
        (iou(sizes(row[1:5]), sizes(of[1:5])), index) for index, of in enumerate(objects[:, :, 0, 0]) if of[0] == row[0]
    ]
    return max(found, default=(0.0, -1), key=lambda pair: pair[0])


def sample(fields: str = "", rois: Any = None, objects: Any = OBJECTS, tops: int = 7, **more: Any) -> list[Any]:
    regression = more.pop("regression", "")
    fields += " " + " ".join(one for one in SETTINGS if one.split(" ")[0] not in fields)
    text = f'type: "ProposalTarget" proposal_target_param {{ {fields} }}'
    inputs = [proposals() if rois is None else rois, objects]
    return run(f"{text} {regression}", inputs, tops=tops, **more)


@pytest.mark.parametrize("backend", BACKENDS)
def test_foreground_first_and_then_background(backend: str) -> None:
    """With room for all: each region and object with an overlap from fg_thr or in the background's range, once."""
    found = sample("batch_size: -1 fg_thr: 0.6 bg_thr_hg: 0.4 bg_thr_lw: 0.05", backend=backend)
    rows = found[0][:, :, 0, 0]
    everything = np.concatenate([proposals()[:, :, 0, 0], OBJECTS[:4, :5, 0, 0]])
    foreground, background = [], []
    for row in everything:
        overlap, index = best(row, OBJECTS)
        if overlap >= 0.6 and not OBJECTS[index, 6, 0, 0]:
            foreground.append((row, index, overlap))
        elif 0.05 <= overlap < 0.4:
            background.append(row)
    np.testing.assert_allclose(rows, [row for row, _, _ in foreground] + background, rtol=1e-5)
    labels = [OBJECTS[index, 5, 0, 0] for _, index, _ in foreground] + [0] * len(background)
    assert found[1].ravel().tolist() == labels
    count = len(foreground)
    assert count > 5
    assert len(background) > 5
    objects = found[5][:, :, 0, 0]
    assert not objects[count:].any()
    np.testing.assert_allclose(objects[:count, 5], [overlap for _, _, overlap in foreground], rtol=1e-5)
    np.testing.assert_allclose(objects[:count, 1:5], [OBJECTS[index, 1:5, 0, 0] for _, index, _ in foreground])


def offsets(row: Any, of: Any) -> list[float]:
    (x, y, w, h), (ox, oy, ow, oh) = sizes(row), sizes(of)
    return [(ox + ow / 2 - x - w / 2) / w, (oy + oh / 2 - y - h / 2) / h, math.log(ow / w), math.log(oh / h)]


@pytest.mark.parametrize("aware", [True, False])
def test_targets(aware: bool) -> None:
    mean, std = (0.1, 0.2, 0.3, 0.4), (0.5, 0.6, 0.7, 0.8)
    values = " ".join(f"bbox_mean: {m} bbox_std: {s}" for m, s in zip(mean, std, strict=True))
    regression = f"bbox_reg_param {{ cls_aware: {str(aware).lower()} {values} }}"
    fields = "batch_size: 40 fg_fraction: 0.5 bbox_thr_lw: 0.6 bbox_thr_hg: 0.9"
    found = sample(fields, regression=regression)
    rows, labels, targets, inside, outside, objects, _ = (value.reshape(40, -1) for value in found)
    assert targets.shape == inside.shape == (40, 12 if aware else 8)
    np.testing.assert_array_equal(inside, outside)
    for row, label, target, weight, of in zip(rows, labels[:, 0], targets, inside, objects, strict=True):
        wanted, counted = np.zeros(len(target)), np.zeros(len(target))
        if label:
            place = 4 * int(label) if aware else 4
            wanted[place : place + 4] = (np.array(offsets(row[1:], of[1:5])) - mean) / std
            counted[place : place + 4] = 0.6 <= of[5] <= 0.9
        np.testing.assert_allclose(target, wanted, atol=2e-5)
        np.testing.assert_array_equal(weight, counted)
    assert 0 < inside.sum() < 4 * (labels > 0).sum()


def test_a_batch_has_the_fraction_of_foreground_and_depends_on_the_seed() -> None:
    found = sample("batch_size: 16 fg_fraction: 0.25")
    again, other = sample("batch_size: 16 fg_fraction: 0.25"), sample("batch_size: 16 fg_fraction: 0.25", seed=2)
    assert (found[1].ravel() > 0).tolist() == [True] * 4 + [False] * 12
    for one, two in zip(found, again, strict=True):
        np.testing.assert_array_equal(one, two)
    assert not np.array_equal(found[0], other[0])


def test_regions_that_are_neither_fill_up() -> None:
    limits = "batch_size: 100 fg_thr: 0.9 bg_thr_hg: 0.3 bg_thr_lw: 0.2"
    assert len(sample(f"{limits} pickup_discard: false")[0]) < len(sample(limits)[0])
    assert len(sample(f"{limits} append_gtbox: false")[0]) < len(sample(limits)[0])


def test_without_regions_a_random_one_is_drawn() -> None:
    far = np.array([0, 250, 250, 260, 260], np.float32).reshape(1, 5, 1, 1)
    found = sample("batch_size: 8 append_gtbox: false pickup_discard: false", far)
    assert found[0].shape == (1, 5, 1, 1)
    assert found[1].ravel().tolist() == [0]
    assert best(found[0].ravel(), OBJECTS)[0] < 0.5
    image, x1, y1, x2, y2 = found[0].ravel()
    assert 0 <= x1 < x2 <= 300
    assert 0 <= y1 < y2 <= 300
    assert image in (0, 1)


def test_objects_of_seven_columns_fill_the_batch_with_random_regions() -> None:
    far = np.array([0, 250, 250, 260, 260], np.float32).reshape(1, 5, 1, 1)
    found = sample("batch_size: 30 img_width: 400", far, OBJECTS[:4, :7])
    assert found[0].shape == (30, 5, 1, 1)
    labels = found[1].ravel()
    assert sorted(labels[:3].tolist()) == [1, 2, 2]
    assert not labels[3:].any()
    assert max(best(row, OBJECTS)[0] for row in found[0][3:, :, 0, 0]) < 0.5
    alone = sample("batch_size: 30 num_img_per_batch: 9", far, OBJECTS[:1, :7])
    assert not alone[0][:, 0].any()  # a batch of one image


def test_weights_of_samples() -> None:
    found = sample("batch_size: 16 fg_fraction: 0.25")
    labels, weights = found[1].ravel(), found[6].ravel()
    assert weights[labels > 0].sum() == pytest.approx(4)
    assert weights[labels == 0].sum() == pytest.approx(12)
    weighted = sample("batch_size: 16 fg_fraction: 0.25 iou_weighted: true")[6].ravel()
    overlaps = found[5][:4, 5, 0, 0]
    np.testing.assert_allclose(weighted[:4], 4 * overlaps / overlaps.sum(), rtol=1e-5)


def test_training_draws_other_regions_in_each_pass() -> None:
    first = sample("batch_size: 16", phase=caffe_pb2.TRAIN)
    assert first[0].shape == (16, 5, 1, 1)


@pytest.mark.parametrize(
    ("fields", "objects", "error", "message"),
    [
        ("batch_size: 0", OBJECTS, ConfigError, "batch_size is 0"),
        ("fg_thr: 0.3", OBJECTS, ConfigError, "fg_thr 0.3 is below bg_thr_hg 0.5"),
        ("cls_num: 2", OBJECTS, DataError, "label 2; it must be from 1 to 1"),
        ("num_img_per_batch: 1", OBJECTS, DataError, "is of image 1, but a device's batch has 1"),
        ("", OBJECTS[:, :6], ShapeError, "objects"),
    ],
)
def test_what_does_not_fit(fields: str, objects: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sample(fields, objects=objects)

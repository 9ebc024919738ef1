"""DecodeBBox, ScaleRoute and HardMining against loops over plain numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from layer_harness import BACKENDS, assert_near
from mscnn_reference import run

from caffepy.errors import ConfigError, DataError, ShapeError
from caffepy.formats.proto import caffe_pb2

TRAIN, TEST = caffe_pb2.TRAIN, caffe_pb2.TEST
MEAN, STD = (0.1, -0.1, 0.05, 0.2), (0.1, 0.2, 0.3, 0.4)
REGRESSION = (
    "bbox_reg_param { " + " ".join(f"bbox_mean: {m} bbox_std: {s}" for m, s in zip(MEAN, STD, strict=True)) + " }"
)


def regions(count: int = 9, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    first = rng.uniform(0, 80, (count, 2))
    sides = rng.uniform(4, 60, (count, 2))
    images = np.sort(rng.integers(0, 2, count))
    return np.concatenate([images[:, None], first, first + sides], 1).astype(np.float32).reshape(count, 5, 1, 1)


def moved(region: Any, offsets: Any) -> list[float]:
    """Corners of a region's box, by the formula of the paper with sides that include the last pixel."""
    _, x1, y1, x2, y2 = (float(v) for v in region)
    dx, dy, dw, dh = (float(o) * s + m for o, s, m in zip(offsets, STD, MEAN, strict=True))
    width, height = x2 - x1 + 1, y2 - y1 + 1
    x, y = (x1 + x2) / 2 + dx * width, (y1 + y2) / 2 + dy * height
    width, height = width * math.exp(dw), height * math.exp(dh)
    return [x - (width - 1) / 2, y - (height - 1) / 2, x + (width - 1) / 2, y + (height - 1) / 2]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("phase", [TRAIN, TEST])
def test_regions_are_moved_by_the_objects_offsets(backend: str, phase: int) -> None:
    rois = regions()
    predictions = np.random.default_rng(1).normal(0, 1, (len(rois), 8)).astype(np.float32)
    predictions[2, 6] = -20  # gives a width below 1
    (found,) = run(f'type: "DecodeBBox" {REGRESSION}', [predictions, rois], phase=phase, backend=backend)
    rows = [[r[0, 0, 0], *moved(r[:, 0, 0], p[4:])] for r, p in zip(rois, predictions, strict=True)]
    if phase == TRAIN:
        rows = [row for row in rows if row[1] <= row[3] and row[2] <= row[4]]
        assert len(rows) == len(rois) - 1
    assert_near(found[:, :, 0, 0], rows, 1e-5, "regions")


def test_regions_of_objects_are_dropped_in_training() -> None:
    rois, predictions = regions(), np.zeros((9, 8), np.float32)
    objects = np.zeros((9, 6, 1, 1), np.float32)
    objects[:, 5, 0, 0] = np.linspace(0.55, 0.99, 9)
    for fields, limit in (("", 0.95), ("decode_bbox_param { gt_iou_thr: 0.7 }", 0.7)):
        (found,) = run(f'type: "DecodeBBox" {fields}', [predictions, rois, objects], phase=TRAIN)
        np.testing.assert_allclose(found, rois[objects[:, 5, 0, 0] < limit], rtol=1e-5)
    with pytest.raises(DataError, match="none of the 9 regions"):
        run('type: "DecodeBBox" decode_bbox_param { gt_iou_thr: 0.5 }', [predictions, rois, objects], phase=TRAIN)
    with pytest.raises(ConfigError, match="TRAIN phase only"):
        run('type: "DecodeBBox"', [predictions, rois, objects], phase=TEST)
    with pytest.raises(ShapeError, match=r"\(R, 8\)"):
        run('type: "DecodeBBox"', [predictions[:, :4], rois])
    with pytest.raises(ShapeError, match="9 rows"):
        run('type: "DecodeBBox"', [predictions[:8], rois])


# -- ScaleRoute ----------------------------------------------------------------------------------------


def squares(*sides: float) -> Any:
    rows = [[0, 0, 0, side - 1, side - 1] for side in sides]
    return np.array(rows, np.float32).reshape(-1, 5, 1, 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ("", [0, 1, 2, 3]),
        ("low_scale: 64", [1, 2, 3]),
        ("high_scale: 64", [0]),
        ("low_scale: 64 high_scale: 300", [1, 2]),
        ("low_scale: 70 high_scale: 100", [1]),  # none; 64 is nearest to 83.7
        ("low_scale: 1000", [3]),
        ("high_scale: 10", [0]),
    ],
)
def test_rows_of_the_scales(backend: str, fields: str, wanted: list[int]) -> None:
    rois = squares(32, 64, 256, 500)
    other = np.arange(8, dtype=np.float32).reshape(4, 2)
    found = run(f'type: "ScaleRoute" scale_route_param {{ {fields} }}', [rois, other], tops=2, backend=backend)
    np.testing.assert_array_equal(found[0], rois[wanted])
    np.testing.assert_array_equal(found[1], other[wanted])


def test_scales_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="the lower one first"):
        run('type: "ScaleRoute" scale_route_param { low_scale: 3 high_scale: 2 }', [squares(3)])
    with pytest.raises(DataError, match="a width and a height above 0"):
        run('type: "ScaleRoute" scale_route_param { low_scale: 3 }', [squares(-3)])
    with pytest.raises(ShapeError, match="2 rows"):
        run('type: "ScaleRoute"', [squares(3, 4), np.zeros((3, 1), np.float32)], tops=2)


# -- HardMining ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ("num_roi_per_image: 2", [0, 3, 4, 6]),
        ("num_roi_per_image: 3", [0, 2, 3, 4, 5, 6]),
        ("num_roi_per_image: 9", [0, 1, 2, 3, 4, 5, 6]),
        ("num_roi_per_image: 2 num_image: 3", [0, 2, 3, 4, 5, 6]),
    ],
)
def test_rows_of_the_highest_losses(backend: str, fields: str, wanted: list[int]) -> None:
    """Images 0, 0, 0, 0, 1, 1, 1; of equal losses the last comes first."""
    losses = np.array([5, 1, 2, 7, 3, 1, 3], np.float32).reshape(-1, 1, 1, 1)
    rois = np.zeros((7, 5, 1, 1), np.float32)
    rois[4:, 0] = 1
    rois[:, 1, 0, 0] = np.arange(7)
    labels = np.arange(7, dtype=np.float32)
    fields = fields if "num_image" in fields else f"{fields} num_image: 2"
    text = f'type: "HardMining" hard_mining_param {{ {fields} }}'
    found = run(text, [losses, rois, labels], tops=2, backend=backend)
    assert found[1].tolist() == wanted
    np.testing.assert_array_equal(found[0], rois[wanted])


def test_hard_mining_refuses_what_does_not_fit() -> None:
    losses, rois = np.zeros(2, np.float32), np.array([[0, 0, 0, 1, 1], [4, 0, 0, 1, 1]], np.float32)
    with pytest.raises(DataError, match=r"region 1 of 'b1' is of image 4, but num_image is 4"):
        run('type: "HardMining"', [losses, rois])
    with pytest.raises(ConfigError, match="at least 1"):
        run('type: "HardMining" hard_mining_param { num_image: 0 }', [losses, rois])
    with pytest.raises(ConfigError, match="2 bottoms and 2 tops"):
        run('type: "HardMining"', [losses, rois], tops=2)
    with pytest.raises(ShapeError, match="one loss for each region"):
        run('type: "HardMining"', [np.zeros((2, 2), np.float32), rois])

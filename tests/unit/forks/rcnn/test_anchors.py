"""DetectionAccuracy, DetectionGroupAccuracy and BboxAccuracy against loops over plain numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from layer_harness import BACKENDS, assert_near
from mscnn_reference import decoded, iou, run

from caffepy.errors import ConfigError, DataError, ShapeError

ROWS, COLUMNS, CLASSES = 4, 6, 3
MEAN, STD = (0.1, -0.1, 0.05, 0.2), (0.1, 0.2, 0.3, 0.4)
REGRESSION = (
    "bbox_reg_param { " + " ".join(f"bbox_mean: {m} bbox_std: {s}" for m, s in zip(MEAN, STD, strict=True)) + " }"
)


def inputs(count: int, seed: int = 0, objects: int = CLASSES) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    label = np.zeros((count, 6, ROWS, COLUMNS), np.float32)
    label[:, 0] = rng.integers(1, objects, label[:, 0].shape) * (rng.random(label[:, 0].shape) < 0.4)
    label[:, 1] = (np.arange(COLUMNS) + 0.5) * 8 + rng.uniform(-4, 4, label[:, 0].shape)
    label[:, 2] = (np.arange(ROWS) + 0.5)[:, None] * 8 + rng.uniform(-4, 4, label[:, 0].shape)
    label[:, 3:5] = rng.uniform(15, 30, label[:, 3:5].shape)
    label[:, 5] = rng.uniform(0, 1, label[:, 0].shape)
    value = rng.normal(0, 1, (count, CLASSES + 4, ROWS, COLUMNS)).astype(np.float32)
    value[:, CLASSES:] *= 0.3
    return value, label


def wanted(
    value: Any,
    label: Any,
    fields: list[Any],
    least: float,
    *,
    limits: tuple[float, float] = (4, 2),
    top_k: int = 1,
    threshold: float = 0.5,
    mean: Any = (0,) * 4,
    std: Any = (1,) * 4,
    ignored: int = -1,
    one: bool = False,
) -> list[float]:
    hits, overlaps = {True: [], False: []}, []  # type: ignore[var-annotated]
    for image, row, column in np.ndindex(len(value), ROWS, COLUMNS):
        classes, at = value.shape[1] - 4, (row, column)
        v, truth = value[image, :, row, column], label[image, :, row, column]
        number = min(int(truth[0]), 1) if one else int(truth[0])
        if number == ignored:
            continue
        if number or truth[5] < threshold:
            better = sum(v[k] > v[number] for k in range(classes))
            hits[number != 0].append(better < top_k)
        if number:
            box = decoded(v[classes:], at, fields[image % len(fields)], 8, limits, mean, std)
            x, y, w, h = (float(t) for t in truth[1:5])
            overlaps.append(iou(box, [x - w / 2, y - h / 2, w, h], least))
    everything = hits[True] + hits[False]
    return [np.mean(everything), np.mean(hits[True]), np.mean(overlaps)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("fields", "more", "arguments"),
    [
        ("", "", {}),
        ("top_k: 2", "", {"top_k": 2}),
        ("bg_threshold: 0.2", "", {"threshold": 0.2}),
        ("field_whr: 1.2 field_xyr: 9 coord_num: 4", "", {"limits": (9, 1.2)}),
        ("", REGRESSION, {"mean": MEAN, "std": STD}),
        ("", "loss_param { ignore_label: 2 }", {"ignored": 2}),
    ],
)
def test_accuracy(backend: str, fields: str, more: str, arguments: Any) -> None:
    value, label = inputs(2)
    base = f"cls_num: {CLASSES} field_w: 24 field_h: 20 downsample_rate: 8 {fields}"
    text = f'type: "DetectionAccuracy" detection_accuracy_param {{ {base} }} {more}'
    found = run(text, [value, label], tops=2, backend=backend)
    assert [one.shape for one in found] == [(1, 1, 1, 2), (1, 1, 1, 1)]
    rows = np.concatenate([one.ravel() for one in found])
    assert_near(rows, wanted(value, label, [(24, 20)], 0, **arguments), 1e-5, "accuracies")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("fields", "more", "arguments"),
    [
        ("", "", {}),
        ("bg_threshold: 0.2", "", {"threshold": 0.2}),
        ("field_whr: 1.2 field_xyr: 9", "", {"limits": (9, 1.2)}),
        ("", REGRESSION, {"mean": MEAN, "std": STD}),
    ],
)
def test_group_accuracy(backend: str, fields: str, more: str, arguments: Any) -> None:
    value, label = inputs(4)
    base = f"cls_num: {CLASSES} field_w: 24 field_w: 16 field_h: 20 field_h: 30 stride: 8 {fields}"
    text = f'type: "DetectionGroupAccuracy" detection_group_accuracy_param {{ {base} }} {more}'
    found = run(text, [value[:, :CLASSES], value[:, CLASSES:], label], tops=2, backend=backend)
    rows = np.concatenate([one.ravel() for one in found])
    assert_near(rows, wanted(value, label, [(24, 20), (16, 30)], 1, **arguments), 1e-5, "accuracies")


def test_objectness() -> None:
    """All objects are class 1: their labels may exceed the scores' classes."""
    value, label = inputs(2, objects=9)
    value = np.delete(value, 2, 1)
    base = "cls_num: 2 field_w: 24 field_h: 20 objectness: true"
    rows = wanted(value, label, [(24, 20)], 0, one=True)
    found = run(
        f'type: "DetectionAccuracy" detection_accuracy_param {{ {base} downsample_rate: 8 }}', [value, label], 2
    )
    assert_near(np.concatenate([one.ravel() for one in found]), rows, 1e-5, "accuracies")
    text = f'type: "DetectionGroupAccuracy" detection_group_accuracy_param {{ {base} stride: 8 }}'
    found = run(text, [value[:, :2], value[:, 2:], label], 2)
    assert_near(found[0].ravel(), rows[:2], 1e-5, "accuracies")


def test_nothing_to_count_and_what_does_not_fit() -> None:
    value, label = inputs(2)
    text = (
        'type: "DetectionAccuracy" detection_accuracy_param { cls_num: 3 field_w: 24 field_h: 20 downsample_rate: 8 }'
    )
    label[:, 0], label[:, 5] = 0, 1
    assert [one.ravel().tolist() for one in run(text, [value, label], 2)] == [[-1, -1], [-1]]
    with pytest.raises(ConfigError, match="top_k 4"):
        run(text.replace("cls_num", "top_k: 4 cls_num"), [value, label])
    with pytest.raises(ShapeError, match=r"maps \(N, 7"):
        run(text, [value[:, 1:], label])


# -- BboxAccuracy --------------------------------------------------------------------------------------


def accuracy_of(predictions: Any, regions: Any, objects: Any, aware: bool, least: float) -> list[float]:
    after, before = [], []
    for p, region, of in zip(predictions, regions, objects, strict=True):
        if of[0] < 1 or of[5] > 0.975:
            continue
        x, y, w, h = region[1], region[2], region[3] - region[1] + 1, region[4] - region[2] + 1
        place = 4 * int(of[0]) if aware else 4
        dx, dy, dw, dh = (float(o) * s + m for o, s, m in zip(p[place : place + 4], STD, MEAN, strict=True))
        width, height = w * math.exp(dw), h * math.exp(dh)
        box = [x + w / 2 + dx * w - width / 2, y + h / 2 + dy * h - height / 2, width, height]
        truth = [of[1], of[2], of[3] - of[1] + 1, of[4] - of[2] + 1]
        after.append(iou(box, truth, least))
        before.append(iou([x, y, w, h], truth, least))
    return [np.mean(after), np.mean(before)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("aware", [True, False])
def test_bbox_accuracy(backend: str, aware: bool) -> None:
    rng = np.random.default_rng(0)
    regions = np.zeros((20, 5), np.float32)
    regions[:, 1:3] = rng.uniform(0, 50, (20, 2))
    regions[:, 3:] = regions[:, 1:3] + rng.uniform(10, 40, (20, 2))
    objects = np.zeros((20, 6), np.float32)
    objects[:, 0] = rng.integers(0, 3, 20)
    objects[:, 1:5] = regions[:, 1:] + rng.uniform(-5, 5, (20, 4))
    objects[:, 5] = np.where(rng.random(20) < 0.2, 0.98, 0.7)
    predictions = rng.normal(0, 0.5, (20, 12 if aware else 8)).astype(np.float32)
    regression = REGRESSION.replace("{", f"{{ cls_aware: {str(aware).lower()}", 1)
    found = run(f'type: "BboxAccuracy" {regression}', [predictions, regions, objects], 2, backend=backend)
    rows = accuracy_of(predictions, regions, objects, aware, 0 if aware else 1)
    assert_near([one.item() for one in found], rows, 1e-5, "overlaps")
    objects[:, 0] = 0
    found = run(f'type: "BboxAccuracy" {regression}', [predictions, regions, objects], 2, backend=backend)
    assert [one.item() for one in found] == [-1, -1]


def test_bbox_accuracy_refuses_what_does_not_fit() -> None:
    regions, objects = np.ones((2, 5), np.float32), np.ones((2, 6), np.float32)
    objects[1, :] = [3, 0, 0, 1, 1, 0.5]
    with pytest.raises(DataError, match="has the class 3"):
        run('type: "BboxAccuracy"', [np.zeros((2, 8), np.float32), regions, objects])
    with pytest.raises(ShapeError, match="needs predictions"):
        run(
            'type: "BboxAccuracy" bbox_reg_param { cls_aware: false }',
            [np.zeros((2, 12), np.float32), regions, objects],
        )

"""FrcnnOutput and DetectionEvaluate with its three bottoms, against loops over plain numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layer_harness import BACKENDS, assert_near
from mscnn_reference import iou, run

from caffepy.errors import ConfigError, DataError, ShapeError

REGIONS, CLASSES = 25, 3
SIZE = np.array([90, 120], np.float32).reshape(1, 2, 1, 1)


def inputs(aware: bool = True, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    regions = np.zeros((REGIONS, 5), np.float32)
    regions[:, 1:3] = rng.uniform(0, 60, (REGIONS, 2))
    regions[:, 3:] = regions[:, 1:3] + rng.uniform(20, 50, (REGIONS, 2))
    scores = rng.dirichlet((1,) * CLASSES, REGIONS).astype(np.float32)
    offsets = rng.normal(0, 0.2, (REGIONS, 4 * CLASSES if aware else 8)).astype(np.float32)
    return [scores, offsets, regions.reshape(REGIONS, 5, 1, 1), SIZE]


def corners(region: Any, offsets: Any) -> list[float]:
    x1, y1, x2, y2 = (float(v) for v in region)
    dx, dy, dw, dh = (float(v) for v in offsets)
    width, height = x2 - x1 + 1, y2 - y1 + 1
    x, y = (x1 + x2) / 2 + dx * width, (y1 + y2) / 2 + dy * height
    width, height = width * math.exp(dw), height * math.exp(dh)
    box = [x - (width - 1) / 2, y - (height - 1) / 2, x + (width - 1) / 2, y + (height - 1) / 2]
    return [max(box[0], 0), max(box[1], 0), min(box[2], 120), min(box[3], 90)]


def sized(box: Any) -> list[float]:
    return [box[0], box[1], box[2] - box[0] + 1, box[3] - box[1] + 1]


def wanted(values: list[Any], aware: bool = True, least: float = 0, threshold: float = 0.5, most: int = 0) -> Any:
    scores, offsets, regions, _ = values
    found: list[list[float]] = []
    for label in range(1, CLASSES):
        rows = []
        for number in range(REGIONS):
            place = 4 * label if aware else 4
            box = corners(regions[number, 1:, 0, 0], offsets[number, place : place + 4])
            if scores[number, label] >= least:
                rows.append([0, *box, label, float(scores[number, label])])
        kept: list[list[float]] = []
        for row in sorted(rows, key=lambda row: -row[6]):
            if all(iou(sized(other[1:5]), sized(row[1:5]), 1) <= threshold for other in kept):
                kept.append(row)
        found += kept
    if most:
        best = sorted(found, key=lambda row: -row[6])[:most]
        found = [row for label in range(1, CLASSES) for row in best if row[5] == label]
    return np.array([[0] + [-1] * 6, *found])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ("", {}),
        ("conf_thr: 0.4", {"least": 0.4}),
        ("iou_thr: 0.2 nms_type: 'IOU'", {"threshold": 0.2}),
        ("max_det_num: 6", {"most": 6}),
        ("", {"aware": False}),
    ],
)
def test_detections_are_those_of_the_formula(backend: str, fields: str, arguments: Any) -> None:
    aware = arguments.get("aware", True)
    text = f'type: "FrcnnOutput" frcnn_output_param {{ {fields} }} bbox_reg_param {{ cls_aware: {str(aware).lower()} }}'
    (found,) = run(text, inputs(aware), backend=backend)
    rows = wanted(inputs(aware), **arguments)
    assert len(rows) > 4
    assert_near(found[:, :, 0, 0], rows, 1e-5, "detections")


def test_result_files(tmp_path: Path) -> None:
    """In pixels of the image of 180 x 360, of which the input is a half and a third."""
    (tmp_path / "labels").write_text("".join(f"item {{ name: 'n{c}' label: {c} }}\n" for c in range(CLASSES)))
    (tmp_path / "sizes").write_text("first 180 360\n")
    save = (
        f"save_output_param {{ output_directory: '{tmp_path}/out' output_name_prefix: 'a_' output_format: 'COCO' "
        f"label_map_file: '{tmp_path}/labels' name_size_file: '{tmp_path}/sizes' }}"
    )
    (found,) = run(f'type: "FrcnnOutput" frcnn_output_param {{ conf_thr: 0.5 {save} }}', inputs())
    saved = json.loads((tmp_path / "out" / "a_.json").read_text())
    rows = found[1:, :, 0, 0]
    assert len(saved) == len(rows) > 2
    for one, row in zip(saved, rows, strict=True):
        assert one["category_id"] == f"n{int(row[5])}"
        x1, y1, x2, y2 = row[1] * 3, row[2] * 2, row[3] * 3, row[4] * 2
        assert one["bbox"] == pytest.approx([x1, y1, x2 - x1, y2 - y1], abs=0.011)


def test_what_does_not_fit() -> None:
    values = inputs()
    with pytest.raises(ConfigError, match="nms_type is 'x'"):
        run('type: "FrcnnOutput" frcnn_output_param { nms_type: "x" }', values)
    with pytest.raises(ShapeError, match=r"offsets \(R, 12\)"):
        run('type: "FrcnnOutput"', [values[0], values[1][:, :8], *values[2:]])
    values[2] = values[2].copy()
    values[2][3, 0] = 1
    with pytest.raises(DataError, match="region 3 of 'b2'"):
        run('type: "FrcnnOutput"', values)


# -- DetectionEvaluate ---------------------------------------------------------------------------------

DETECTIONS = [
    [0, -1, -1, -1, -1, -1, -1],
    [0, 10, 10, 29, 29, 1, 0.9],
    [0, 11, 10, 30, 29, 1, 0.8],
    [0, 60, 60, 69, 69, 1, 0.7],
    [0, 40, 40, 59, 59, 2, 0.6],
    [1, -1, -1, -1, -1, -1, -1],
    [1, 10, 10, 29, 29, 1, 0.5],
]
OBJECTS = [
    [0, 10, 10, 29, 29, 1, 0, 0],
    [0, 60, 60, 69, 69, 1, 0, 1],
    [0, 44, 40, 63, 59, 2, 0, 0],
]


def evaluate(fields: str, backend: str = "cpu", detections: Any = None, sizes: Any = ((90, 120), (90, 120))) -> Any:
    shaped = [np.array(values, np.float32)[:, :, None, None] for values in (detections or DETECTIONS, OBJECTS, sizes)]
    text = f'type: "DetectionEvaluate" detection_evaluate_param {{ num_classes: 3 {fields} }}'
    (found,) = run(text, shaped, backend=backend)
    assert found.shape[1:] == (5, 1, 1)
    return found[:, :, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_evaluation_of_boxes_in_pixels(backend: str) -> None:
    rows = evaluate("overlap_threshold: 0.65", backend)
    np.testing.assert_allclose(
        rows,
        [
            [-1, 1, 2, -1, -1],
            [-1, 2, 1, -1, -1],
            [0, 1, 0.9, 1, 0],
            [0, 1, 0.8, 0, 1],  # the same object again
            [0, 1, 0.7, 1, 0],
            [0, 2, 0.6, 1, 0],  # 16 of 24 columns
            [1, 1, 0.5, 0, 1],
        ],
        rtol=1e-6,
    )
    rows = evaluate("overlap_threshold: 0.67 evaluate_difficult_gt: false", backend)
    assert rows[0, 2] == 1
    assert rows[4, 3:].tolist() == [0, 0]
    assert rows[5, 3:].tolist() == [0, 1]


def test_boxes_are_compared_in_pixels_of_the_original(tmp_path: Path) -> None:
    """Columns ten times as wide: the last pixel, which belongs to a box, weighs less: 160.x of 240 columns."""
    (tmp_path / "sizes").write_text("a 90 1200\nb 90 1200\n")
    fields = f"overlap_threshold: 0.6655 name_size_file: '{tmp_path}/sizes'"
    ratio = iou([440, 40, 191, 20], [400, 40, 191, 20], 1)
    assert ratio < 0.6655
    assert evaluate(fields)[5, 3:].tolist() == [0, 1]
    assert evaluate("overlap_threshold: 0.6655")[5, 3:].tolist() == [1, 0]


def test_evaluation_refuses_what_does_not_fit() -> None:
    with pytest.raises(DataError, match="has image 1, but 'b2' 1 sizes"):
        # an object of the same class makes the boxes of image 1 compared
        OBJECTS.append([1, 0, 0, 9, 9, 1, 0, 0])
        try:
            evaluate("", sizes=((90, 120),))
        finally:
            OBJECTS.pop()
    with pytest.raises(DataError, match="is a detection of the background"):
        evaluate("", detections=[[0, 1, 1, 2, 2, 0, 0.5]])
    with pytest.raises(ShapeError, match="sizes N 2 1 1"):
        evaluate("", sizes=((90, 120, 3),))

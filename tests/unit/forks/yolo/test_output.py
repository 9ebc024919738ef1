"""YoloDetectionOutput, Yolov3DetectionOutput, EvalDetection and Region against loops over cells."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from layer_harness import BACKENDS, Runner, assert_near
from yolo_reference import (
    ANCHORS,
    CLASSES,
    MASK,
    PIXELS,
    annotated_rows,
    grid_labels,
    iou,
    logistic,
    objects_of,
    softmax,
    yolo_rows,
)

from caffepy.errors import CaffepyError, ConfigError, ShapeError

Floats = Any
Candidate = tuple[float, int, tuple[float, float, float, float]]
"""Score, class from 0, and box."""


def keep(candidates: list[Candidate], threshold: float) -> list[Candidate]:
    """In descending order of scores the candidates that overlap no kept one by `threshold` or more."""
    kept: list[Candidate] = []
    for one in sorted(candidates, key=lambda one: -one[0]):
        if all(not iou(one[2], other[2]) >= threshold for other in kept):
            kept.append(one)
    return kept


def rows_of(images: list[list[Candidate]]) -> Floats:
    rows = [
        (image, label + 1, score, x - w / 2, y - h / 2, x + w / 2, y + h / 2)
        for image, found in enumerate(images)
        for score, label, (x, y, w, h) in found
    ]
    return np.array(rows)


def assert_rows(found: Floats, wanted: Floats) -> None:
    assert found.shape == (1, 1, *wanted.shape)
    np.testing.assert_array_equal(found[0, 0, :, :2], wanted[:, :2])
    np.testing.assert_allclose(found[0, 0, :, 2:], wanted[:, 2:], rtol=2e-5, atol=1e-6)


def region_candidates(x: Floats, threshold: float) -> list[Candidate]:
    """The candidates of an image (A (5 + C), H, W) of YOLO 2."""
    _, height, width = x.shape
    x = x.astype(np.float64).reshape(len(ANCHORS), 5 + CLASSES, height, width)
    found = []
    for j in range(height):
        for i in range(width):
            for n, (wide, high) in enumerate(ANCHORS):
                v = x[n, :, j, i]
                chances = softmax(v[5:])
                score = logistic(v[4]) * chances.max()
                place = (i + logistic(v[0])) / width, (j + logistic(v[1])) / height
                size = math.exp(v[2]) * wide / width, math.exp(v[3]) * high / height
                if score >= threshold:
                    found.append((score, int(chances.argmax()), (*place, *size)))
    return found


BIASES = " ".join(f"biases: {w} biases: {h}" for w, h in ANCHORS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("threshold", [0.2, 0.4])
def test_boxes_of_yolo_2(backend: str, threshold: float) -> None:
    random = np.random.default_rng(1)
    grids = [
        random.standard_normal((2, 27, 4, 5)).astype(np.float32),
        random.standard_normal((2, 27, 2, 3)).astype("f"),
    ]
    text = f"num_classes: 4 num_box: 3 confidence_threshold: {threshold} nms_threshold: 0.3 {BIASES}"
    runner = Runner(f"type: 'YoloDetectionOutput' yolo_detection_output_param {{ {text} }}", grids, backend, tops=1)
    wanted = [keep([one for grid in grids for one in region_candidates(grid[b], threshold)], 0.3) for b in range(2)]
    assert_rows(runner.forward()[0], rows_of(wanted))


def test_centers_and_classes_from_0() -> None:
    grid = np.random.default_rng(1).standard_normal((2, 27, 4, 5)).astype(np.float32)
    text = f"num_classes: 4 num_box: 3 confidence_threshold: 0.2 nms_threshold: 0.3 {BIASES}"
    plain, centers = (
        Runner(f"type: 'YoloDetectionOutput' yolo_detection_output_param {{ {text} {more} }}", [grid]).forward()[0][
            0, 0
        ]
        for more in ("", "centers: true")
    )
    np.testing.assert_array_equal(centers[:, [0, 2]], plain[:, [0, 2]])
    np.testing.assert_array_equal(centers[:, 1], plain[:, 1] - 1)
    half = centers[:, 5:] / 2
    assert_near(np.concatenate([centers[:, 3:5] - half, centers[:, 3:5] + half], 1), plain[:, 3:], 1e-6, "boxes")


@pytest.mark.parametrize("backend", BACKENDS)
def test_images_without_boxes_have_a_row_of_minus_one(backend: str) -> None:
    text = f"num_classes: 4 num_box: 3 confidence_threshold: 0.9 {BIASES}"
    runner = Runner(
        f"type: 'YoloDetectionOutput' yolo_detection_output_param {{ {text} }}", [np.zeros((2, 27, 2, 2), "f")], backend
    )
    np.testing.assert_array_equal(runner.forward()[0][0, 0], [[0, *[-1] * 6], [1, *[-1] * 6]])


YOLO3 = " ".join(f"biases: {w} biases: {h}" for w, h in PIXELS)
MASKS = [MASK, [0, 3, 1]]
SCALES = [16, 8]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gaussian_box", [False, True])
def test_boxes_of_yolo_3(backend: str, gaussian_box: bool) -> None:
    random, values = np.random.default_rng(4), 8 if gaussian_box else 4
    shapes = [(2, 3 * (values + 1 + CLASSES), 3, 4), (2, 3 * (values + 1 + CLASSES), 5, 2)]
    grids = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
    wanted = []
    for image in range(2):
        found = []
        for grid, mask, scale in zip(grids, MASKS, SCALES, strict=True):
            height, width = grid.shape[2:]
            x = grid[image].astype(np.float64).reshape(3, -1, height, width)
            for j in range(height):
                for i in range(width):
                    for n in range(3):
                        v = x[n, :, j, i]
                        mean = v[0:values:2] if gaussian_box else v[:4]
                        confidence = logistic(v[values])
                        if gaussian_box:
                            confidence *= (4 - sum(logistic(d) for d in v[1:values:2])) / 4
                        wide, high = PIXELS[mask[n]]
                        box = (
                            (i + logistic(mean[0])) / width,
                            (j + logistic(mean[1])) / height,
                            math.exp(mean[2]) * wide / (width * scale),
                            math.exp(mean[3]) * high / (height * scale),
                        )
                        scores = [confidence * logistic(value) for value in v[values + 1 :]]
                        found += [(score, label, box) for label, score in enumerate(scores) if score > 0.3]
        wanted.append(keep(found, 0.4))
    masks = " ".join(f"mask: {n}" for mask in MASKS for n in mask)
    text = f"num_classes: 4 num_box: 3 mask_group_num: 2 anchors_scale: 16 anchors_scale: 8 {YOLO3} {masks} "
    text += f"confidence_threshold: 0.3 nms_threshold: 0.4 gaussian_box: {str(gaussian_box).lower()}"
    runner = Runner(f"type: 'Yolov3DetectionOutput' yolov3_detection_output_param {{ {text} }}", grids, backend, tops=1)
    assert_rows(runner.forward()[0], rows_of(wanted))


@pytest.mark.parametrize(
    "settings, error, message",
    [
        (f"num_box: 3 mask_group_num: 1 {YOLO3} mask: 0", ConfigError, "0 anchors_scale"),
        (f"num_box: 3 mask_group_num: 2 {YOLO3} mask: 0 anchors_scale: 8", ConfigError, "number of bottoms, 1"),
        (f"num_box: 3 mask_group_num: 1 {YOLO3} mask: 0 anchors_scale: 8", ConfigError, "mask is"),
        (f"num_box: 1 mask_group_num: 1 {YOLO3} mask: 9 anchors_scale: 8", ConfigError, "mask is"),
        (f"num_box: 1 mask_group_num: 1 {YOLO3} mask: 4 anchors_scale: 8", ShapeError, "bottoms of 25 channels"),
    ],
)
def test_mistakes_of_yolo_3_are_named(settings: str, error: type[CaffepyError], message: str) -> None:
    with pytest.raises(error, match=message):
        Runner(
            f"type: 'Yolov3DetectionOutput' yolov3_detection_output_param {{ {settings} }}",
            [np.zeros((1, 9, 2, 2), "f")],
        )


# -- EvalDetection -------------------------------------------------------------------------------------


def evaluated(
    candidates: list[Candidate], objects: list[tuple[int, Any, bool]], size: int, threshold: float, misses: bool
) -> Floats:
    """The row of an image: objects are (class, box, difficult); `misses`: boxes beside all objects are misses."""
    row = np.zeros(CLASSES + 4 * size)
    for label, _, difficult in objects:
        row[label] += not difficult
    at = CLASSES
    for label in range(CLASSES):
        own = [(box, difficult) for kind, box, difficult in objects if kind == label]
        seen = set()
        for score, kind, box in sorted(candidates, key=lambda one: -one[0]):
            if kind != label:
                continue
            hit, miss = 0, 1
            if own:
                overlaps = [iou(box, other) for other, _ in own]
                best = int(np.argmax(overlaps))
                if overlaps[best] < threshold:
                    miss = int(misses)
                elif own[best][1]:
                    miss = 0
                else:
                    hit, miss = int(best not in seen), int(best in seen)
                    seen.add(best)
            row[at : at + 4] = label, score, hit, miss
            at += 4
    return row


SCORES = {"OBJ": lambda p, q: p, "PROB": lambda p, q: q, "MULTIPLY": lambda p, q: p * q}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind, nms, roots", [("MULTIPLY", -1, True), ("OBJ", 0.4, False), ("PROB", 0.6, True)])
def test_evaluation_of_yolo_1(backend: str, kind: str, nms: float, roots: bool) -> None:
    side, boxes, cells = 3, 2, 9
    random = np.random.default_rng(5)
    x = random.uniform(0.05, 0.95, (3, cells * (CLASSES + 10))).astype(np.float32)
    labels = grid_labels(3, side, CLASSES, 6)
    wanted = []
    for v, label in zip(x.astype(np.float64), labels, strict=True):
        table = v.reshape(-1, cells)
        found = []
        for cell in range(cells):
            best = int(table[:CLASSES, cell].argmax())
            for k in range(boxes):
                box = table[CLASSES + boxes + 4 * k : CLASSES + boxes + 4 * k + 4, cell].copy()
                box[:2] = (cell % side + box[0]) / side, (cell // side + box[1]) / side
                if roots:
                    box[2:] **= 2
                score = SCORES[kind](table[CLASSES + k, cell], table[best, cell])
                found.append((score, best, tuple(box)))
        if nms >= 0:
            found = keep(found, nms)
        objects = [
            (int(label[2 * cells + c]), tuple(label[3 * cells + 4 * c : 3 * cells + 4 * c + 4]), label[c] == 1)
            for c in range(cells)
            if label[cells + c]
        ]
        wanted.append(evaluated(found, objects, cells * boxes, 0.2, True))
    text = f"side: 3 num_class: 4 num_object: 2 threshold: 0.2 score_type: {kind} nms: {nms} sqrt: {str(roots).lower()}"
    runner = Runner(f"type: 'EvalDetection' eval_detection_param {{ {text} }}", [x, labels], backend, tops=1)
    np.testing.assert_allclose(runner.forward()[0], np.array(wanted), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("nms", [-1, 0.45])
def test_evaluation_of_yolo_2(backend: str, nms: float) -> None:
    x = np.random.default_rng(5).standard_normal((3, 27, 3, 3)).astype(np.float32)
    objects = objects_of(3, 4)
    wanted = []
    for image, found in zip(x, objects, strict=True):
        candidates = region_candidates(image, -1)
        if nms >= 0:
            candidates = [one for one in keep(candidates, nms) if one[0] >= 0.005]
        wanted.append(evaluated(candidates, [(k, box, False) for k, box in found], 27, 0.2, False))
    text = f"side: 3 num_class: 4 num_object: 3 threshold: 0.2 nms: {nms} {BIASES}"
    inputs = [x, annotated_rows(objects)]
    runner = Runner(f"type: 'EvalDetection' eval_detection_param {{ {text} }}", inputs, backend, tops=1)
    np.testing.assert_allclose(runner.forward()[0], np.array(wanted), rtol=1e-5, atol=1e-6)


def test_evaluation_of_yolo_2_with_labels_of_box_data() -> None:
    x, labels = (
        np.random.default_rng(5).standard_normal((3, 27, 3, 3)).astype(np.float32),
        grid_labels(3, 3, CLASSES, 4),
    )
    text = (
        f"type: 'EvalDetection' eval_detection_param {{ side: 3 num_class: 4 num_object: 3 threshold: 0.2 {BIASES} }}"
    )
    objects = [
        [(int(row[18 + c]), tuple(row[27 + 4 * c : 31 + 4 * c].tolist())) for c in range(9) if row[9 + c]]
        for row in labels
    ]
    found, wanted = (Runner(text, [x, rows], tops=1).forward()[0] for rows in (labels, yolo_rows(objects)))
    np.testing.assert_array_equal(found, wanted)
    assert found[:, :CLASSES].sum() == sum(map(len, objects))


def test_without_constriant_places_are_in_the_image() -> None:
    """A box at the object's place is a hit where it is relative to the image."""
    x, labels = np.zeros((1, 9 * (CLASSES + 5)), np.float32), np.zeros((1, 63), np.float32)
    table = x.reshape(-1, 9)
    table[2, 4], table[4, 4], table[5:9, 4] = 1, 1, (0.5, 0.5, 0.5, 0.5)
    labels[0, 9 + 4], labels[0, 18 + 4], labels[0, 27 + 16 : 27 + 20] = 1, 2, (0.5, 0.5, 0.5, 0.5)
    hits = {}
    for value in ("true", "false"):
        text = f"side: 3 num_class: 4 num_object: 1 sqrt: false threshold: 0.9 constriant: {value}"
        runner = Runner(f"type: 'EvalDetection' eval_detection_param {{ {text} }}", [x, labels], tops=1)
        hits[value] = runner.forward()[0][0, CLASSES:].reshape(-1, 4)[:, 2].sum()
    assert hits == {"true": 1, "false": 1}
    table[5:7, 4] = 0.4
    for value, wanted in (("true", 1), ("false", 0)):
        text = f"side: 3 num_class: 4 num_object: 1 sqrt: false threshold: 0.7 constriant: {value}"
        runner = Runner(f"type: 'EvalDetection' eval_detection_param {{ {text} }}", [x, labels], tops=1)
        assert runner.forward()[0][0, CLASSES:].reshape(-1, 4)[:, 2].sum() == wanted


def test_mistakes_of_the_evaluation_are_named() -> None:
    with pytest.raises(ShapeError, match="81 predictions and 63 labels"):
        Runner(
            "type: 'EvalDetection' eval_detection_param { side: 3 num_class: 4 num_object: 1 }",
            [np.zeros((1, 80), "f"), np.zeros((1, 63), "f")],
        )
    with pytest.raises(ShapeError, match="predictions N 27 3 3"):
        Runner(
            f"type: 'EvalDetection' eval_detection_param {{ side: 3 num_class: 4 num_object: 3 {BIASES} }}",
            [np.zeros((1, 27, 3, 4), "f"), annotated_rows(objects_of(1, 1))],
        )


# -- Region --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activated", [False, True])
def test_region(backend: str, activated: bool) -> None:
    x = np.random.default_rng(1).standard_normal((2, 3 * 9, 2, 3)).astype(np.float32)
    text = f"classes: 4 coords: 4 boxes_of_each_grid: 3 softmax: {str(activated).lower()}"
    wanted = x.reshape(2, 3, 9, 6).transpose(0, 3, 1, 2).copy()
    wanted[..., 4] = 1 / (1 + np.exp(-wanted[..., 4]))
    if activated:
        wanted[..., 5:] = np.apply_along_axis(softmax, -1, wanted[..., 5:])
    found = Runner(f"type: 'Region' region_param {{ {text} }}", [x], backend).forward()[0]
    np.testing.assert_allclose(found, wanted.reshape(x.shape), rtol=1e-5, atol=1e-6)


def test_region_checks_the_channels() -> None:
    with pytest.raises(ShapeError, match="need 125 channels"):
        Runner("type: 'Region'", [np.zeros((1, 27, 2, 2), "f")])

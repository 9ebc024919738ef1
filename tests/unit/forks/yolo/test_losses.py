"""RegionLoss, Yolov3, DetectionLoss and YoloSeg against loops over cells and objects."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from layer_harness import BACKENDS, TEST, TRAIN, Runner, assert_near, gaussian
from yolo_reference import (
    ANCHORS,
    CLASSES,
    MASK,
    PIXELS,
    Box,
    Floats,
    Objects,
    annotated_rows,
    grid_labels,
    iou,
    logistic,
    objects_of,
    softmax,
    yolo_rows,
)

from caffepy.errors import CaffepyError, ConfigError, DataError, ShapeError


def check_loss(
    text: str, predictions: Floats, labels: Floats, wanted: tuple[float, Floats], weight: float = 1.0
) -> None:
    """Whether the layer reports the loss and gives the gradient `wanted`, on each backend, twice."""
    loss, gradient = wanted
    for backend in BACKENDS:
        runner = Runner(text, [predictions, labels], backend, loss_weight=weight)
        for _ in range(2):
            (found,) = runner.forward()
            assert_near(found, np.array(loss), 2e-5, f"{backend}: loss")
            diff = runner.backward([np.array(weight, np.float32)])[0]
            assert_near(diff, weight * gradient, 3e-5, f"{backend}: gradient")


# -- YOLO 2 --------------------------------------------------------------------------------------------


def region_loss(
    x: Floats,
    objects: Objects,
    *,
    rescore: bool,
    bias_match: bool,
    thresh: float,
    intel: bool = False,
    yolov2: bool = False,
    warm: bool = False,
) -> tuple[float, Floats]:
    object_scale, noobject_scale, class_scale, coord_scale = 5.0, 0.7, 1.3, 1.1
    images, _, height, width = x.shape
    x = x.astype(np.float64).reshape(images, len(ANCHORS), 5 + CLASSES, height, width)
    diff = np.zeros_like(x)

    def box_at(image: int, n: int, j: int, i: int) -> Box:
        v = x[image, n, :, j, i]
        wide, high = ANCHORS[n]
        return (
            (i + logistic(v[0])) / width,
            (j + logistic(v[1])) / height,
            math.exp(v[2]) * wide / width,
            math.exp(v[3]) * high / height,
        )

    for image, found in enumerate(objects):
        for n in range(len(ANCHORS)):
            for j in range(height):
                for i in range(width):
                    p = logistic(x[image, n, 4, j, i])
                    best = max([iou(box_at(image, n, j, i), box) for _, box in found], default=0.0)
                    diff[image, n, 4, j, i] = 0 if best > thresh else noobject_scale * p * p * (1 - p)
                    for c in range(4 if warm else 0):
                        v = x[image, n, c, j, i]
                        s = logistic(v)
                        diff[image, n, c, j, i] = 0.01 * ((s - 0.5) * s * (1 - s) if c < 2 else v)
        for label, box in found:
            i, j = int(box[0] * width), int(box[1] * height)
            sizes = [
                (w / width, h / height) if bias_match else box_at(image, k, j, i)[2:]
                for k, (w, h) in enumerate(ANCHORS)
            ]
            fits = [iou((0, 0, *size), (0, 0, *box[2:])) for size in sizes]
            n = int(np.argmax(fits))
            v, cell = x[image, n, :, j, i], diff[image, n, :, j, i]
            scale = coord_scale if rescore or intel or yolov2 else coord_scale * (2 - box[2] * box[3])
            target = (
                box[0] * width - i,
                box[1] * height - j,
                math.log(box[2] * width / ANCHORS[n][0]),
                math.log(box[3] * height / ANCHORS[n][1]),
            )
            for c in range(4):
                s = logistic(v[c]) if c < 2 else v[c]
                difference = s - target[c]
                if intel:
                    difference = max(-1.0, min(1.0, difference))
                cell[c] = scale * difference * (s * (1 - s) if c < 2 else 1)
            p = logistic(v[4])
            wanted = iou(box_at(image, n, j, i), box) if rescore and not yolov2 else 1.0
            cell[4] = object_scale * (-2 * (1 - p) ** 3 if intel else p - wanted) * p * (1 - p)
            cell[5:] = class_scale * (softmax(v[5:]) - np.eye(CLASSES)[label])
    total = float((diff**2).sum())
    return total if intel or yolov2 else total / images, (diff / images).reshape(images, -1, height, width)


REGION = "num: 3 num_class: 4 object_scale: 5 noobject_scale: 0.7 class_scale: 1.3 coord_scale: 1.1 " + " ".join(
    f"biases: {w} biases: {h}" for w, h in ANCHORS
)


@pytest.mark.parametrize("rescore", [True, False])
@pytest.mark.parametrize("bias_match", [True, False])
@pytest.mark.parametrize("rows", [yolo_rows, annotated_rows])
def test_region_loss(rescore: bool, bias_match: bool, rows: Callable[..., Floats]) -> None:
    x = np.random.default_rng(3).standard_normal((3, 27, 5, 6)).astype(np.float32)
    objects = objects_of(3, 4)
    settings = f"{REGION} rescore: {rescore:d} bias_match: {bias_match:d} thresh: 0.3"
    text = f"type: 'RegionLoss' region_loss_param {{ {settings} }}"
    intel = rows is annotated_rows
    wanted = region_loss(x, objects, rescore=rescore, bias_match=bias_match, thresh=0.3, intel=intel)
    check_loss(text, x, rows(objects), wanted, weight=0.5)


@pytest.mark.parametrize("phase", [TRAIN, TEST])
@pytest.mark.parametrize(("first", "warm"), [(0, True), (12799, True), (12800, False)])
@pytest.mark.parametrize("rescore", [True, False])
def test_region_loss_of_labels_of_box_data(phase: int, first: int, warm: bool, rescore: bool) -> None:
    x = np.random.default_rng(3).standard_normal((3, 27, 5, 5)).astype(np.float32)
    text = f"type: 'RegionLoss' region_loss_param {{ {REGION} rescore: {rescore:d} thresh: 0.3 }}"
    labels = grid_labels(3, 5, CLASSES, 6)
    objects = [
        [
            (int(row[50 + cell]), tuple(row[75 + 4 * cell : 79 + 4 * cell].astype(np.float64).tolist()))
            for cell in range(25)
            if row[25 + cell]
        ]
        for row in labels
    ]
    warms = warm and phase == TRAIN
    wanted = region_loss(x, objects, rescore=rescore, bias_match=True, thresh=0.3, yolov2=True, warm=warms)
    for backend in BACKENDS:
        runner = Runner(text, [x, labels], backend, phase=phase, first_sample=first)
        assert_near(runner.forward()[0], np.array(wanted[0]), 2e-5, f"{backend}: loss")
        assert_near(runner.backward([np.array(1, np.float32)])[0], wanted[1], 3e-5, f"{backend}: gradient")


def test_a_batch_without_objects_has_the_loss_of_the_background() -> None:
    x = np.random.default_rng(3).standard_normal((2, 27, 4, 4)).astype(np.float32)
    wanted = region_loss(x, [[], []], rescore=True, bias_match=True, thresh=0.3)
    check_loss(f"type: 'RegionLoss' region_loss_param {{ {REGION} }}", x, np.zeros((2, 1, 5, 5), np.float32), wanted)


def test_class_map_names_the_channels(tmp_path: Path) -> None:
    (tmp_path / "map").write_text("3\n2\n1\n0\n2\n")
    x = np.random.default_rng(3).standard_normal((2, 27, 4, 4)).astype(np.float32)
    mapped, plain = [[(4, (0.5, 0.5, 0.3, 0.3))], []], [[(2, (0.5, 0.5, 0.3, 0.3))], []]
    wanted = region_loss(x, plain, rescore=True, bias_match=True, thresh=0.2)
    text = f"type: 'RegionLoss' region_loss_param {{ {REGION} class_map: '{tmp_path}/map' }}"
    check_loss(text, x, yolo_rows(mapped), wanted)


@pytest.mark.parametrize(
    "settings, shape, rows, error, message",
    [
        (REGION + " coords: 5", (1, 27, 4, 4), (1, 1, 5, 5), ConfigError, "coords is 5"),
        ("num: 3 num_class: 4 biases: 1", (1, 27, 4, 4), (1, 1, 5, 5), ConfigError, "1 biases"),
        (REGION, (1, 26, 4, 4), (1, 1, 5, 5), ShapeError, "predictions of 27 channels"),
        (REGION, (2, 27, 4, 4), (2, 7), ShapeError, "needs objects N 1 T 5"),
        (REGION + " class_map: 'missing'", (1, 27, 4, 4), (1, 1, 5, 5), DataError, "class_map .* cannot be read"),
    ],
)
def test_mistakes_of_region_loss_are_named(
    settings: str, shape: tuple[int, ...], rows: tuple[int, ...], error: type[CaffepyError], message: str
) -> None:
    with pytest.raises(error, match=message):
        Runner(f"type: 'RegionLoss' region_loss_param {{ {settings} }}", [np.zeros(shape, "f"), np.zeros(rows, "f")])


def test_a_class_out_of_range_is_named() -> None:
    rows = yolo_rows([[(4, (0.5, 0.5, 0.1, 0.1))]])
    runner = Runner(f"type: 'RegionLoss' region_loss_param {{ {REGION} }}", [np.zeros((1, 27, 4, 4), "f"), rows])
    with pytest.raises(DataError, match="an object of class 4 in image 0"):
        runner.forward()


# -- YOLO 3 --------------------------------------------------------------------------------------------


def yolov3_loss(
    x: Floats, objects: Objects, *, logic: bool, focal: bool, eps: float, iou_thresh: float
) -> tuple[float, Floats]:
    thresh, scale, object_scale, class_scale, coord_scale = 0.4, 16, 5.0, 1.3, 1.1
    images, _, height, width = x.shape
    x = x.astype(np.float64).reshape(images, len(MASK), 5 + CLASSES, height, width)
    diff = np.zeros_like(x)
    anchors = [(w / (width * scale), h / (height * scale)) for w, h in PIXELS]
    for image, found in enumerate(objects):
        for n in range(len(MASK)):
            for j in range(height):
                for i in range(width):
                    v, (w, h) = x[image, n, :, j, i], anchors[MASK[n]]
                    box = (
                        (i + logistic(v[0])) / width,
                        (j + logistic(v[1])) / height,
                        math.exp(v[2]) * w,
                        math.exp(v[3]) * h,
                    )
                    best = max([iou(box, other) for _, other in found], default=0.0)
                    diff[image, n, 4, j, i] = 0 if best > thresh else logistic(v[4])
        for label, box in found:
            i, j = int(box[0] * width), int(box[1] * height)
            fits = [iou((0, 0, w, h), (0, 0, *box[2:])) for w, h in anchors]
            for n, anchor in enumerate(MASK):
                if anchor != int(np.argmax(fits)) and not (iou_thresh < 1 and fits[anchor] > iou_thresh):
                    continue
                v, cell = x[image, n, :, j, i], diff[image, n, :, j, i]
                w, h = anchors[anchor]
                weight = coord_scale * (2 - box[2] * box[3])
                cell[0] = weight * (logistic(v[0]) - (box[0] * width - i))
                cell[1] = weight * (logistic(v[1]) - (box[1] * height - j))
                cell[2] = weight * (v[2] - math.log(box[2] / w))
                cell[3] = weight * (v[3] - math.log(box[3] / h))
                cell[4] = (logistic(v[4]) - 1) * (object_scale if logic else 1)
                q = np.array([logistic(value) for value in v[5:]])
                if cell[5 + label]:
                    cell[5 + label] = class_scale * (q[label] - (1 - eps / 2))
                elif focal:
                    own = q[label]
                    weight = -0.5 * (1 - own) * (2 * own * math.log(own) + own - 1)
                    cell[5:] = class_scale * weight * (q - np.eye(CLASSES)[label])
                else:
                    cell[5:] = class_scale * (q - (np.eye(CLASSES)[label] * (1 - eps) + eps / 2))
    total = float((diff**2).sum()) / images
    if logic:
        s = 1 / (1 + np.exp(-x))
        s[:, :, 2:4] = 0.5
        diff *= np.where(np.arange(5 + CLASSES)[:, None, None] // 2 == 1, 1, s * (1 - s))
        diff[:, :, 2:4] = diff[:, :, 2:4]
    return total, (diff / images).reshape(images, -1, height, width)


YOLO3 = "num: 3 num_class: 4 anchors_scale: 16 thresh: 0.4 object_scale: 5 class_scale: 1.3 coord_scale: 1.1 "
YOLO3 += " ".join(f"biases: {w} biases: {h}" for w, h in PIXELS) + " " + " ".join(f"mask: {n}" for n in MASK)


@pytest.mark.parametrize(
    "logic, focal, eps, iou_thresh",
    [(False, False, 0.1, 0.5), (True, False, 0.0, 1.0), (False, True, 0.2, 0.3), (True, True, 0.0, 0.2)],
)
def test_yolov3(logic: bool, focal: bool, eps: float, iou_thresh: float) -> None:
    x = np.random.default_rng(5).standard_normal((3, 27, 5, 6)).astype(np.float32)
    objects = objects_of(3, 6)
    more = f"use_logic_gradient: {str(logic).lower()} use_focal_loss: {str(focal).lower()} "
    more += f"label_smooth_eps: {eps} iou_thresh: {iou_thresh}"
    wanted = yolov3_loss(x, objects, logic=logic, focal=focal, eps=eps, iou_thresh=iou_thresh)
    for rows in (yolo_rows, annotated_rows):
        check_loss(f"type: 'Yolov3' yolov3_param {{ {YOLO3} {more} }}", x, rows(objects), wanted)


def test_yolov3_without_objects() -> None:
    x = np.random.default_rng(5).standard_normal((1, 27, 3, 3)).astype(np.float32)
    wanted = yolov3_loss(x, [[]], logic=False, focal=False, eps=0.1, iou_thresh=0.5)
    for more in ("", "iou_loss: GIOU"):
        check_loss(f"type: 'Yolov3' yolov3_param {{ {YOLO3} {more} }}", x, np.zeros((1, 1, 4, 5), "f"), wanted)


def overlap_of(kind: str, a: Box, b: Box) -> float:
    low = [min(a[i] - a[i + 2] / 2, b[i] - b[i + 2] / 2) for i in (0, 1)]
    high = [max(a[i] + a[i + 2] / 2, b[i] + b[i + 2] / 2) for i in (0, 1)]
    found, sides = iou(a, b), [high[0] - low[0], high[1] - low[1]]
    if kind == "GIOU":
        hull, both = sides[0] * sides[1], a[2] * a[3] + b[2] * b[3]
        return found - (hull - both / (1 + found)) / hull
    distance = ((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2) / (sides[0] ** 2 + sides[1] ** 2)
    if kind == "DIOU":
        return found - distance
    return found


@pytest.mark.parametrize("kind", ["IOU", "GIOU", "DIOU"])
@pytest.mark.parametrize("accumulate", [True, False])
def test_gradient_of_the_overlap(kind: str, accumulate: bool) -> None:
    """One object, so that one box has the negative slope of its overlap, times 2 and the prediction's e^x for sizes."""
    x = np.random.default_rng(8).standard_normal((1, 27, 4, 4)).astype(np.float32) * 0.3
    width = height = 4
    box = (0.45, 0.55, 1.2, 1.3)
    more = f"iou_loss: {kind} iou_normalizer: 0.5 iou_thresh: 1 max_delta: 100 accumulate: {str(accumulate).lower()}"
    runner = Runner(f"type: 'Yolov3' yolov3_param {{ {YOLO3} {more} }}", [x, yolo_rows([[(1, box)]])])
    loss = float(runner.forward()[0])
    diff = runner.backward([np.ones((), "f")])[0].reshape(3, 9, 4, 4)
    i, j, n = 1, 2, 0  # anchor 4 is the largest
    v = x.reshape(3, 9, 4, 4)[n, :, j, i].astype(np.float64)
    place = [(i + logistic(v[0])) / width, (j + logistic(v[1])) / height]
    place += [math.exp(v[2]) * 90 / 64, math.exp(v[3]) * 90 / 64]
    for c in range(4):
        step = [1e-5 * (k == c) for k in range(4)]
        ends = [
            overlap_of(kind, tuple(p + sign * s for p, s in zip(place, step, strict=True)), box) for sign in (1, -1)
        ]
        slope = (ends[0] - ends[1]) / 2e-5
        if c >= 2:
            slope *= 2 * math.exp(v[c])
        assert diff[n, c, j, i] == pytest.approx(-0.5 * slope, rel=2e-3, abs=1e-5)
    squares = float((diff[:, 4:].astype(np.float64) ** 2).sum())
    reported = overlap_of("IOU", tuple(place), box)
    if kind == "GIOU":
        reported = overlap_of("GIOU", tuple(place), box)
    else:
        reported -= (overlap_of("IOU", tuple(place), box) - overlap_of("DIOU", tuple(place), box)) ** 0.6
    assert loss == pytest.approx(squares + 0.5 * (1 - reported), rel=1e-4)


def test_ciou_pulls_towards_the_ratio_of_the_object() -> None:
    """A wide prediction of a high object: the width decreases and the height increases."""
    x = np.zeros((1, 27, 4, 4), np.float32)
    diffs = {}
    for kind in ("DIOU", "CIOU"):
        text = f"type: 'Yolov3' yolov3_param {{ {YOLO3} iou_loss: {kind} iou_thresh: 1 }}"
        runner = Runner(text, [x, yolo_rows([[(1, (0.45, 0.55, 0.8, 1.9))]])])
        runner.forward()
        diffs[kind] = runner.backward([np.ones((), "f")])[0].reshape(3, 9, 4, 4)[0, :, 2, 1]
    assert diffs["CIOU"][2] > diffs["DIOU"][2]
    assert diffs["CIOU"][3] < diffs["DIOU"][3]


def test_objects_of_one_cell_accumulate_or_the_last_one_counts() -> None:
    x = np.random.default_rng(8).standard_normal((1, 27, 4, 4)).astype(np.float32) * 0.3
    boxes = [(1, (0.45, 0.55, 0.9, 1.1)), (1, (0.4, 0.6, 1.0, 1.0))]

    def slopes(found: list[tuple[int, Box]], accumulate: bool) -> Floats:
        text = f"iou_loss: GIOU iou_thresh: 1 accumulate: {str(accumulate).lower()}"
        runner = Runner(f"type: 'Yolov3' yolov3_param {{ {YOLO3} {text} }}", [x, yolo_rows([found])])
        runner.forward()
        return runner.backward([np.ones((), "f")])[0].reshape(3, 9, 4, 4)[:, :4]

    each = [slopes([box], True) for box in boxes]
    np.testing.assert_allclose(slopes(boxes, True), each[0] + each[1], atol=1e-6)
    np.testing.assert_allclose(slopes(boxes, False), each[1], atol=1e-7)


def test_max_delta_limits_the_gradient() -> None:
    x = np.zeros((1, 27, 4, 4), np.float32)
    text = f"type: 'Yolov3' yolov3_param {{ {YOLO3} iou_loss: IOU max_delta: 0.01 }}"
    runner = Runner(text, [x, yolo_rows([[(1, (0.45, 0.55, 0.8, 1.9))]])])
    runner.forward()
    assert np.abs(runner.backward([np.ones((), "f")])[0].reshape(3, 9, 4, 4)[:, :4]).max() == np.float32(0.01)


@pytest.mark.parametrize("mask", ["mask: 0 mask: 1", "mask: 0 mask: 1 mask: 5", ""])
def test_mask_must_name_anchors(mask: str) -> None:
    biases = " ".join(["biases: 9"] * 10)
    with pytest.raises(ConfigError, match="mask is"):
        Runner(
            f"type: 'Yolov3' yolov3_param {{ num: 3 num_class: 4 {biases} {mask} }}",
            [np.zeros((1, 27, 4, 4), "f"), np.zeros((1, 1, 5, 5), "f")],
        )


# -- YOLO 1 --------------------------------------------------------------------------------------------


def detection_loss(
    x: Floats, labels: Floats, side: int, classes: int, boxes: int, roots: bool, relative: bool
) -> tuple[float, Floats]:
    images, cells = len(x), side * side
    x, diff = x.astype(np.float64), np.zeros(x.shape)
    parts = {"object": 0.0, "background": 0.0}
    count = 0
    for image in range(images):
        v, g, truth = x[image], diff[image], labels[image].astype(np.float64)
        for cell in range(cells):
            for k in range(boxes):
                at = (classes + k) * cells + cell
                parts["background"] += 0.7 * v[at] ** 2
                g[at] = 0.7 * v[at]
            if not truth[cells + cell]:
                continue
            count += 1
            for c in range(classes):
                difference = v[c * cells + cell] - (c == truth[2 * cells + cell])
                parts["object"] += 1.3 * difference**2
                g[c * cells + cell] = 1.3 * difference
            goal = truth[3 * cells + 4 * cell : 3 * cells + 4 * cell + 4]
            found = []
            for k in range(boxes):
                box = [v[(classes + boxes + 4 * k + c) * cells + cell] for c in range(4)]
                if relative:
                    box[0], box[1] = (cell % side + box[0]) / side, (cell // side + box[1]) / side
                if roots:
                    box[2], box[3] = box[2] ** 2, box[3] ** 2
                found.append(box)
            fits = [iou(tuple(box), tuple(goal)) for box in found]
            far = [float(np.linalg.norm(np.array(box) - goal)) for box in found]
            best = int(np.argmax(fits)) if max(fits) > 0 else int(np.argmin(far))
            at = (classes + best) * cells + cell
            parts["background"] -= 0.7 * v[at] ** 2
            parts["object"] += 2.1 * (v[at] - 1) ** 2
            g[at] = 2.1 * (v[at] - max(fits[best], 0))
            target = list(goal)
            if relative:
                target[0], target[1] = goal[0] * side - cell % side, goal[1] * side - cell // side
            if roots:
                target[2:] = np.sqrt(goal[2:])
            for c in range(4):
                at = (classes + boxes + 4 * best + c) * cells + cell
                parts["object"] += 5.5 * (v[at] - target[c]) ** 2
                g[at] = 5.5 * (v[at] - target[c])
    loss = parts["object"] / max(count, 1) + parts["background"] / (cells * boxes * images - count)
    return loss, diff / images


DETECTION = "object_scale: 2.1 noobject_scale: 0.7 class_scale: 1.3 coord_scale: 5.5"


@pytest.mark.parametrize("roots", [True, False])
@pytest.mark.parametrize("relative", [True, False])
def test_detection_loss(roots: bool, relative: bool) -> None:
    side, classes, boxes = 4, 3, 2
    random = np.random.default_rng(9)
    x = random.uniform(0.05, 0.9, (3, 16 * 13)).astype(np.float32)
    x[2, 16 * 5 :] = random.uniform(-9, -8, 16 * 8)  # far from all objects
    labels = grid_labels(3, side, classes, 2)
    text = f"side: {side} num_class: {classes} num_object: {boxes} {DETECTION} "
    text += f"sqrt: {str(roots).lower()} constriant: {str(relative).lower()}"
    wanted = detection_loss(x, labels, side, classes, boxes, roots, relative)
    check_loss(f"type: 'DetectionLoss' detection_loss_param {{ {text} }}", x, labels, wanted, weight=2.0)


def test_an_empty_grid_has_a_finite_loss() -> None:
    x, labels = np.full((1, 16 * 13), 0.5, np.float32), np.zeros((1, 7 * 16), np.float32)
    wanted = detection_loss(x, labels, 4, 3, 2, True, True)
    text = f"side: 4 num_class: 3 num_object: 2 {DETECTION}"
    check_loss(f"type: 'DetectionLoss' detection_loss_param {{ {text} }}", x, labels, wanted)


def test_mistakes_of_detection_loss_are_named() -> None:
    text = "type: 'DetectionLoss' detection_loss_param { side: 4 num_class: 3 num_object: 2 }"
    with pytest.raises(ShapeError, match="208 predictions and 112 labels"):
        Runner(text, [np.zeros((1, 207), "f"), np.zeros((1, 112), "f")])
    labels = grid_labels(1, 4, 3, 2)
    labels[0, 32:48] = 3
    runner = Runner(text, [np.zeros((1, 208), "f"), labels])
    with pytest.raises(DataError, match="num_class is 3"):
        runner.forward()


# -- YoloSeg ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_gradient(backend: str, weighted: bool) -> None:
    x = gaussian((2, 3, 4, 5))
    target = np.random.default_rng(1).choice([0, 0.3, 1], x.shape).astype(np.float32)
    sums = np.random.default_rng(2).uniform(1, 15, (2, 3)).astype(np.float32)
    inputs = [x, target, sums] if weighted else [x, target]
    runner = Runner("type: 'YoloSeg' yolo_seg_param { object_scale: 0.7 }", inputs, backend, loss_weight=3.0)
    difference = 0.7 * (1 / (1 + np.exp(-x.astype(np.float64))) - target)
    if weighted:
        total = sums.sum(0)[:, None, None].astype(np.float64)
        difference *= np.where(target > 0.5, 2 - total / (2 * 4 * 5 - total), 1)
    assert_near(runner.forward()[0], (difference**2).sum() / 2, 1e-5, "loss")
    assert_near(runner.backward([np.array(3, "f")])[0], 3 * difference / 2, 1e-5, "gradient")


def test_mistakes_are_named() -> None:
    with pytest.raises(ShapeError, match="same count"):
        Runner("type: 'YoloSeg'", [gaussian((2, 3, 4)), gaussian((2, 3, 5))])
    with pytest.raises(ShapeError, match="one number for each mask"):
        Runner("type: 'YoloSeg'", [gaussian((2, 3, 4)), gaussian((2, 3, 4)), gaussian((2, 4))])

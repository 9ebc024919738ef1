"""PriorBoxClustered, DetectionOutputExtended and AnchorEmbeddingExtractor against plain computations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from detection_reference import decode, suppress
from layer_harness import BACKENDS, TEST, Runner, assert_near, check_layer, gaussian

from caffepy.errors import ConfigError, DataError, ShapeError

# -- PriorBoxClustered ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "image", "step", "offset"),
    [
        ("", (30, 44), (15, 44 / 3), 0.5),
        ("offset: 0.25 clip: true flip: false", (30, 44), (15, 44 / 3), 0.25),
        ("img_size: 50", (50, 50), (25, 50 / 3), 0.5),
        ("img_h: 20 img_w: 60 step_h: 5 step_w: 9", (20, 60), (5, 9), 0.5),
        ("step: 7", (30, 44), (7, 7), 0.5),
    ],
)
def test_boxes_of_given_sizes(more: str, image: tuple[int, int], step: tuple[float, float], offset: float) -> None:
    widths, heights = (9.4, 30.0), (14.7, 6.5)
    wanted = []
    for y in range(2):
        for x in range(3):
            for w, h in zip(widths, heights, strict=True):
                cx, cy = (x + offset) * step[1], (y + offset) * step[0]
                wanted += [(cx - w / 2) / image[1], (cy - h / 2) / image[0]]
                wanted += [(cx + w / 2) / image[1], (cy + h / 2) / image[0]]
    boxes = np.clip(wanted, 0, 1) if "clip" in more else np.array(wanted)
    sizes = "width: 9.4 width: 30 height: 14.7 height: 6.5 variance: 0.1 variance: 0.1 variance: 0.2 variance: 0.3"
    top = np.stack([boxes, np.tile([0.1, 0.1, 0.2, 0.3], 12)])[None]
    inputs = [np.zeros((2, 4, 2, 3), np.float32), np.zeros((2, 3, 30, 44), np.float32)]
    check_layer(f"type: 'PriorBoxClustered' prior_box_param {{ {sizes} {more} }}", inputs, lambda *_: top)


@pytest.mark.parametrize(
    ("kind", "text", "error"),
    [
        ("PriorBoxClustered", "", "has 0 width and 0 height"),
        ("PriorBoxClustered", "width: 3", "has 1 width and 0 height"),
        ("PriorBoxClustered", "width: 3 height: 0", "height 0 must be above 0"),
        ("PriorBoxClustered", "width: -2 height: 4", "width -2 must be above 0"),
        ("PriorBoxClustered", "width: nan height: 4", "width nan must be above 0"),
        ("PriorBoxClustered", "width: 1 height: inf", "height inf must be above 0 and below"),
        ("PriorBoxClustered", "width: 1 height: 1 min_size: 3", "min_size is a setting of PriorBox"),
        ("PriorBoxClustered", "width: 1 height: 1 aspect_ratio: 3", "aspect_ratio is a setting of PriorBox"),
        ("PriorBoxClustered", "width: 1 height: 1 denser_prior_boxes: true", "denser_prior_boxes is a setting of"),
        ("PriorBoxClustered", "width: 1 height: 1 variance: 0", "variance must be given once or four times"),
        ("PriorBox", "min_size: 3 width: 1", "width and height are settings of PriorBoxClustered"),
    ],
)
def test_sizes_that_are_refused(kind: str, text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=rf"layer 'L' \({kind}\): {error}"):
        Runner(f"type: '{kind}' prior_box_param {{ {text} }}", [np.zeros((1, 2, 2, 2), np.float32)] * 2)


# -- DetectionOutputExtended ---------------------------------------------------------------------------

IMAGES, HEIGHT, WIDTH, ANCHORS = 2, 2, 3, 4
PRIORS = HEIGHT * WIDTH * ANCHORS
OUTPUT = "num_classes: 2 code_type: CENTER_SIZE"


def make_inputs(seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    corners = rng.uniform(0, 0.7, (PRIORS, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(0.1, 0.4, (PRIORS, 2))], axis=1)
    scores = rng.uniform(0, 1, (IMAGES, PRIORS))
    inputs = [
        rng.normal(0, 0.5, (IMAGES, HEIGHT, WIDTH, 4 * ANCHORS)),
        np.stack([1 - scores, scores], 2).reshape(IMAGES, -1),
        np.stack([boxes, rng.uniform(0.1, 0.3, (PRIORS, 4))]).reshape(1, 2, -1),
    ]
    return [value.astype(np.float32) for value in inputs]


def extended(text: str, inputs: list[Any], backend: str = "cpu") -> Any:
    text = f"type: 'DetectionOutputExtended' detection_output_param {{ {text} }}"
    return Runner(text, inputs, backend, phase=TEST).forward()[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("keep", "seed"), [(-1, 0), (5, 1), (200, 2)])
def test_boxes_and_their_positions(backend: str, keep: int, seed: int) -> None:
    inputs = make_inputs(seed)
    text = f"{OUTPUT} background_label_id: -1 nms_param {{ nms_threshold: 0.45 top_k: 20 }} keep_top_k: {keep}"
    codes = inputs[0].astype(np.float64).reshape(IMAGES, PRIORS, 4)
    scores = inputs[1].reshape(IMAGES, PRIORS, 2)[:, :, 1]
    priors, variances = inputs[2].astype(np.float64).reshape(2, PRIORS, 4)
    wanted = []
    for image in range(IMAGES):
        boxes = [decode(p, v, 2, False, x) for p, v, x in zip(priors, variances, codes[image], strict=True)]
        order = sorted((p for p in range(PRIORS) if scores[image, p] > 0.3), key=lambda p: -scores[image, p])
        kept = suppress(boxes, order[:20], 0.45, 1.0)
        for p in kept[:keep] if keep >= 0 else kept:
            place = p // ANCHORS
            wanted.append([image, 1, scores[image, p], *boxes[p], p % ANCHORS, place % WIDTH, place // WIDTH])
    assert len(wanted) > 4
    rows = extended(f"{text} confidence_threshold: 0.3", inputs, backend)
    assert rows.shape == (1, 1, len(wanted), 10)
    assert_near(rows[0, 0], np.array(wanted), 1e-5, "rows")


def test_a_batch_without_detections() -> None:
    rows = extended(f"{OUTPUT} confidence_threshold: 2", make_inputs(0))
    assert rows.tolist() == [[[[0.0, *[-1.0] * 9], [1.0, *[-1.0] * 9]]]]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "num_classes is 0; it must be 2"),
        ("num_classes: 3", "num_classes is 3; it must be 2"),
        (f"{OUTPUT} share_location: false", "share_location: false is not supported"),
        (f"{OUTPUT} use_polygon: false", "use_polygon is a setting of DetectionOutput"),
        (f"{OUTPUT} save_output_param {{ }}", "save_output_param is a setting of DetectionOutput"),
        (f"{OUTPUT} nms_param {{ nms_threshold: -1 }}", "nms_threshold -1 must be at least 0"),
    ],
)
def test_output_settings_that_are_refused(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        extended(text, make_inputs(0))


def test_predictions_without_a_grid() -> None:
    loc, conf, priors = make_inputs(0)
    with pytest.raises(ShapeError, match="needs predictions N H W"):
        extended(OUTPUT, [loc.reshape(IMAGES, -1), conf, priors])
    with pytest.raises(ShapeError, match="needs predictions N H W"):
        extended(OUTPUT, [loc.reshape(IMAGES, 4, 4, -1), conf, priors])
    with pytest.raises(ShapeError, match="needs 4 location predictions"):
        extended(OUTPUT, [loc[:, :1], conf, priors])


# -- AnchorEmbeddingExtractor --------------------------------------------------------------------------

MATCHES = np.array(
    [  # image, label, xmin, ymin, xmax, ymax, anchor, track, action, x, y
        [1, 1, 0.1, 0.2, 0.3, 0.4, 0, 7, 2, 3, 1],
        [0, 1, 0.2, 0.2, 0.5, 0.6, 1, 5, 0, 0, 0],
        [-1, 0, 0, 0, 0, 0, 9, 9, 9, 9, 9],
        [1, 1, 0.3, 0.2, 0.7, 0.8, 1, 7, 1, 2, 2],
        [1, 1, 0.3, 0.2, 0.7, 0.8, 1, 7, 4, 2, 2],
        [1, 1, 0.3, 0.2, 0.7, 0.8, 1, 8, 1, 2, 2],
    ],
    np.float32,
)
TAKEN = [0, 1, 3, 5]
"""Matches with an image and an action below 3."""
EXTRACT = "type: 'AnchorEmbeddingExtractor' embedding_extractor_param { num_anchors: 2 label_src_pos: 8"
MAPS = [gaussian((2, 5, 3, 4), seed) for seed in (1, 2)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("setting", "third"),
    [
        ("output_instance_weights: true", np.array([0.5, 1, 0.5, 1], np.float32)),
        ("output_proposals: true", MATCHES[TAKEN][:, [0, 2, 3, 4, 5]]),
    ],
)
def test_embeddings_labels_and_the_third_top(backend: str, setting: str, third: Any) -> None:
    runner = Runner(f"{EXTRACT} num_valid_actions: 3 {setting} }}", [MATCHES[None, None], *MAPS], backend, tops=3)
    tops = runner.forward()
    rows = [MAPS[match[6]][match[0], :, match[10], match[9]] for match in MATCHES[TAKEN].astype(int)]
    for found, wanted in zip(tops, (np.stack(rows), np.array([2, 0, 1, 1], np.float32), third), strict=True):
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_maps_adds_up_where_matches_meet(backend: str) -> None:
    runner = Runner(f"{EXTRACT} num_valid_actions: 3 }}", [MATCHES, *MAPS], backend)
    runner.forward()
    dy = gaussian((len(TAKEN), 5), 9)
    found = runner.backward([dy, np.zeros(len(TAKEN), np.float32)])
    wanted = [np.zeros_like(MAPS[0]) for _ in MAPS]
    for row, match in zip(dy, MATCHES[TAKEN].astype(int), strict=True):
        wanted[match[6]][match[0], :, match[10], match[9]] += row
    assert found[0] is None
    for number in (0, 1):
        assert_near(found[1 + number], wanted[number], 1e-6, f"map {number}")


def test_no_match() -> None:
    runner = Runner(f"{EXTRACT} output_proposals: true }}", [MATCHES[2:3], *MAPS], tops=3)
    rows, labels, boxes = runner.forward()
    assert not rows.any() and rows.shape == (1, 5)
    assert labels.tolist() == [-1] and boxes.tolist() == [[-1] * 5]
    diffs = runner.backward([rows, labels, boxes])
    assert not diffs[1].any() and not diffs[2].any()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("num_anchors: 3 label_src_pos: 8", "num_anchors is 3, but there are 2 maps"),
        ("label_src_pos: 8", "num_anchors is 0"),
        ("num_anchors: 2", "label_src_pos is 0; give a column"),
        ("num_anchors: 2 label_src_pos: 11", "label_src_pos is 11"),
        ("num_anchors: 2 label_src_pos: -1", "label_src_pos is -1"),
        ("num_anchors: 2 label_src_pos: 8", "third top needs"),
        (
            "num_anchors: 2 label_src_pos: 8 output_instance_weights: true output_proposals: true",
            "third top needs .* not both",
        ),
    ],
)
def test_extractor_settings_that_are_refused(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        Runner(f"type: 'AnchorEmbeddingExtractor' embedding_extractor_param {{ {text} }}", [MATCHES, *MAPS], tops=3)


def test_shapes_and_matches_that_do_not_fit() -> None:
    with pytest.raises(ShapeError, match="matches of 11 columns"):
        Runner(EXTRACT + "}", [MATCHES[:, :10], *MAPS])
    with pytest.raises(ShapeError, match="maps N E H W of one shape"):
        Runner(EXTRACT + "}", [MATCHES, MAPS[0], MAPS[1][:, :3]])
    for column, value, name in ((0, 2, "image 2"), (6, 2, "anchor 2"), (9, 4, "x 4"), (10, -1, "y -1")):
        matches = MATCHES[:1].copy()
        matches[0, column] = value
        with pytest.raises(DataError, match=f"a match with {name}; it must be from 0"):
            Runner(EXTRACT + "}", [matches, *MAPS]).forward()

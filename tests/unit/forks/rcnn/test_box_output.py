"""BoxOutput and BoxGroupOutput against loops over plain numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layer_harness import BACKENDS, assert_near
from mscnn_reference import decoded, iou, run

import caffepy
from caffepy.errors import ConfigError, ShapeError

MEAN, STD = (0.1, -0.1, 0.05, 0.2), (0.1, 0.2, 0.3, 0.4)
REGRESSION = (
    "bbox_reg_param { " + " ".join(f"bbox_mean: {m} bbox_std: {s}" for m, s in zip(MEAN, STD, strict=True)) + " }"
)
MAPS = ((5, 6, 8), (3, 3, 16))
"""Rows, columns and stride of two maps."""
FIELDS = ((20, 24), (40, 30))
"""Width and height of their anchors."""
CLASSES = 3
POOLING = "roi_pooling_param { pooled_w: 2 pooled_h: 2 spatial_scale: 0.125 }"
BASE = "field_w: 20 field_w: 40 field_h: 24 field_h: 30 downsample_rate: 8 downsample_rate: 16"


def maps(seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.normal(0, 1, (2, CLASSES + 4, rows, columns)).astype(np.float32) for rows, columns, _ in MAPS]


def greedy(rows: list[list[float]], threshold: float, least: float, most: int) -> list[list[float]]:
    kept: list[list[float]] = []
    for row in rows:
        if len(kept) < most and all(iou(other[:4], row[:4], least) <= threshold for other in kept):
            kept.append(row)
    return kept


def anchors(inputs: list[Any], image: int) -> Iterator[tuple[Any, ...]]:
    """Score, offsets, place, width and height of the field, and map of each anchor."""
    for value, one, field in zip(inputs, MAPS, FIELDS, strict=True):
        for place in np.ndindex(one[:2]):
            v = value[image, :, *place]
            yield max(v[1:CLASSES]) - v[0], v[CLASSES:], place, field, one


def wanted(
    anchors: Iterable[Iterable[tuple[Any, ...]]],
    unit: int,
    fg: float = 0,
    threshold: float = 0.5,
    limits: Any = (2, 2),
    most: int = 0,
    after: int = 0,
    least: float = 15,
    mean: Any = (0,) * 4,
    std: Any = (1,) * 4,
) -> Any:
    """Boxes of the anchors of each image. A box of whole pixels (`unit` 1) is cut off where it ends uncut."""
    found = []
    for image, of_image in enumerate(anchors):
        rows = []
        for score, offsets, place, field, (height, width, stride) in of_image:
            x, y, w, h = decoded(offsets, place, field, stride, limits, mean, std)
            x1, y1 = max(x, 0), max(y, 0)
            x, y = (x, y) if unit else (x1, y1)
            w = min(x + w - unit, width * stride) - x1 + unit
            h = min(y + h - unit, height * stride) - y1 + unit
            if score >= fg and min(w, h) >= least:
                rows.append([x1, y1, w, h, score])
        rows.sort(key=lambda row: -row[4])
        for x, y, w, h, score in greedy(rows[: most or None], threshold, unit, after or 10**9):
            found.append([image, x, y, x + w - unit, y + h - unit, score])
    return np.array(found)


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("field_whr: 4 field_xyr: 1", {"limits": (1, 4)}),
    ("max_nms_num: 9", {"most": 9}),
    ("max_post_nms_num: 3", {"after": 3}),
    ("min_size: 22", {"least": 22}),
]
"""Of both types, with what they say to `wanted`."""


def check(layer: str, inputs: list[Any], rows: Any, backend: str) -> None:
    rois, scored = run(layer, inputs, tops=2, backend=backend)
    assert len(rows) > 2
    assert_near(scored[:, :, 0, 0], rows, 1e-5, "boxes")
    np.testing.assert_array_equal(rois, scored[:, :5])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("fields", "arguments"),
    [*SETTINGS, ("fg_thr: 0.5", {"fg": 0.5}), ("iou_thr: 0.2", {"threshold": 0.2}), ("", {"mean": MEAN, "std": STD})],
)
def test_boxes_are_those_of_the_formula(backend: str, fields: str, arguments: Any) -> None:
    text = f'type: "BoxOutput" box_output_param {{ {BASE} {fields} }} {REGRESSION if "mean" in arguments else ""}'
    check(text, maps(), wanted((anchors(maps(), image) for image in range(2)), 0, **arguments), backend)


def test_a_deploy_net_pools_limited_boxes(tmp_path: Path) -> None:
    """The blobs of a loaded net share memory; those of the boxes have other shapes in a pass than before it."""
    shapes = "".join(f"shape {{ {' '.join(f'dim: {n}' for n in value.shape)} }} " for value in maps())
    layer = f'type: "BoxOutput" box_output_param {{ {BASE} max_post_nms_num: 9 }}'
    file = tmp_path / "deploy.prototxt"
    file.write_text(
        f"""layer {{ name: "maps" type: "Input" top: "a" top: "b" input_param {{ {shapes} }} }}
        layer {{ name: "boxes" bottom: "a" bottom: "b" top: "rois" {layer} }}
        layer {{ name: "pool" type: "ROIPooling" bottom: "a" bottom: "rois" top: "y" {POOLING} }}"""
    )
    (rois,) = run(layer, maps())
    assert 2 < len(rois) <= 18
    (pooled,) = run(f'type: "ROIPooling" {POOLING}', [maps()[0], rois])
    net = caffepy.load(file)
    for _ in range(2):
        np.testing.assert_array_equal(net(*maps())["y"], pooled)


def test_without_boxes_there_is_one_that_can_be_pooled() -> None:
    rois, scored = run(f'type: "BoxOutput" box_output_param {{ {BASE} fg_thr: 99 }}', maps(), tops=2)
    assert rois.ravel().tolist() == [0, 1, 1, 10, 10]
    assert scored.ravel().tolist() == [0, 1, 1, 10, 10, 0]


def test_modes_of_overlap() -> None:
    """A small box within a large one with a higher score: dropped by its own size, and by the smaller one's."""
    value = np.zeros((1, 6, 1, 2), np.float32)
    value[0, 1, 0] = [2, 1]
    value[0, 4:, 0, 0] = np.log(2)
    settings = "field_w: 32 field_h: 32 downsample_rate: 16 min_size: 1 iou_thr: 0.5"
    counts = {}
    for mode in ("IOU", "IOMU", "IOFU"):
        (rois,) = run(f'type: "BoxOutput" box_output_param {{ {settings} nms_type: "{mode}" }}', [value])
        counts[mode] = len(rois)
    assert counts["IOMU"] == 1
    assert counts["IOU"] >= counts["IOMU"]
    with pytest.raises(ConfigError, match="nms_type is 'x'"):
        run(f'type: "BoxOutput" box_output_param {{ {settings} nms_type: "x" }}', [value])


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="for each of its 2 bottoms"):
        run('type: "BoxOutput" box_output_param { field_w: 3 field_h: 3 downsample_rate: 8 }', maps())
    with pytest.raises(ConfigError, match="four bbox_mean"):
        run(f'type: "BoxOutput" box_output_param {{ {BASE} }} bbox_reg_param {{ bbox_mean: 1 bbox_std: 1 }}', maps())
    with pytest.raises(ShapeError, match="2 or more classes"):
        run(f'type: "BoxOutput" box_output_param {{ {BASE} }}', [value[:, :5] for value in maps()])


# -- BoxGroupOutput ------------------------------------------------------------------------------------

KINDS = ((20, 24), (36, 16))
GROUPS = (
    "box_group_param { stride: 8 field_w: 20 field_w: 36 field_h: 24 field_h: 16 } "
    "box_group_param { stride: 16 field_w: 44 field_h: 40 }"
)


def group_inputs() -> list[Any]:
    rng = np.random.default_rng(3)
    found = []
    for (rows, columns, _), kinds in zip(MAPS, (2, 1), strict=True):
        scores = rng.dirichlet((1, 1), (2 * kinds, rows, columns)).transpose(0, 3, 1, 2)
        found += [scores.astype(np.float32), rng.normal(0, 1, (2 * kinds, 4, rows, columns)).astype(np.float32)]
    return found


def group_anchors(inputs: list[Any], image: int) -> Iterator[tuple[Any, ...]]:
    """`anchors`, of BoxGroupOutput."""
    for number, (one, fields) in enumerate(zip(MAPS, (KINDS, ((44, 40),)), strict=True)):
        for kind, field in enumerate(fields):
            scores, offsets = (inputs[2 * number + which][image * len(fields) + kind] for which in (0, 1))
            for place in np.ndindex(one[:2]):
                yield 1 - scores[0, *place], offsets[:, *place], place, field, one


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("fields", "arguments"),
    [*SETTINGS, ("fg_thr: 0.7", {"fg": 0.7}), ("iou_thr: 0.2 nms_type: 'IOU'", {"threshold": 0.2})],
)
def test_group_boxes_are_those_of_the_formula(backend: str, fields: str, arguments: Any) -> None:
    text = f'type: "BoxGroupOutput" box_group_output_param {{ {GROUPS} {fields} }}'
    inputs = group_inputs()
    check(text, inputs, wanted((group_anchors(inputs, image) for image in range(2)), 1, **arguments), backend)


def test_group_settings_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="4 bottoms and 0 box_group_param"):
        run('type: "BoxGroupOutput"', group_inputs())
    with pytest.raises(ConfigError, match="as many field_w as field_h"):
        group = "box_group_param { stride: 8 field_w: 3 } box_group_param { stride: 8 field_w: 3 field_h: 3 }"
        run(f'type: "BoxGroupOutput" box_group_output_param {{ {group} }}', group_inputs())
    with pytest.raises(ShapeError, match=r"N \* 2"):
        inputs = group_inputs()
        run(f'type: "BoxGroupOutput" box_group_output_param {{ {GROUPS} }}', [inputs[0], inputs[3], *inputs[2:]])

"""DetectionEvaluate against a plain computation; its file of sizes; its errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from detection_reference import iou
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_harness import BACKENDS, backend_named

from caffepy.backend.meta import MetaBackend
from caffepy.data.sharding import Shard
from caffepy.errors import ConfigError, DataError, ShapeError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.net.net import Net


def build(text: str, found: Any, objects: Any, backend: Any, shard: Shard | None = None) -> Net:
    param = ""
    for name, rows in (("det", found), ("gt", objects)):
        dims = f"dim: 1 dim: 1 dim: {rows.shape[0]} dim: {rows.shape[1]}"
        param += f'layer {{ name: "{name}" type: "Input" top: "{name}" input_param {{ shape {{ {dims} }} }} }} '
    param += 'layer { name: "L" type: "DetectionEvaluate" bottom: "det" bottom: "gt" top: "y" '
    param += f"detection_evaluate_param {{ {text} }} }}"
    context = LayerContext(backend, caffe_pb2.TEST, shard=shard or Shard())
    net = Net(text_format.Parse(param, caffe_pb2.NetParameter()), context)
    for name, rows in (("det", found), ("gt", objects)):
        backend.from_host(rows[None, None], net.blobs[name].data)
    return net


def evaluate(text: str, found: Any, objects: Any, backend: str = "cpu") -> Any:
    device = backend_named(backend)
    with device.activate():
        net = build(text, found, objects, device)
        net.forward()
        return net.blobs["y"].host_data()[0, 0]


def _rows(count: int, columns: int, rng: np.random.Generator) -> Any:
    rows = np.zeros((count, columns), np.float32)
    rows[:, 0], rows[:, 1] = rng.integers(0, 3, count), rng.integers(1, 4, count)
    corners = rng.integers(0, 3, (count, 2)) * 0.2
    rows[:, 3:5], rows[:, 5:7] = corners, corners + rng.uniform(0.3, 0.5, (count, 2))
    return rows


def make_inputs(seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    found, objects = _rows(20, 7, rng), _rows(9, 8, rng)
    found[:, 2] = rng.permutation(20) / 20
    found[rng.integers(20), 1] = -1  # an image in which nothing was found
    objects[:, 7] = rng.integers(0, 2, 9)
    objects[8, 0] = -1
    return found, objects


def plain_rows(
    param: Any, found: Any, objects: Any, overlap: Callable[[int, Any, Any], float] = lambda _, a, b: iou(a, b)
) -> list[list[float]]:
    """Row by row; `overlap` of two boxes is also given the image's place among those with detections."""
    objects = [row for row in objects if row[0] != -1 and row[1] > param.background_label_id]
    rows: list[list[float]] = []
    for label in range(param.num_classes):
        own = [o for o in objects if o[1] == label and (param.evaluate_difficult_gt or not o[7])]
        if label != param.background_label_id:
            rows.append([-1, label, len(own), -1, -1])
    for turn, image in enumerate(sorted({row[0] for row in found})):
        for label in sorted({row[1] for row in found if row[0] == image} - {-1}):
            own = [o for o in objects if o[0] == image and o[1] == label]
            boxes = [row for row in found if row[0] == image and row[1] == label]
            taken: set[int] = set()
            for row in sorted(boxes, key=lambda row: -row[2]) if own else boxes:
                overlaps = [overlap(turn, row[3:], o[3:7]) for o in own]
                best = max(overlaps, default=-1)
                hit, miss = 0, 1
                if best >= param.overlap_threshold:
                    j = overlaps.index(best)
                    counts = param.evaluate_difficult_gt or not own[j][7]
                    hit, miss = int(counts and j not in taken), int(counts and j in taken)
                    taken |= {j} if counts else set()
                rows.append([image, label, row[2], hit, miss])
    return rows


@pytest.mark.parametrize("backend", BACKENDS)
@given(st.booleans(), st.sampled_from([0.3, 0.6]), st.sampled_from([0, 1]), st.integers(0, 10_000))
@settings(max_examples=40, derandomize=True)
def test_against_a_plain_computation(
    backend: str, difficult: bool, threshold: float, background: int, seed: int
) -> None:
    text = f"num_classes: 4 overlap_threshold: {threshold} evaluate_difficult_gt: {str(difficult).lower()} "
    text += f"background_label_id: {background}"
    found, objects = make_inputs(seed)
    found[found[:, 1] == background, 1] = 3
    param = text_format.Parse(text, caffe_pb2.DetectionEvaluateParameter())
    np.testing.assert_array_equal(
        evaluate(text, found, objects, backend), np.array(plain_rows(param, found, objects), np.float32)
    )


FOUND = np.array([[0, 1, 0.9, 0.1, 0.1, 0.35, 0.5]], np.float32)
OBJECT = np.array([[0, 1, 0, 0.1, 0.1, 0.6, 0.5, 0]], np.float32)


def test_sizes_are_taken_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an image two pixels wide the boxes, with the pixels of their border, overlap far more than in a wide one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sizes.txt").write_text("wide 1000 1000\nnarrow 1000 2\n")
    device = backend_named("cpu")
    text = 'num_classes: 2 overlap_threshold: 0.6 name_size_file: "sizes.txt"'
    hits = []
    net = build(text, FOUND, OBJECT, device)
    for _ in range(4):
        net.forward()
        hits.append(int(net.blobs["y"].host_data()[0, 0, 1, 3]))
    assert hits == [0, 1, 0, 1]
    resumed = build(text, FOUND, OBJECT, device)
    resumed.context.first_sample = lambda number: 3 + number
    hits.clear()
    for _ in range(3):
        resumed.forward()
        hits.append(int(resumed.blobs["y"].host_data()[0, 0, 1, 3]))
    assert hits == [1, 0, 1]


def in_pixels(box: Any, size: tuple[int, int], resize: Any) -> tuple[list[float], float]:
    """A box of the net's input in pixels of an image of that height and width, and its area."""
    height, width = size
    left, top, right, bottom = (float(value) for value in box)
    if resize.resize_mode == resize.FIT_SMALL_SIZE and resize.height_scale and resize.width_scale:
        across, down = resize.width_scale, resize.height_scale
        corners = zip((left * across, top * down, right * across, bottom * down), (width, height) * 2, strict=True)
        pixels = [min(max(value, 0), most) for value, most in corners]
        return pixels, (pixels[2] - pixels[0]) * (pixels[3] - pixels[1])
    if resize.resize_mode == resize.FIT_LARGE_SIZE_AND_PAD:
        across = min(1, width / height * resize.height / resize.width)  # the image's part of the padded input
        down = min(1, height / width * resize.width / resize.height)
        begins = (1 - across) / 2, (1 - down) / 2
        if begins[0] < right and left < 1 - begins[0] and begins[1] < bottom and top < 1 - begins[1]:
            left, right = ((value - begins[0]) / across for value in (left, right))
            top, bottom = ((value - begins[1]) / down for value in (top, bottom))
    parts = [min(max(value, 0), 1) for value in (left, top, right, bottom)]
    pixels = [part * side for part, side in zip(parts, (width, height) * 2, strict=True)]
    return pixels, (pixels[2] - pixels[0] + 1) * (pixels[3] - pixels[1] + 1)


@pytest.mark.parametrize(
    "resize",
    [
        "",
        "height: 9 width: 9",
        "resize_mode: FIT_LARGE_SIZE_AND_PAD height: 30 width: 40",
        "resize_mode: FIT_LARGE_SIZE_AND_PAD height: 40 width: 20",
        "resize_mode: FIT_SMALL_SIZE height: 30 width: 40",
        "resize_mode: FIT_SMALL_SIZE height: 30 width: 40 height_scale: 60 width_scale: 100",
    ],
)
def test_boxes_are_taken_back_through_the_resize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resize: str) -> None:
    """What a detection hits is decided in the pixels of the image before it was resized, padded or cut."""
    monkeypatch.chdir(tmp_path)
    sizes = [(40, 200), (90, 70), (60, 80)]
    (tmp_path / "sizes.txt").write_text("".join(f"{n} {height} {width}\n" for n, (height, width) in enumerate(sizes)))
    text = 'num_classes: 4 overlap_threshold: 0.45 evaluate_difficult_gt: true name_size_file: "sizes.txt" '
    text += f"resize_param {{ {resize} }}" if resize else ""
    param = text_format.Parse(text, caffe_pb2.DetectionEvaluateParameter())

    def overlap(turn: int, one: Any, other: Any) -> float:
        (a, a_area), (b, b_area) = (in_pixels(box, sizes[turn], param.resize_param) for box in (one, other))
        sides = [min(a[axis + 2], b[axis + 2]) - max(a[axis], b[axis]) for axis in (0, 1)]
        shared = (sides[0] + 1) * (sides[1] + 1) if min(sides) >= 0 else 1  # Caffe's of boxes that do not touch
        return shared / (a_area + b_area - shared)

    hits, plainly = 0.0, 0.0
    for seed in range(12):
        found, objects = make_inputs(seed)
        rows = np.array(plain_rows(param, found, objects, overlap), np.float32)
        np.testing.assert_array_equal(evaluate(text, found, objects), rows)
        hits += rows[:, 3].clip(0).sum()
        plainly += np.array(plain_rows(param, found, objects))[:, 3].clip(0).sum()
    assert hits != plainly or "FIT" not in resize


def test_detections_of_no_image_leave_empty_rows() -> None:
    found = np.concatenate([FOUND, FOUND * np.array([0, 1, 1, 1, 1, 1, 1]) - np.array([1, 0, 0, 0, 0, 0, 0])])
    rows = evaluate("num_classes: 2 overlap_threshold: 0.4", found.astype(np.float32), OBJECT)
    np.testing.assert_array_equal(rows[:, 3:], [[-1, -1], [1, 0], [0, 0]])
    assert rows[2].tolist() == [0] * 5


def test_the_meta_device_and_graphs() -> None:
    net = build("num_classes: 2", FOUND, OBJECT, MetaBackend())
    net.forward()
    assert net.nodes[-1].layer.capture_blocker() == "it compares boxes on the host"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "num_classes is needed"),
        ("num_classes: 2 background_label_id: 2", "background_label_id 2 is not below num_classes 2"),
        ("num_classes: 2 overlap_threshold: 0", "overlap_threshold 0 must be above 0"),
        ("num_classes: 2 resize_param { }", "resize_param needs .*height and width"),
    ],
)
def test_settings_that_do_not_hold_together(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=rf"layer 'L' \(DetectionEvaluate\): {error}"):
        build(text, FOUND, OBJECT, backend_named("cpu"))


def test_values_that_do_not_hold_together() -> None:
    for column, value, error in (
        (1, 0, "row 0 of 'det' is a detection of the background, class 0"),
        (2, np.nan, "row 0 of 'det' has image 0, label 1, score nan, which are not all finite"),
        (0, np.inf, "row 0 of 'det' has image inf"),
    ):
        found = FOUND.copy()
        found[0, column] = value
        with pytest.raises(DataError, match=error):
            evaluate("num_classes: 2", found, OBJECT)
    with pytest.raises(ShapeError, match="needs detections 1 1 D 7 and objects 1 1 G 8"):
        evaluate("num_classes: 2", FOUND[:, :6], OBJECT)

"""DetectionOutput against a plain computation, its result files, its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from detection_reference import decode, suppress
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_harness import BACKENDS, assert_near, backend_named

from caffepy.backend.meta import MetaBackend
from caffepy.data.sharding import Shard
from caffepy.errors import ConfigError, DataError, ShapeError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.layers.detection.output import _number
from caffepy.net.net import Net

IMAGES, PRIORS, CLASSES = 2, 30, 4


def make_inputs(seed: int, locations: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    corners = rng.uniform(0, 0.7, (PRIORS, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(0.1, 0.4, (PRIORS, 2))], axis=1)
    scores = rng.dirichlet(np.full(CLASSES, 0.6), (IMAGES, PRIORS))
    return {
        "loc": rng.normal(0, 0.5, (IMAGES, PRIORS * locations * 4)).astype(np.float32),
        "conf": scores.reshape(IMAGES, -1).astype(np.float32),
        "prior": np.stack([boxes, rng.uniform(0.1, 0.3, (PRIORS, 4))]).reshape(1, 2, -1).astype(np.float32),
    }


def build(text: str, inputs: dict[str, Any], backend: Any, shard: Shard | None = None) -> Net:
    param = ""
    for name, value in inputs.items():
        dims = " ".join(f"dim: {d}" for d in value.shape)
        param += f'layer {{ name: "{name}" type: "Input" top: "{name}" input_param {{ shape {{ {dims} }} }} }} '
    param += 'layer { name: "L" type: "DetectionOutput" bottom: "loc" bottom: "conf" bottom: "prior" top: "y" '
    param += f"detection_output_param {{ {text} }} }}"
    context = LayerContext(backend, caffe_pb2.TEST, shard=shard or Shard())
    net = Net(text_format.Parse(param, caffe_pb2.NetParameter()), context)
    for name, value in inputs.items():
        backend.from_host(value, net.blobs[name].data)
    return net


def detect(text: str, inputs: dict[str, Any], backend: str = "cpu") -> Any:
    device = backend_named(backend)
    with device.activate():
        net = build(text, inputs, device)
        net.forward()
        return net.blobs["y"].host_data()


def plain_rows(param: Any, inputs: dict[str, Any]) -> list[list[float]]:
    """Image by image, class by class, box by box."""
    locations = 1 if param.share_location else CLASSES
    loc = inputs["loc"].astype(np.float64).reshape(IMAGES, PRIORS, locations, 4)
    conf = inputs["conf"].reshape(IMAGES, PRIORS, CLASSES)
    priors, variances = inputs["prior"].astype(np.float64).reshape(2, PRIORS, 4)
    rows = []
    for image in range(IMAGES):
        found = []
        for label in range(CLASSES):
            if label == param.background_label_id:
                continue
            boxes = [
                decode(p, v, param.code_type, param.variance_encoded_in_target, x[label if locations > 1 else 0])
                for p, v, x in zip(priors, variances, loc[image], strict=True)
            ]
            scores = conf[image, :, label]
            order = [p for p in range(PRIORS) if scores[p] > (param.confidence_threshold or -1)]
            order.sort(key=lambda p: -scores[p])
            if param.nms_param.HasField("top_k"):
                order = order[: param.nms_param.top_k]
            kept = suppress(boxes, order, param.nms_param.nms_threshold, param.nms_param.eta)
            found += [(label, scores[p], *boxes[p]) for p in kept]
        if 0 <= param.keep_top_k < len(found):
            found = sorted(sorted(found, key=lambda row: -row[1])[: param.keep_top_k], key=lambda row: row[0])
        rows += [[image, *row] for row in found]
    return rows or [[image, *[-1.0] * 6] for image in range(IMAGES)]


SETTINGS = st.tuples(
    st.sampled_from(["CORNER", "CENTER_SIZE", "CORNER_SIZE"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", "background_label_id: 3", "background_label_id: -1"]),
    st.sampled_from(["", "confidence_threshold: 0.2", "confidence_threshold: 0.999999"]),
    st.sampled_from(["", "nms_param { nms_threshold: 0.45 top_k: 8 }", "nms_param { nms_threshold: 0.8 eta: 0.85 }"]),
    st.sampled_from(["", "keep_top_k: 10", "keep_top_k: 0"]),
)


@pytest.mark.parametrize("backend", BACKENDS)
@given(SETTINGS, st.integers(0, 10_000))
@settings(max_examples=50, derandomize=True)
def test_all_settings_against_a_plain_computation(backend: str, chosen: Any, seed: int) -> None:
    code, share, in_target, *more = chosen
    text = f"num_classes: {CLASSES} code_type: {code} share_location: {str(share).lower()} "
    text += f"variance_encoded_in_target: {str(in_target).lower()} " + " ".join(more)
    param = text_format.Parse(text, caffe_pb2.DetectionOutputParameter())
    inputs = make_inputs(seed, 1 if share else CLASSES)
    assert_near(detect(text, inputs, backend)[0, 0], np.array(plain_rows(param, inputs)), 1e-5, "rows")


@pytest.mark.parametrize("polygon", [True, False])
@pytest.mark.parametrize("share", [True, False])
def test_quadrangles_and_turned_rectangles_follow_the_boxes(polygon: bool, share: bool) -> None:
    """The first seven columns are those of the boxes alone; the others are the shapes of the same priors."""
    count, locations = 8 if polygon else 5, 1 if share else CLASSES
    text = f"num_classes: {CLASSES} code_type: CENTER_SIZE nms_param {{ nms_threshold: 0.5 }} keep_top_k: 12 "
    text += f"share_location: {str(share).lower()} "
    plain = make_inputs(3, locations)
    codes = np.random.default_rng(4).normal(0, 1, (IMAGES, PRIORS, locations, count)).astype(np.float32)
    boxes = plain["loc"].reshape(IMAGES, PRIORS, locations, 4)
    inputs = plain | {"loc": np.concatenate([boxes, codes], 3).reshape(IMAGES, -1)}
    rows = detect(f"{text} use_polygon: {str(polygon).lower()}", inputs)[0, 0]
    assert np.array_equal(rows[:, :7], detect(text, plain)[0, 0]) and rows.shape[1] == 7 + count
    priors, variances = inputs["prior"].astype(np.float64).reshape(2, PRIORS, 4)
    scores = inputs["conf"].reshape(IMAGES, PRIORS, CLASSES)
    for row in rows:
        image, label, score = row[:3]
        p = int(np.flatnonzero(scores[int(image), :, int(label)] == score)[0])
        (x1, y1, x2, y2), v = priors[p], variances[p]
        code = codes[int(image), p, 0 if share else int(label)].astype(np.float64)
        width, height = x2 - x1, y2 - y1
        if polygon:
            corners = [(x1, y1), (x2, y1), (x2, y2), (x1, y2)]
            wanted = [
                value
                for (x, y), (dx, dy) in zip(corners, code.reshape(4, 2), strict=True)
                for value in (x + v[0] * dx * width, y + v[1] * dy * height)
            ]
        else:
            x, y = (x1 + x2) / 2, (y1 + y2) / 2
            wanted = [x + v[0] * code[0] * width, y + v[1] * code[1] * height]
            wanted += [x + v[0] * code[2] * width, y + v[1] * code[3] * height, np.exp(v[3] * code[4]) * height]
        np.testing.assert_allclose(row[7:], wanted, rtol=1e-5, atol=1e-6)


def test_shapes_of_images_without_detections() -> None:
    inputs = make_inputs(1)
    inputs["loc"] = np.zeros((IMAGES, PRIORS * 12), np.float32)
    for setting in ("classes: 3", "num_box: 2", "coords: 4", "nms_threshold: 0.4", "biases: 1 biases: 2 keep_top_k: 3"):
        with pytest.raises(ConfigError, match=f"{setting.split(':')[0]} is a setting of YOLO 2"):
            detect(f"num_classes: {CLASSES} {setting}", make_inputs(0))
    text = f"num_classes: {CLASSES} code_type: CENTER_SIZE use_polygon: true"
    rows = detect(f"{text} confidence_threshold: 1", inputs)[0, 0]
    assert np.array_equal(rows, [[0, *[-1] * 14], [1, *[-1] * 14]])
    for more in ("code_type: CORNER", "code_type: CENTER_SIZE variance_encoded_in_target: true"):
        with pytest.raises(ConfigError, match="use_polygon needs code_type CENTER_SIZE"):
            detect(f"num_classes: {CLASSES} use_polygon: true {more}", inputs)


def test_equal_scores_keep_the_order_of_the_priors() -> None:
    inputs = make_inputs(1)
    inputs["conf"][:] = 0.25
    text = f"num_classes: {CLASSES} nms_param {{ nms_threshold: 1 top_k: 5 }}"
    rows = detect(text, inputs)[0, 0]
    priors = inputs["prior"][0, 0].reshape(-1, 4)
    wanted = priors[:5] + inputs["prior"][0, 1].reshape(-1, 4)[:5] * inputs["loc"][0].reshape(-1, 4)[:5]
    assert_near(rows[:5, 3:], wanted, 1e-6, "the first five priors")


def test_scores_that_are_not_numbers_are_no_detections() -> None:
    inputs = make_inputs(2)
    inputs["conf"][:] = np.nan
    rows = detect(f"num_classes: {CLASSES}", inputs)[0, 0]
    np.testing.assert_array_equal(rows, [[0, *[-1] * 6], [1, *[-1] * 6]])


def test_boxes_that_are_not_numbers_do_not_end_the_run() -> None:
    inputs = make_inputs(2)
    inputs["loc"][:, ::5] = np.nan
    inputs["loc"][:, 1::7] = np.inf
    rows = detect(f"num_classes: {CLASSES} code_type: CENTER_SIZE", inputs)[0, 0]
    assert np.isfinite(rows[:, 2]).all()


def test_the_meta_device_and_graphs() -> None:
    net = build(f"num_classes: {CLASSES}", make_inputs(0), MetaBackend())
    net.forward()
    assert net.blobs["y"].shape == (1, 1, 1, 7)
    layer = net.nodes[-1].layer
    assert layer.capture_blocker() == "it suppresses boxes on the host"
    assert layer.changes_shapes


SAVE = """num_classes: 3 share_location: true nms_param {{ nms_threshold: 0.9 }} confidence_threshold: 0.5
save_output_param {{ output_directory: "out" output_name_prefix: "det_" output_format: "{}" label_map_file: "map.txt"
  name_size_file: "sizes.txt" {} }}"""
BOXES = np.array([[0.1, 0.2, 0.5, 0.75], [-0.2, 0.5, 0.3, 1.2]], np.float32)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    items = [(0, "none_of_the_above", "background"), (1, "cat", "Cat"), (2, "7", "Dog")]
    text = "".join(f'item {{ label: {n} name: "{name}" display_name: "{shown}" }}\n' for n, name, shown in items)
    (tmp_path / "map.txt").write_text(text)
    (tmp_path / "sizes.txt").write_text("000123 100 200\nb 50 60\n")
    return tmp_path


def _two_images() -> dict[str, Any]:
    """In each of two images one box of class 1 and one of class 2."""
    scores = np.array([[0.05, 0.9, 0.05], [0.1, 0.25, 0.65]], np.float32)
    priors = np.stack([BOXES, np.full((2, 4), 0.1, np.float32)])
    return {
        "loc": np.zeros((2, 8), np.float32),
        "conf": np.tile(scores.ravel(), (2, 1)),
        "prior": priors.reshape(1, 2, 8),
    }


def test_voc_files(files: Path) -> None:
    detect(SAVE.format("VOC", ""), _two_images())
    assert (files / "out/det_cat.txt").read_text() == "000123 0.9 20 20 100 75\nb 0.9 6 10 30 37\n"
    assert (files / "out/det_7.txt").read_text() == "000123 0.65 0 50 60 100\nb 0.65 0 25 18 50\n"
    assert sorted(p.name for p in (files / "out").iterdir()) == ["det_7.txt", "det_cat.txt"]


def test_ilsvrc_file(files: Path) -> None:
    detect(SAVE.format("ILSVRC", ""), _two_images())
    lines = ["000123 1 0.9 20 20 100 75", "000123 2 0.65 0 50 60 100", "b 1 0.9 6 10 30 37", "b 2 0.65 0 25 18 50"]
    assert (files / "out/det_.txt").read_text().splitlines() == lines


def test_coco_file(files: Path) -> None:
    detect(SAVE.format("COCO", ""), _two_images())
    found = json.loads((files / "out/det_.json").read_text())
    assert found[0] == {"image_id": 123, "category_id": "cat", "bbox": [20, 20, 80, 55], "score": pytest.approx(0.9)}
    assert found[3] == {"image_id": "b", "category_id": 7, "bbox": [0, 25, 18, 25], "score": pytest.approx(0.65)}


def test_names_that_are_long_numbers_stay_texts() -> None:
    """Python reads no number of more than 4300 digits, and JSON has no infinity."""
    for name in ("9" * 5000, "9" * 400 + ".5"):
        assert _number(name) == name
    assert _number("12") == 12 and _number("-1.5") == -1.5


@pytest.mark.parametrize(("kind", "name", "whole"), [("ILSVRC", "det_.txt", 4), ("VOC", "det_cat.txt", 2)])
def test_files_are_written_each_time_the_images_are_through(files: Path, kind: str, name: str, whole: int) -> None:
    """And stay until the next time, VOC's too."""
    device = backend_named("cpu")
    inputs = {name: value[:1] for name, value in _two_images().items()}
    net = build(SAVE.format(kind, ""), inputs, device)
    for number, lines in enumerate([0, whole, whole, whole]):
        net.forward()
        path = files / "out" / name
        assert (len(path.read_text().splitlines()) if path.exists() else 0) == lines, number


def test_a_resumed_run_goes_on_with_the_name_of_its_first_image(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The test's data go on where they were, so the names do; the first round lacks the images before."""
    inputs = {name: value[:1] for name, value in _two_images().items()}
    net = build(SAVE.format("ILSVRC", ""), inputs, backend_named("cpu"))
    net.context.first_sample = lambda number: 3 + number
    names = []
    for _ in range(3):
        net.forward()
        names.append([line.split()[0] for line in (files / "out/det_.txt").read_text().splitlines()])
    assert names == [["b", "b"], ["b", "b"], ["000123", "000123", "b", "b"]]
    assert caplog.text.count("the result files lack 1 images that were tested before the run was resumed") == 1


def test_num_test_image(files: Path) -> None:
    detect(SAVE.format("ILSVRC", "num_test_image: 1"), _two_images())
    assert {line.split()[0] for line in (files / "out/det_.txt").read_text().splitlines()} == {"000123"}


def test_boxes_are_taken_back_through_the_resize(files: Path) -> None:
    """An image of 200 x 100 in a square input has a quarter of it above and below: y is doubled around the middle."""
    resize = "resize_param { resize_mode: FIT_LARGE_SIZE_AND_PAD height: 300 width: 300 }"
    detect(SAVE.format("ILSVRC", resize), _two_images())
    first = (files / "out/det_.txt").read_text().splitlines()[0]
    assert first == "000123 1 0.9 20 0 100 100"
    resize = "resize_param { resize_mode: FIT_SMALL_SIZE height: 30 width: 30 height_scale: 40 width_scale: 400 }"
    detect(SAVE.format("ILSVRC", resize), _two_images())
    assert (files / "out/det_.txt").read_text().splitlines()[0] == "000123 1 0.9 40 8 200 30"


def test_without_a_label_map_nothing_is_saved(files: Path) -> None:
    text = SAVE.format("VOC", "").replace('label_map_file: "map.txt"', "")
    detect(text, _two_images())
    assert not (files / "out").exists()


@pytest.mark.parametrize(
    ("text", "kind", "error"),
    [
        ("", ConfigError, "num_classes is needed"),
        ("num_classes: 3 nms_param { eta: 0 }", ConfigError, "eta 0 above 0 and at most 1"),
        ("num_classes: 3 nms_param { nms_threshold: -1 }", ConfigError, "nms_threshold -1 must be at least 0"),
        ("num_classes: 3 visualize: true", ConfigError, "visualize is not supported"),
        ("num_classes: 4", ShapeError, "needs 4 scores for each of the 2 priors; num_classes is 4"),
        (SAVE.format("XML", ""), ConfigError, "output_format is 'XML'; it must be one of VOC, COCO, ILSVRC"),
        (SAVE.format("VOC", "num_test_image: 3"), ConfigError, "num_test_image is 3, but name_size_file has 2 images"),
        (SAVE.format("VOC", "resize_param { height: 3 }"), ConfigError, "resize_param needs .*height and width"),
        (SAVE.format("VOC", "").replace("num_classes: 3", "num_classes: 4"), DataError, "map.txt has no label 3"),
        (SAVE.format("VOC", "").replace("map.txt", "none.txt"), DataError, "label_map_file none.txt cannot be read"),
        (SAVE.format("VOC", "").replace("map.txt", "/dev/zero"), DataError, "label_map_file /dev/zero .* is a device"),
        (
            SAVE.format("VOC", "").replace("sizes.txt", "/dev/zero"),
            DataError,
            "name_size_file /dev/zero .* is a device",
        ),
        (
            SAVE.format("VOC", "").replace("map.txt", "a\\000b"),
            DataError,
            "cannot be read: the path has a NUL character",
        ),
        (SAVE.format("VOC", "").replace("sizes.txt", "map.txt"), DataError, "map.txt, line 1: .* is not a name, a"),
    ],
)
def test_settings_that_do_not_hold_together(files: Path, text: str, kind: type[Exception], error: str) -> None:
    with pytest.raises(kind, match=rf"layer 'L' \(DetectionOutput\): .*{error}"):
        build(text, _two_images(), backend_named("cpu"))


def test_of_several_devices_the_root_alone_tests_and_writes_files(files: Path) -> None:
    for rank in (1, 0):
        net = build(SAVE.format("VOC", ""), _two_images(), backend_named("cpu"), Shard(rank, 2))
        assert net.context.shard.undivided
        net.forward()
        assert (files / "out").exists() == (rank == 0)


def test_names_that_lead_out_of_the_folder_are_refused(files: Path) -> None:
    (files / "map.txt").write_text((files / "map.txt").read_text().replace("cat", "../../cat"))
    with pytest.raises(DataError, match=r"the name '../../cat' cannot be part of a file's name"):
        build(SAVE.format("VOC", ""), _two_images(), backend_named("cpu"))

"""ImageGtData: images, labels of anchors and objects of window files, against loops over plain numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from google.protobuf import text_format
from layer_harness import BACKENDS, backend_named
from mscnn_reference import iou

from caffepy.data.sharding import Shard
from caffepy.errors import ConfigError, DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.net import Net

IMAGE = np.random.default_rng(0).integers(0, 256, (96, 128, 3), dtype=np.uint8)
OBJECTS = [(1, 0, 10, 20, 40, 60), (2, 0, 70, 30, 110, 70), (1, 1, 5, 70, 30, 90)]
"""Class, ignore, x1, y1, x2, y2."""
REGION = (90, 70, 127, 95)
MAPS = "downsample_rate: 8 field_w: 32 field_h: 40 downsample_rate: 16 field_w: 48 field_h: 40"
FIELDS = ((8, 32, 40), (16, 48, 40))


def write(folder: Path, *images: tuple[list[Any], list[Any]]) -> str:
    cv2.imwrite(str(folder / "a.png"), IMAGE)
    text = ""
    for number, (objects, regions) in enumerate(images):
        rows = [" ".join(map(str, row)) for row in objects]
        more = [" ".join(map(str, row)) for row in regions]
        text += "\n".join([f"# {number}", "a.png", "3 96 128", str(len(rows)), *rows, str(len(more)), *more]) + "\n"
    (folder / "windows.txt").write_text(text)
    return f'source: "{folder}/windows.txt" root_folder: "{folder}/"'


def build(text: str, backend: str = "cpu", seed: int = 1, shard: Shard | None = None) -> Net:
    device = backend_named(backend)
    net = text_format.Parse(f"layer {{ name: 'd' {text} }}", caffe_pb2.NetParameter())
    return Net(net, LayerContext(device, caffe_pb2.TRAIN, seed=seed, shard=shard or Shard()))


def batches(text: str, count: int = 1, backend: str = "cpu", seed: int = 1) -> list[list[Any]]:
    """The tops of some passes."""
    with backend_named(backend).activate():
        net = build(text, backend, seed)
        found = []
        for _ in range(count):
            net.forward()
            found.append([net.blobs[name].host_data() for name in net.layers[0].param.top])
        net.close()
    return found


def layer(fields: str, transform: str = "", tops: int = 4) -> str:
    names = " ".join(f"top: 't{index}'" for index in range(tops))
    return f'{names} type: "ImageGtData" image_gt_data_param {{ {fields} }} transform_param {{ {transform} }}'


def labels_of(size: tuple[int, int], one: Any, rows: Any, regions: Any, threshold: float) -> Any:
    """Both maps of an image that fills its canvas, of rows (x1, y1, x2, y2, label, ignored)."""
    maps, best = [], [(0.0, 0)] * len(rows)
    matches = [0] * len(rows)
    for number, (stride, width, height) in enumerate(one):
        found = np.zeros((6, size[0] // stride, size[1] // stride))
        for row, column in np.ndindex(*found.shape[1:]):
            x, y = (column + 0.5) * stride - width / 2, (row + 0.5) * stride - height / 2
            anchor = [x, y, width, height]
            near = 0.0
            for x1, y1, x2, y2 in regions:
                sides = [min(x + width, x2) - max(x, x1), min(y + height, y2) - max(y, y1)]
                near += sides[0] * sides[1] / (width * height) if min(sides) > 0 else 0
            if near >= 0.4:
                found[5, row, column] = 1
                continue
            overlaps = [iou([r[0], r[1], r[2] - r[0], r[3] - r[1]], anchor) for r in rows]
            for index, overlap in enumerate(overlaps):
                best[index] = max(best[index], (overlap, -number), key=lambda pair: pair[0])
            overlap = max(overlaps)
            found[5, row, column] = overlap
            if overlap > threshold:
                index = overlaps.index(overlap)
                matches[index] += 1
                found[:5, row, column] = cell(rows[index])
                found[0, row, column] *= 1 - rows[index][5]
        maps.append(found)
    for index, row in enumerate(rows):
        if not row[5] and not matches[index] and best[index][0] >= 0.2:
            number = -best[index][1]
            values = cell(row)
            at = int(values[2] // one[number][0]), int(values[1] // one[number][0])
            if not maps[number][0][at]:
                maps[number][:5, at[0], at[1]] = values
    return maps


def cell(row: Any) -> list[float]:
    return [row[4], (row[0] + row[2]) / 2, (row[1] + row[3]) / 2, row[2] - row[0], row[3] - row[1]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.9])
def test_images_labels_and_objects(backend: str, threshold: float, tmp_path: Path) -> None:
    source = write(tmp_path, (OBJECTS, [REGION]), ([], []))
    fields = f"{source} batch_size: 2 {MAPS} fg_threshold: {threshold} output_gt_boxes: true scale: 0.5 coord_num: 4"
    ((images, first, second, objects),) = batches(
        layer(fields, "mean_value: 3 mean_value: 4 mean_value: 5"), 1, backend
    )
    pixels = (IMAGE.astype(np.float32) - np.array([3, 4, 5], np.float32)).transpose(2, 0, 1) * 0.5
    np.testing.assert_allclose(images, [pixels, pixels])
    wanted = [[0, *row[2:], *row[:2]] for row in OBJECTS]
    np.testing.assert_array_equal(objects[:, :, 0, 0], wanted)
    rows = [row[1:] for row in wanted]
    for found, expected in zip((first, second), labels_of((96, 128), FIELDS, rows, [REGION], threshold), strict=True):
        np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-6)
        assert not found[1].any()
    assert (first[0, 0] != 0).any()


def test_a_batch_without_objects_has_an_ignored_one(tmp_path: Path) -> None:
    fields = f"{write(tmp_path, ([], []))} batch_size: 1 {MAPS} output_gt_boxes: true"
    assert batches(layer(fields))[0][3].ravel().tolist() == [0, 1, 1, 2, 2, 1, 1]


def test_small_and_distant_objects_are_ignored(tmp_path: Path) -> None:
    objects = [(1, 0, 10, 10, 30, 60), (1, 0, 60, 60, 90, 70), (1, 0, 120, 20, 150, 60)]
    start = f"{write(tmp_path, (objects, []))} batch_size: 1 {MAPS} output_gt_boxes: true"
    for fields, ignored in (("", [0, 0, 1]), ("min_gt_width: 22", [1, 0, 1]), ("min_gt_height: 12", [0, 1, 1])):
        found = batches(layer(f"{start} {fields}"))[0]
        assert found[3][:, 6, 0, 0].tolist() == ignored
        labels = found[1][0]
        assert not labels[0, 4, 15]  # the center of the third is outside


@pytest.mark.parametrize("mirror", [False, True])
def test_crops_near_an_object(mirror: bool, tmp_path: Path) -> None:
    """The objects' rows tell where the crop is, and whether it is mirrored."""
    source = write(tmp_path, (OBJECTS[:2], []))
    fields = f"{source} batch_size: 12 {MAPS} output_gt_boxes: true crop_width: 64 crop_height: 64"
    images, _, _, objects = batches(layer(fields, f"mirror: {str(mirror).lower()}"))[0]
    seen = set()
    for number, image in enumerate(images):
        rows = objects[objects[:, 0, 0, 0] == number, 1:5, 0, 0]
        flipped = rows[1, 0] < rows[0, 0]
        whole = IMAGE[:, ::-1] if flipped else IMAGE
        left = (128 - 40 if flipped else 10) - rows[0, 0]
        top = 20 - rows[0, 1]
        part = whole[int(top) : int(top) + 64, int(left) : int(left) + 64]
        np.testing.assert_array_equal(image, part.transpose(2, 0, 1))
        seen.add((bool(flipped), float(left), float(top)))
    assert {flipped for flipped, _, _ in seen} == ({False, True} if mirror else {False})
    assert len(seen) > 4


def test_resized_and_padded(tmp_path: Path) -> None:
    fields = f"{write(tmp_path, (OBJECTS[:1], []))} batch_size: 1 {MAPS} output_gt_boxes: true"
    images, first, _, objects = batches(layer(f"{fields} resize_width: 64 resize_height: 48"))[0]
    np.testing.assert_array_equal(images[0], cv2.resize(IMAGE, (64, 48)).transpose(2, 0, 1))
    np.testing.assert_allclose(objects.ravel()[1:5], [5, 10, 20, 30])
    assert first.shape == (1, 6, 6, 8)
    more = "resize_width: 64 resize_height: 48 crop_width: 96 crop_height: 96"
    images, first, _, objects = batches(layer(f"{fields} {more}"))[0]
    left, top = (int(round(float(objects.ravel()[i]) - at)) for i, at in ((1, 5), (2, 10)))
    np.testing.assert_array_equal(
        images[0, :, top : top + 48, left : left + 64], cv2.resize(IMAGE, (64, 48)).transpose(2, 0, 1)
    )
    assert images[0].astype(bool).sum() <= 3 * 48 * 64
    inside = np.zeros((12, 12), bool)
    inside[rounded(top / 8) : rounded(top / 8) + 6, rounded(left / 8) : rounded(left / 8) + 8] = True
    assert (first[0, 5][~inside] == 1).all()
    assert (first[0, 5][inside] < 1).all()


def rounded(value: float) -> int:
    return math.floor(value + 0.5)


def test_scales_are_those_of_the_range(tmp_path: Path) -> None:
    """An object of 32 x 32 gets a side of 16, 22.6, 32, 45.3 or 64, in half of the images."""
    source = write(tmp_path, ([(1, 0, 48, 32, 80, 64)], []))
    fields = f"{source} batch_size: 60 {MAPS} output_gt_boxes: true crop_width: 96 crop_height: 96"
    more = "do_multiple_scale: true min_scale: 16 max_scale: 64"
    objects = batches(layer(f"{fields} {more}"))[0][3][:, :, 0, 0]
    widths, heights = objects[:, 3] - objects[:, 1], objects[:, 4] - objects[:, 2]
    np.testing.assert_allclose(widths, heights, rtol=1e-4)
    sides = sorted({round(float(side), 1) for side in widths})
    np.testing.assert_allclose(sides, [16, 22.6, 32, 45.3, 64], atol=0.06)
    assert 20 < (np.abs(widths - 32) < 0.1).sum() < 55
    more += " min_whaspect: 0.4 max_whaspect: 2.1"
    objects = batches(layer(f"{fields} {more}"))[0][3][:, :, 0, 0]
    ratios = (objects[:, 3] - objects[:, 1]) / (objects[:, 4] - objects[:, 2])
    assert len({round(float(ratio), 3) for ratio in ratios}) > 5
    assert ratios.min() >= 0.399
    assert ratios.max() <= 2.101


def test_enlarged_images_are_crops_around_the_object(tmp_path: Path) -> None:
    source = write(tmp_path, ([(1, 0, 60, 40, 68, 48)], []))
    fields = f"{source} batch_size: 90 {MAPS} output_gt_boxes: true crop_width: 64 crop_height: 64"
    images, _, _, objects = batches(layer(f"{fields} do_multiple_scale: true min_scale: 8 max_scale: 64"))[0]
    sides = objects[:, 3, 0, 0] - objects[:, 1, 0, 0]
    number = int(np.argmax(sides))
    assert sides[number] == pytest.approx(64, rel=1e-3)
    left, top = (float(objects[number, i, 0, 0]) for i in (1, 2))
    whole = cv2.resize(IMAGE, None, fx=8, fy=8, interpolation=cv2.INTER_LINEAR)
    first_column, first_row = int(round(60 * 8 - left)), int(round(40 * 8 - top))
    part = whole[first_row : first_row + 64, first_column : first_column + 64].transpose(2, 0, 1)
    assert np.abs(images[number] - part).mean() < 3


def test_order_and_repeated_images(tmp_path: Path) -> None:
    """Objects tell the images apart."""
    entries = [([(number + 1, number == 1, 10, 10, 40, 40)], []) for number in range(3)]
    entries = [([tuple(int(v) for v in row) for row in rows], regions) for rows, regions in entries]
    fields = f"{write(tmp_path, *entries)} batch_size: 1 {MAPS} output_gt_boxes: true cache_images: true"

    def order(more: str, seed: int = 1, count: int = 10) -> list[int]:
        found = batches(layer(f"{fields} {more}"), count, seed=seed)
        return [int(one[3][0, 5, 0, 0]) for one in found]

    assert order("") == [1, 2, 3] * 3 + [1]
    assert order("fg_img_multiple: 2") == [1, 1, 2, 3, 3] * 2
    shuffled = order("shuffle: true", count=30)
    assert sorted(shuffled[:3]) == sorted(shuffled[3:6]) == [1, 2, 3]
    assert shuffled == order("shuffle: true", count=30)
    assert shuffled != order("", count=30)


def test_devices_read_their_part_of_the_batch(tmp_path: Path) -> None:
    fields = f"{write(tmp_path, (OBJECTS, []))} batch_size: 4 {MAPS} crop_width: 64 crop_height: 64"
    text = layer(fields, "mirror: true", tops=3)
    whole = batches(text)[0]
    with backend_named("cpu").activate():
        for rank in range(2):
            net = build(text, shard=Shard(rank, 2, 2))
            net.forward()
            for index in range(3):
                part = net.blobs[f"t{index}"].host_data()
                np.testing.assert_array_equal(part, whole[index][2 * rank : 2 * rank + 2])
            net.close()


@pytest.mark.parametrize(
    ("fields", "transform", "message"),
    [
        ("coord_num: 5", "", "coord_num is 5"),
        ("output_gt_boxes: true", "", "has 3 tops; it needs one for images, 2 for labels, and one more"),
        ("field_w: 3", "", "as many field_w as field_h"),
        ("do_multiple_scale: true", "", "needs min_scale and max_scale"),
        ("", "mean_file: 'x'", "mean_file is not supported"),
        ("", "mean_value: 1 mean_value: 2", "has 2 mean_value"),
    ],
)
def test_settings_that_do_not_fit(fields: str, transform: str, message: str, tmp_path: Path) -> None:
    start = f"{write(tmp_path, (OBJECTS, []))} batch_size: 1 {MAPS}"
    with pytest.raises(ConfigError, match=message):
        build(layer(f"{start} {fields}", transform, tops=3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no images"),
        ("a.png", "'a.png' where '#'"),
        ("# 0 a.png 3 40 60 2 1 0 1 2 3 4", "image 0 is incomplete; each is '# number path"),
        ("# 0 a.png 3 40 60 1 0 0 1 2 3 4 0", "an object of class 0 or less"),
        ("# 0 a.png 3 40 60 1 1 0 1 2 3 1e30 0", "invalid path, size or box"),
        ("# 0 a.png 3 0 60 0 0", "invalid path, size or box"),
        ("# 0 a.png 1 40 60 0 0", "1 channels, but they are read in color"),
        ("# 0 b.png 3 40 60 0 0", r"image 0 \('b.png'\) of .* cannot be read: No such file"),
    ],
)
def test_damaged_files(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "windows.txt").write_text(text)
    with pytest.raises((DataError, ConfigError), match=message):
        batches(layer(f"source: '{tmp_path}/windows.txt' batch_size: 1 {MAPS}", tops=3))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(DataError, match="window file 'nowhere.txt' cannot be read: No such file"):
        build(layer(f"source: 'nowhere.txt' batch_size: 1 {MAPS}", tops=3))

"""DetectionData and EvalData: images, labels of anchors and objects of window files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from google.protobuf import text_format
from layer_harness import BACKENDS, backend_named
from mscnn_reference import iou

from caffepy.errors import ConfigError, DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.net import Net
from caffepy.net.record_shape import label_shapes, told_shape, without_data

WIDE, TALL = (96, 128), (120, 80)
OBJECTS = [(1, 0, 0, 10, 20, 40, 60), (2, 0, 1, 70, 30, 110, 70), (1, 1, 0, 5, 70, 30, 90)]
"""Class, ignore, difficult, x1, y1, x2, y2."""
REGION = (90, 70, 127, 95)
MAPS = "stride: 8 field_w: 32 field_h: 40 stride: 16 field_w: 48 field_h: 40"
FIELDS = ((8, 32, 40), (16, 48, 40))


def image(size: tuple[int, int]) -> Any:
    return np.random.default_rng(size[0]).integers(0, 256, (*size, 3), dtype=np.uint8)


def write(folder: Path, *entries: tuple[tuple[int, int], list[Any], list[Any]]) -> str:
    text = ""
    for number, (size, objects, regions) in enumerate(entries):
        cv2.imwrite(str(folder / f"{size[0]}.png"), image(size))
        rows = [" ".join(map(str, row)) for row in objects]
        more = [" ".join(map(str, row)) for row in regions]
        head = [f"# {number}", f"{size[0]}.png", f"3 {size[0]} {size[1]}", str(len(rows))]
        text += "\n".join([*head, *rows, str(len(more)), *more]) + "\n"
    (folder / "windows.txt").write_text(text)
    return f'source: "{folder}/windows.txt" root_folder: "{folder}/"'


def batches(text: str, count: int = 1, backend: str = "cpu", seed: int = 1, phase: int = caffe_pb2.TRAIN) -> Any:
    device = backend_named(backend)
    param = text_format.Parse(f"layer {{ name: 'd' {text} }}", caffe_pb2.NetParameter())
    with device.activate():
        net = Net(param, LayerContext(device, phase, seed=seed))
        found = []
        for _ in range(count):
            net.forward()
            found.append([net.blobs[name].host_data() for name in net.layers[0].param.top])
        net.close()
    return found


def layer(fields: str, transform: str = "", tops: int = 4, kind: str = "detection") -> str:
    names = " ".join(f"top: 't{index}'" for index in range(tops))
    if kind == "eval":
        return f'{names} type: "EvalData" eval_data_param {{ {fields} }} transform_param {{ {transform} }}'
    return f'{names} type: "DetectionData" detection_data_param {{ {fields} }} transform_param {{ {transform} }}'


def pixels(size: tuple[int, int]) -> Any:
    return image(size).transpose(2, 0, 1).astype(np.float32)


def overlap(a: Any, b: Any, first: bool = False) -> float:
    """Of corners that include the last pixel; with `first` of the first box."""
    sides = [[box[0], box[1], box[2] - box[0] + 1, box[3] - box[1] + 1] for box in (a, b)]
    found = iou(*sides, least=1)
    areas = [box[2] * box[3] for box in sides]
    return found * (sum(areas) / (1 + found)) / areas[0] if first else found


def is_bad(anchor: Any, margin: float | None, inside: float | None) -> bool:
    height, width = WIDE
    if margin is None:
        return inside is not None and overlap(anchor, [0, 0, width, height], True) < inside
    x, y = margin * (anchor[2] - anchor[0]) / 2, margin * (anchor[3] - anchor[1]) / 2
    return anchor[0] < -x or anchor[1] < -y or anchor[2] >= width + x or anchor[3] >= height + y


def labels_of(
    rows: Any,
    regions: Any,
    threshold: float = 0.5,
    ignore: float = 0.4,
    pickup: float = 0.2,
    margin: float | None = None,
    inside: float | None = None,
) -> Any:
    """Both maps of an image that fills its canvas, of rows (x1, y1, x2, y2, label, ignored)."""
    maps, best, matches = [], [(0.0, 0)] * len(rows), [0] * len(rows)
    for number, (stride, field_w, field_h) in enumerate(FIELDS):
        found = np.zeros((6, WIDE[0] // stride, WIDE[1] // stride))
        for row, column in np.ndindex(*found.shape[1:]):
            x, y = (column + 0.5) * stride, (row + 0.5) * stride
            anchor = [x - field_w / 2, y - field_h / 2, x + field_w / 2, y + field_h / 2]
            found[5, row, column] = 1
            if is_bad(anchor, margin, inside):
                continue
            near = sum(overlap(anchor, region, True) for region in regions)
            overlaps = [overlap(one[:4], anchor) for one in rows]
            for index, value in enumerate(overlaps):
                best[index] = max(best[index], (value, -number), key=lambda pair: pair[0])
            value = max(overlaps)
            if value > threshold:
                index = overlaps.index(value)
                matches[index] += 1
                found[:, row, column] = [*cell(rows[index]), value]
                found[0, row, column] *= 1 - rows[index][5]
            elif near < ignore:
                found[5, row, column] = value
        maps.append(found)
    for index, one in enumerate(rows):
        if not one[5] and not matches[index] and best[index][0] >= pickup:
            number = -best[index][1]
            values = cell(one)
            at = int(values[2] // FIELDS[number][0]), int(values[1] // FIELDS[number][0])
            if not maps[number][0][at]:
                maps[number][:, at[0], at[1]] = [*values, best[index][0]]
    return maps


def cell(row: Any) -> list[float]:
    return [row[4], (row[0] + row[2]) / 2, (row[1] + row[3]) / 2, row[2] - row[0] + 1, row[3] - row[1] + 1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ("", {}),
        ("fg_threshold: 0.3", {"threshold": 0.3}),
        ("fg_threshold: 0.9", {"threshold": 0.9}),
        ("fg_threshold: 0.9 pickup_iou_thr: 0.8", {"threshold": 0.9, "pickup": 0.8}),
        ("ignore_fg_threshold: 0.7", {"ignore": 0.7}),
        ("anchor_ignore_margin_ratio: 0.5", {"margin": 0.5}),
        ("anchor_ignore_iou_thr: 0.8", {"inside": 0.8}),
    ],
)
def test_images_labels_and_objects(backend: str, fields: str, arguments: Any, tmp_path: Path) -> None:
    source = write(tmp_path, (WIDE, OBJECTS, [REGION]))
    start = f"{source} batch_size: 1 {MAPS} output_gt_boxes: true coord_num: 4 {fields}"
    transform = "mean_value: 3 mean_value: 4 mean_value: 5 scale: 0.5"
    ((images, first, second, objects),) = batches(layer(start, transform), 1, backend)
    np.testing.assert_allclose(images[0], (pixels(WIDE) - np.array([3, 4, 5], "f")[:, None, None]) * 0.5)
    wanted = [[0, *row[3:], *row[:3]] for row in OBJECTS]
    np.testing.assert_array_equal(objects[:, :, 0, 0], wanted)
    rows = [row[1:] for row in wanted]
    for found, expected in zip((first, second), labels_of(rows, [REGION], **arguments), strict=True):
        np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-6)
    assert fields or (first[0, 0] != 0).any()


def test_a_batch_without_objects_has_a_row_of_padding(tmp_path: Path) -> None:
    found = batches(layer(f"{write(tmp_path, (WIDE, [], []))} batch_size: 1 output_gt_boxes: true", tops=2))[0]
    assert found[1].ravel().tolist() == [-1] * 8


def test_small_objects_are_ignored(tmp_path: Path) -> None:
    start = f"{write(tmp_path, (WIDE, OBJECTS[:2], []))} batch_size: 1 output_gt_boxes: true"
    for fields, ignored in (("min_gt_width: 35", [1, 0]), ("min_gt_height: 42", [1, 1]), ("", [0, 0])):
        assert batches(layer(f"{start} {fields}", tops=2))[0][1][:, 6, 0, 0].tolist() == ignored


@pytest.mark.parametrize(
    ("fields", "shapes"),
    [
        ("", [(96, 128), (120, 80)]),
        ("resize_width: 64 resize_height: 48", [(48, 64), (48, 64)]),
        ("resize_ratio: 0.5", [(48, 64), (60, 40)]),
        ("short_size: 64 long_size: 160", [(64, 160), (160, 64)]),
        ("short_size: 60 long_size: 150", [(64, 160), (160, 64)]),
        ("short_size: 64 long_size: 160 template_ratio: 2", [(128, 320), (320, 128)]),
        ("short_size: 64 long_size: 160 crop_width: 40 crop_height: 56", [(56, 40), (56, 40)]),
        ("short_size: 64 long_size: 160 crop_short_size: 32 crop_long_size: 96", [(32, 96), (96, 32)]),
    ],
)
def test_sizes_of_batches(fields: str, shapes: list[tuple[int, int]], tmp_path: Path) -> None:
    source = write(tmp_path, (WIDE, [], []), (TALL, [], []))
    found = batches(layer(f"{source} batch_size: 1 stride: 8 field_w: 9 field_h: 9 {fields}", tops=2), 2)
    for (images, labels), shape in zip(found, shapes, strict=True):
        assert images.shape == (1, 3, *shape)
        assert labels.shape == (1, 6, *(int(side / 8 + 0.5) for side in shape))


def test_the_first_image_decides_the_size_of_the_batch(tmp_path: Path) -> None:
    source = write(tmp_path, (WIDE, OBJECTS[:1], []), (TALL, OBJECTS[:1], []))
    images, objects = batches(layer(f"{source} batch_size: 2 output_gt_boxes: true", tops=2))[0]
    assert images.shape == (2, 3, 96, 128)
    assert objects[:, 0, 0, 0].tolist() == [0, 1]
    left, top = (int(objects[1, i, 0, 0]) - OBJECTS[0][2 + i] for i in (1, 2))
    assert 0 <= left <= 48
    assert top <= 0
    np.testing.assert_array_equal(images[1, :, :, left : left + 80], pixels(TALL)[:, -top : 96 - top])


def test_mirrored_images(tmp_path: Path) -> None:
    source = write(tmp_path, (WIDE, OBJECTS[:1], []))
    images, objects = batches(layer(f"{source} batch_size: 20 output_gt_boxes: true", "mirror: true", tops=2))[0]
    flips = objects[:, 1, 0, 0] == 128 - 40
    assert 3 < flips.sum() < 17
    for one, flipped in zip(images, flips, strict=True):
        np.testing.assert_array_equal(one, pixels(WIDE)[:, :, ::-1] if flipped else pixels(WIDE))


def test_random_scales(tmp_path: Path) -> None:
    """An object of 40 x 40 gets a side in the range, or the image a factor; half of the images stay."""
    source = write(tmp_path, (WIDE, [(1, 0, 0, 30, 30, 69, 69)], []))
    start = f"{source} batch_size: 60 output_gt_boxes: true crop_width: 96 crop_height: 96"

    def sides(fields: str) -> Any:
        objects = batches(layer(f"{start} {fields}", tops=2))[0][1][:, :, 0, 0]
        return objects[:, 3] - objects[:, 1], objects[:, 4] - objects[:, 2]

    for fields, low, high in (
        ("min_scale: 20 max_scale: 80", 0.5, 2),
        ("low_scale_ratio: 0.25 high_scale_ratio: 1", 0.25, 1),
    ):
        widths, heights = sides(fields)
        np.testing.assert_allclose(widths, heights, rtol=1e-4)
        moved = np.abs(widths - 39) > 1e-3
        assert 15 < moved.sum() < 45
        assert low * 39 * 0.999 <= widths.min() < 30
        assert widths.max() <= high * 39 * 1.001
        assert (np.abs(sides(f"{fields} multiscale_prob: 1")[0] - 39) > 1e-3).all()
        assert (np.abs(sides(f"{fields} multiscale_prob: 0")[0] - 39) < 1e-3).all()
    widths, heights = sides("min_scale: 20 max_scale: 80 multiscale_prob: 1 min_whaspect: 0.5 max_whaspect: 2")
    ratios = widths / heights
    assert 0.499 < ratios.min() < 0.8
    assert 1.3 < ratios.max() < 2.001


def test_colours_are_distorted(tmp_path: Path) -> None:
    source = write(tmp_path, (WIDE, [], []))
    images = batches(
        layer(f"{source} batch_size: 8 distort_param {{ brightness_prob: 1 brightness_delta: 30 }}", tops=1)
    )[0][0]
    assert sum((one != pixels(WIDE)).any() for one in images) > 4
    assert np.abs(images - pixels(WIDE)).max() <= 31


def test_orders(tmp_path: Path) -> None:
    """Labels tell the images apart; the first five are wide."""
    entries = [(WIDE if number < 5 else TALL, [(number + 1, 0, 0, 10, 10, 40, 40)], []) for number in range(8)]
    start = f"{write(tmp_path, *entries)} batch_size: 1 output_gt_boxes: true cache_images: true"

    def order(fields: str, seed: int = 1) -> list[int]:
        return [int(one[1][0, 5, 0, 0]) for one in batches(layer(f"{start} {fields}", tops=2), 16, seed=seed)]

    assert order("") == [*range(1, 9)] * 2
    for kind in ("random", "random_aspect", "random_mix_aspect"):
        found = order(f"shuffle: '{kind}' mix_group_size: 2")
        assert sorted(found[:8]) == sorted(found[8:]) == [*range(1, 9)]
        assert found == order(f"shuffle: '{kind}' mix_group_size: 2")
        kinds = "".join("w" if number <= 5 else "t" for number in found[:8])
        if kind == "random_aspect":
            assert kinds in ("wwwwwttt", "tttwwwww")
        elif kind == "random_mix_aspect":
            assert kinds in ("wwttwwtw", "ttwwtwww")
    assert {tuple(order("shuffle: 'random'", seed)) for seed in range(3)} != {tuple(order(""))}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("coord_num: 5", "coord_num is 5"),
        ("output_gt_boxes: true", "has 3 tops"),
        ("crop_width: 3", "needs crop_width and crop_height"),
        ("crop_width: 0 crop_height: 4", "must be above 0"),
        ("resize_ratio: 2 short_size: 3 long_size: 4", "has both resize_ratio and short_size"),
        ("min_scale: 3 max_scale: 2", "min_scale is more than max_scale"),
        ("resize_ratio: 0", "resize_ratio is 0"),
        ("fg_threshold: 0", "fg_threshold and template_ratio"),
        ("shuffle: 'x'", "shuffle is 'x'"),
        ("field_w: 3", "as many field_w"),
    ],
)
def test_settings_that_do_not_fit(fields: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        batches(layer(f"{write(tmp_path, (WIDE, OBJECTS, []))} batch_size: 1 {MAPS} {fields}", tops=3))


# -- EvalData ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_images_in_order_with_their_sizes(backend: str, tmp_path: Path) -> None:
    source = write(tmp_path, (WIDE, OBJECTS, []), (TALL, [], []))
    text = layer(f"{source} batch_size: 1 short_size: 64 long_size: 100", "mean_value: 7", 3, "eval")
    for images, objects, sizes in batches(text, 3, backend, phase=caffe_pb2.TEST)[::2]:
        assert sizes.ravel().tolist() == [64, 96]  # 85.3 columns are nearer to 96 than to 64
        wanted = cv2.resize(image(WIDE), (96, 64)).transpose(2, 0, 1).astype(np.float32) - 7
        np.testing.assert_array_equal(images[0], wanted)
        np.testing.assert_allclose(objects[0, :, 0, 0], [0, 7.5, 40 / 3, 30, 40, 1, 0, 0], rtol=1e-6)
        assert objects[:, 5:, 0, 0].tolist() == [[1, 0, 0], [2, 0, 1], [1, 1, 0]]
    second = batches(text, 2, backend, phase=caffe_pb2.TEST)[1]
    assert second[2].ravel().tolist() == [96, 64]
    assert second[1].ravel().tolist() == [-1] * 8


def test_images_of_one_size(tmp_path: Path) -> None:
    source = write(tmp_path, (WIDE, OBJECTS, []), (TALL, OBJECTS, []))
    text = layer(f"{source} batch_size: 2 resize_width: 70 resize_height: 60", "", 2, "eval")
    images, objects = batches(text)[0]
    assert images.shape == (2, 3, 64, 64)
    assert objects[:, 0, 0, 0].tolist() == [0] * 3 + [1] * 3
    with pytest.raises(ConfigError, match="different sizes; set batch_size: 1"):
        batches(layer(f"{source} batch_size: 2", "", 2, "eval"))
    with pytest.raises(ConfigError, match="needs short_size and long_size"):
        batches(layer(f"{source} batch_size: 1 short_size: 3", "", 2, "eval"))
    with pytest.raises(DataError, match="cannot be read"):
        batches(layer("source: 'nowhere' batch_size: 1", "", 2, "eval"))


# -- without files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shape", "labels", "batch"),
    [
        (
            layer(f"batch_size: 4 {MAPS} output_gt_boxes: true short_size: 64 long_size: 128"),
            (64, 128),
            [(6, 8, 16), (6, 4, 8), (8, 1, 1)],
            [4, 4, 4, 1],
        ),
        (
            layer("batch_size: 2 short_size: 64 long_size: 128", "", 3, "eval"),
            (64, 128),
            [(8, 1, 1), (2, 1, 1)],
            [2, 1, 2],
        ),
    ],
)
def test_shapes_follow_from_the_fields(text: str, shape: Any, labels: Any, batch: list[int]) -> None:
    net = text_format.Parse(f"layer {{ name: 'd' {text} }}", caffe_pb2.NetParameter())
    found = told_shape(net.layer[0], nvidia=False)
    assert found is not None
    assert found[0] == (3, *shape)
    assert label_shapes(net.layer[0], found[0]) == labels
    shapes = dict(zip(net.layer[0].top, [found[0], *labels], strict=True))
    made = without_data(net, shapes).layer[0].dummy_data_param
    assert [tuple(one.dim) for one in made.shape] == [
        (b, *shapes[t]) for b, t in zip(batch, net.layer[0].top, strict=True)
    ]

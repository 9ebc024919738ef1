"""DenseImageData, ImageSegData, ImageLabelmapData and SegData: crops and labels that fit, sizes, and refusals.

A pixel's blue is its row and its green its column, and its label is 3 * row + column modulo 250: each crop shows where
it came from, and whether its labels came from there too.
"""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from layer_harness import BACKENDS, backend_named
from training import build_net

from caffepy.errors import ConfigError, DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import LayerContext
from caffepy.net import Net

TEST = caffe_pb2.TEST
SIZES = ((12, 20), (12, 20), (12, 20))


def labels_at(rows, columns):
    return (3 * rows + columns) % 250


def write(folder: Path, sizes=SIZES, second="labels") -> Path:
    lines = []
    for index, (height, width) in enumerate(sizes):
        rows, columns = np.indices((height, width))
        image = np.stack([rows, columns, np.full_like(rows, index)], 2).astype(np.uint8)
        cv2.imwrite(str(folder / f"i{index}.png"), image)
        cv2.imwrite(str(folder / f"l{index}.png"), labels_at(rows, columns).astype(np.uint8))
        word = {"labels": f"l{index}.png", "number": str(index + 4), "": ""}[second]
        lines.append(f"i{index}.png {word}\n")
    (folder / "list").write_text("".join(lines))
    return folder


def net_of(folder: Path, kind: str, fields: str, transform: str = "", tops: int = 2, phase: int = 0, seed: int = 1):
    holder, root = {
        "DenseImageData": ("dense_image_data_param", "root_folder"),
        "SegData": ("seg_data_param", "root_dir"),
    }.get(kind, ("image_data_param", "root_folder"))
    names = "".join(f' top: "{name}"' for name in ("x", "y", "z")[:tops])
    return build_net(
        f'layer {{ name: "d" type: "{kind}" {names} transform_param {{ {transform} }} '
        f'{holder} {{ source: "{folder}/list" {root}: "{folder}/" {fields} }} }}',
        phase,
        seed=seed,
    )


def batches(net, count: int = 4):
    """The tops of some passes."""
    found = []
    for _ in range(count):
        net.forward()
        found.append([net.blobs[name].host_data() for name in net.layers[0].param.top])
    net.close()
    return found


def assert_fit(image, labels):
    """Whether each label belongs to its pixel's row and column."""
    assert np.array_equal(labels, labels_at(image[0], image[1]))


def is_mirrored(image) -> bool:
    return bool(image[1, 0, 0] > image[1, 0, -1])


def test_dense_images_with_their_labels(tmp_path: Path):
    net = net_of(write(tmp_path), "DenseImageData", "batch_size: 2")
    seen = []
    for x, y in batches(net):
        assert (x.shape, y.shape) == ((2, 3, 12, 20), (2, 1, 12, 20))
        for image, labels in zip(x, y[:, 0], strict=True):
            assert_fit(image, labels)
            seen.append(int(image[2, 0, 0]))
    assert seen == [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("phase", [0, TEST])
def test_dense_images_crop_and_mirror_with_their_labels(tmp_path: Path, phase: int):
    fields = "batch_size: 2 crop_height: 5 crop_width: 7 mirror: true shuffle: true"
    found = batches(net_of(write(tmp_path), "DenseImageData", fields, phase=phase), 20)
    again = batches(net_of(tmp_path, "DenseImageData", fields, phase=phase), 20)
    places, flips, first = set(), set(), []
    for (x, y), (x2, y2) in zip(found, again, strict=True):
        assert np.array_equal(x, x2) and np.array_equal(y, y2)
        assert x.shape == (2, 3, 5, 7)
        for image, labels in zip(x, y[:, 0], strict=True):
            assert_fit(image, labels)
            places.add((int(image[0].min()), int(image[1].min())))
            flips.add(is_mirrored(image))
            first.append(int(image[2, 0, 0]))
    assert flips == {True, False} and len(places) > 15
    assert sorted(first[:3]) == [0, 1, 2] and first[:12] != [0, 1, 2] * 4
    assert max(row for row, _ in places) <= 7 and max(column for _, column in places) <= 13


def test_dense_images_are_resized_their_labels_by_nearest_neighbour(tmp_path: Path):
    fields = "batch_size: 1 new_height: 6 new_width: 8 label_divide_factor: 2"
    (x, y), *_ = batches(net_of(write(tmp_path), "DenseImageData", fields, "scale: 0.5 mean_value: 2"), 1)
    image, labels = cv2.imread(str(tmp_path / "i0.png")), cv2.imread(str(tmp_path / "l0.png"), 0)
    assert np.array_equal(x[0], (cv2.resize(image, (8, 6)).transpose(2, 0, 1) - 2.0) * 0.5)
    assert np.array_equal(y[0, 0], cv2.resize(labels, (4, 3), interpolation=cv2.INTER_NEAREST))


def test_dense_images_of_different_sizes_in_batches_of_one(tmp_path: Path):
    sizes = ((4, 6), (9, 5), (3, 3))
    write(tmp_path, sizes)
    for (x, y), size in zip(batches(net_of(tmp_path, "DenseImageData", "batch_size: 1"), 3), sizes, strict=True):
        assert (x.shape, y.shape) == ((1, 3, *size), (1, 1, *size))
    with pytest.raises(DataError, match="'i1.png'.* makes 3 x 9 x 5, but others of its batch make 3 x 4 x 6"):
        batches(net_of(tmp_path, "DenseImageData", "batch_size: 2"), 1)
    x, _ = batches(net_of(tmp_path, "DenseImageData", "batch_size: 1 is_color: false rand_skip: 3", seed=3), 1)[0]
    assert x.shape[1] == 1 and x.shape[2:] in sizes


def test_a_mean_file_is_cropped_with_the_image(tmp_path: Path):
    mean = np.random.default_rng(0).uniform(0, 9, (3, 12, 20)).astype(np.float32)
    blob = caffe_pb2.BlobProto(num=1, channels=3, height=12, width=20, data=mean.ravel())
    (tmp_path / "mean").write_bytes(blob.SerializeToString())
    fields = "batch_size: 1 crop_height: 5 crop_width: 7"
    plain = batches(net_of(write(tmp_path), "DenseImageData", fields), 3)
    for (x, _), (image, _) in zip(
        batches(net_of(tmp_path, "DenseImageData", fields, f"mean_file: '{tmp_path}/mean'"), 3), plain, strict=True
    ):
        row, column = int(image[0, 0, 0, 0]), int(image[0, 1, 0, 0])
        assert np.allclose(x[0], image[0] - mean[:, row : row + 5, column : column + 7])


# -- ImageSegData ----------------------------------------------------------------------------------------

PIXEL = "label_type: PIXEL batch_size: 2"


def test_a_crop_larger_than_the_image_is_filled(tmp_path: Path):
    means = "mean_value: 1 mean_value: 2 mean_value: 3"
    net = net_of(write(tmp_path), "ImageSegData", PIXEL + " ignore_label: 7", f"crop_size: 16 {means}", tops=3)
    (x, y, size), *_ = batches(net, 1)
    assert x.shape == (2, 3, 16, 16) and size.shape == (2, 1, 1, 2)
    assert (size == [12, 16]).all()
    assert (x[:, :, 12:] == 0).all() and (y[:, :, 12:] == 7).all()
    assert_fit(x[0, :, :12] + np.array([1, 2, 3])[:, None, None], y[0, 0, :12])


def test_factors_of_the_size(tmp_path: Path):
    transform = "crop_size: 30 scale_factors: 0.5 scale_factors: 1 scale_factors: 1.5"
    seen = set()
    for x, y in batches(net_of(write(tmp_path), "ImageSegData", PIXEL, transform), 10):
        for image, labels in zip(x, y[:, 0], strict=True):
            inside = labels != 255
            height, width = int(inside.any(1).sum()), int(inside.any(0).sum())
            seen.add((height, width))
            assert inside[:height, :width].all()
            whole = cv2.imread(str(tmp_path / f"l{int(image[2, 0, 0])}.png"), 0)
            wanted = cv2.resize(whole, (width, height), interpolation=cv2.INTER_NEAREST)
            assert np.array_equal(labels[:height, :width], wanted)
    assert seen == {(6, 10), (12, 20), (18, 30)}


@pytest.mark.parametrize("crop", ["crop_size: 5", "crop_height: 5 crop_width: 9"])
def test_crops_are_random_in_training_and_central_in_testing(tmp_path: Path, crop: str):
    write(tmp_path)
    width = 9 if "width" in crop else 5
    x, y = batches(net_of(tmp_path, "ImageSegData", PIXEL, crop, phase=TEST), 1)[0]
    assert x.shape == (2, 3, 5, width)
    assert (int(x[0, 0, 0, 0]), int(x[0, 1, 0, 0])) == (3, (20 - width) // 2)
    places = set()
    for x, y in batches(net_of(tmp_path, "ImageSegData", PIXEL, crop + " mirror: true"), 20):
        for image, labels in zip(x, y[:, 0], strict=True):
            assert_fit(image, labels)
            places.add((int(image[0, 0, 0]), int(image[1].min()), is_mirrored(image)))
    assert len(places) > 20


def test_one_label_for_an_image_and_none(tmp_path: Path):
    write(tmp_path, second="number")
    x, y = batches(net_of(tmp_path, "ImageSegData", "batch_size: 3"), 1)[0]
    assert y.shape == (3, 1, 12, 20)
    assert [set(labels.ravel()) for labels in y] == [{4}, {5}, {6}]
    write(tmp_path, second="")
    for fields in ("label_type: NONE ignore_label: 9", "has_label: false ignore_label: 9"):
        _, y = batches(net_of(tmp_path, "ImageSegData", f"batch_size: 3 {fields}"), 1)[0]
        assert set(y.ravel()) == {9}


@pytest.mark.parametrize("word", ["²", "9" * 5000, "-1", "l0.png"])
def test_a_word_that_is_no_label_is_named(tmp_path: Path, word: str):
    write(tmp_path, second="number")
    (tmp_path / "list").write_text(f"i0.png {word}\n")
    with pytest.raises(DataError, match=f"has '{word[:40]}' in place of a label"):
        batches(net_of(tmp_path, "ImageSegData", "batch_size: 1"), 1)


# -- ImageLabelmapData and SegData -----------------------------------------------------------------------


def test_maps_of_edges(tmp_path: Path):
    folder = write(tmp_path)
    (x, y), *_ = batches(net_of(folder, "ImageLabelmapData", "batch_size: 1"), 1)
    gray = cv2.imread(str(tmp_path / "l0.png"), 0).astype(np.float32) / np.float32(255)
    assert np.array_equal(y[0, 0], np.where(gray > 0.5, 1, gray))
    assert x.shape == (1, 3, 12, 20)
    (x, y), *_ = batches(net_of(folder, "ImageLabelmapData", "batch_size: 1 new_height: 6 new_width: 8"), 1)
    assert (x.shape, y.shape) == ((1, 3, 6, 8), (1, 1, 6, 8))
    for x, y in batches(net_of(folder, "ImageLabelmapData", "batch_size: 2", "crop_size: 5 mirror: true"), 5):
        for image, labels in zip(x, y[:, 0], strict=True):
            gray = labels_at(image[0], image[1]) / np.float32(255)
            assert np.allclose(labels, np.where(gray > 0.5, 1, gray))


def test_multiples_of_a_stride(tmp_path: Path):
    write(tmp_path)
    shapes = set()
    for x, y in batches(net_of(tmp_path, "SegData", "shuffle: true", "stride: 4 mirror: true"), 6):
        assert x.shape == (1, 3, 12, 20)
        assert_fit(x[0], y[0, 0])
    for x, y in batches(net_of(tmp_path, "SegData", "", "scale_ratios: 0.5 scale_ratios: 1.5 stride: 4"), 12):
        assert x.shape[2:] == y.shape[2:] and all(size % 4 == 0 for size in x.shape[2:])
        shapes.add(x.shape)
    assert len(shapes) > 3
    for upper, wanted in (("upper_size: 8", (8, 8)), ("upper_height: 4 upper_width: 12", (4, 12))):
        x, y = batches(net_of(tmp_path, "SegData", "", f"stride: 4 {upper}"), 1)[0]
        assert x.shape[2:] == wanted
        assert_fit(x[0], y[0, 0])


def test_balance_draws_other_crops(tmp_path: Path):
    image = np.zeros((8, 64, 3), np.uint8)
    labels = np.zeros((8, 64), np.uint8)
    labels[:, 48:] = 1
    cv2.imwrite(str(tmp_path / "i.png"), image)
    cv2.imwrite(str(tmp_path / "l.png"), labels)
    (tmp_path / "list").write_text("i.png l.png\n")
    parts = {}
    for fields in ("", "balance: true"):
        found = batches(net_of(tmp_path, "SegData", fields, "upper_size: 8"), 40)
        parts[fields] = sum(0.2 <= float(y.mean()) <= 0.8 for _, y in found)
    assert parts["balance: true"] > parts[""]


FIELDS = {
    "DenseImageData": ("batch_size: 2 crop_height: 5 crop_width: 7 mirror: true", ""),
    "ImageSegData": (PIXEL, "crop_size: 6 mirror: true scale_factors: 0.5 scale_factors: 1"),
    "ImageLabelmapData": ("batch_size: 2", "crop_size: 5 mirror: true"),
    "SegData": ("", "stride: 4 scale_ratios: 0.5 scale_ratios: 1.5"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", FIELDS)
def test_every_backend_gives_the_same_batches(tmp_path: Path, kind: str, backend: str):
    write(tmp_path)
    wanted = batches(net_of(tmp_path, kind, *FIELDS[kind]), 4)
    param = net_of(tmp_path, kind, *FIELDS[kind]).param
    with backend_named(backend).activate():
        found = batches(Net(param, LayerContext(backend_named(backend), seed=1)), 4)
    for ours, theirs in zip(found, wanted, strict=True):
        assert all(map(np.array_equal, ours, theirs))


# -- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, fields, transform, message",
    [
        ("DenseImageData", "batch_size: 1 new_height: 3", "", "new_height and new_width must be set together"),
        ("DenseImageData", "batch_size: 1 crop_width: 3", "", "crop_height and crop_width must be set together"),
        ("DenseImageData", "batch_size: 1", "mirror: true", "give mirror and the crop in dense_image_data_param"),
        (
            "DenseImageData",
            "batch_size: 1 crop_height: 3 crop_width: 3 label_divide_factor: 2",
            "",
            "label_divide_factor must be at least 1, and 1 with a crop",
        ),
        ("DenseImageData", "batch_size: 1 rand_skip: 9", "", "rand_skip 9 is more than the 3 images"),
        ("ImageSegData", PIXEL, "mean_file: 'm'", "has no mean_file"),
        ("ImageSegData", PIXEL, "crop_size: 3 crop_height: 3", "keep one kind"),
        ("ImageSegData", PIXEL, "crop_width: 3", "crop_height and crop_width must be set together"),
        ("ImageSegData", PIXEL, "scale_factors: 0", "scale_factors must be above 0"),
        ("SegData", "", "stride: 0", "stride of transform_param is 0; it must be at least 1"),
        ("SegData", "", "scale_ratios: 1", "scale_ratios of transform_param must be two"),
        ("SegData", "", "scale_ratios: 2 scale_ratios: 1", "the smaller one first"),
        ("SegData", "", "mean_file: 'm'", "has no mean_file"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, kind: str, fields: str, transform: str, message: str):
    with pytest.raises(ConfigError, match=message):
        net_of(write(tmp_path), kind, fields, transform)


def test_files_that_do_not_fit(tmp_path: Path):
    write(tmp_path)
    with pytest.raises(DataError, match="is 12 x 20, smaller than the crop, 13 x 5"):
        net_of(tmp_path, "DenseImageData", "batch_size: 1 crop_height: 13 crop_width: 5")
    with pytest.raises(DataError, match="has 'l0.png' in place of a label; label_type: PIXEL reads"):
        net_of(tmp_path, "ImageSegData", "batch_size: 1")
    with pytest.raises(DataError, match="has 12 x 20 labels for 6 x 10 pixels"):
        net_of(tmp_path, "DenseImageData", "batch_size: 1 label_divide_factor: 2")
    (tmp_path / "list").write_text("i0.png\n")
    with pytest.raises(DataError, match="the line has one word; it needs an image and its labels"):
        net_of(tmp_path, "DenseImageData", "batch_size: 1")
    (tmp_path / "list").write_text("\n")
    with pytest.raises(DataError, match="names no images"):
        net_of(tmp_path, "DenseImageData", "batch_size: 1")
    (tmp_path / "list").write_text("i0.png none.png\n")
    with pytest.raises(
        DataError, match=r"record 0 \('i0.png'\) of .* names '.*none.png', which cannot be read: No such file"
    ):
        net_of(tmp_path, "DenseImageData", "batch_size: 1")
    (tmp_path / "small.png").write_bytes(cv2.imencode(".png", np.zeros((2, 2), np.uint8))[1].tobytes())
    (tmp_path / "list").write_text("small.png small.png\n")
    with pytest.raises(DataError, match="is 2 x 2, smaller than stride 4"):
        net_of(tmp_path, "SegData", "", "stride: 4")

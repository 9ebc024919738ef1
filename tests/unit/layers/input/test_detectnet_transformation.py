import math

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scripted_rng import Parts, ScriptedRng
from training import build_net

from caffepy.data.random import SampleRng
from caffepy.errors import DataError
from caffepy.formats.proto.caffe_pb2 import DetectNetAugmentationParameter, DetectNetGroundTruthParameter
from caffepy.layers.input.detectnet_transformation import (
    Augmentation,
    CoverageMap,
    augment_boxes,
    augment_image,
    draw_augmentation,
    rotated_size,
)

SIZE = (80, 120)
NEVER = "crop_prob: -1 scale_prob: -1 flip_prob: -1 rotation_prob: -1 hue_rotation_prob: -1 desaturation_prob: -1 "


def chosen(text, sample=0, output=SIZE):
    param = text_format.Parse(NEVER, DetectNetAugmentationParameter())
    param.MergeFrom(text_format.Parse(text, DetectNetAugmentationParameter()))
    return draw_augmentation(param, SIZE, output, SampleRng(1, 2, sample))


BOX = np.array([[20, 30, 40, 20]], np.float32)


def marked():
    pixels = np.zeros((*SIZE, 3), np.float32)
    pixels[30:50, 20:60] = 255
    return pixels


@pytest.mark.parametrize(
    "text",
    [
        "flip_prob: 1",
        "scale_prob: 1 scale_min: 0.5 scale_max: 1.4",
        "crop_prob: 1 shift_x: 20 shift_y: 30",
        "rotation_prob: 1 max_rotate_degree: 3",
        "flip_prob: 0.5 scale_prob: 0.5 crop_prob: 0.5 shift_x: 9",
    ],
)
def test_boxes_go_where_the_pixels_go(text):
    moved = set()
    for sample in range(25):
        one = chosen(text, sample, (70, 100))
        image = augment_image(marked(), one, np.zeros(3, np.float32), (70, 100))
        left, top, width, height = augment_boxes(BOX, one, SIZE)[0]
        bright = np.argwhere(image[:, :, 0] > 127)
        wanted = [max(top, 0), max(left, 0), min(top + height, 70), min(left + width, 100)]
        found = [*bright.min(0), *(bright.max(0) + 1)]
        np.testing.assert_allclose(found, wanted, atol=3 if "rotation" in text else 2)
        moved.add((float(left), float(top)))
    assert len(moved) > (5 if "min" in text or "shift" in text or "degree" in text else 0)


def plain_bounds(size, rotation):
    """Height and width in whole pixels of what an image covers that is turned about its middle pixel."""
    angle, center = math.radians(rotation), (size[0] // 2, size[1] // 2)
    reach = [
        abs(size[0] / 2 * math.cos(angle)) + abs(size[1] / 2 * math.sin(angle)),
        abs(size[1] / 2 * math.cos(angle)) + abs(size[0] / 2 * math.sin(angle)),
    ]
    return [math.ceil(mid + half) - math.floor(mid - half) + 1 for mid, half in zip(center, reach, strict=True)]


def away_from_zero(value):
    return int(math.copysign(math.floor(abs(value) + 0.5), value))


def plain_choice(param, size, output, parts):
    """Change by change; each has its chance and then its amount."""
    chances = Parts(parts)
    hue = chances.between(-1, 1) * param.hue_rotation if chances.next() <= param.hue_rotation_prob else 0
    saturation = 1 - chances.next() * param.desaturation_max if chances.next() <= param.desaturation_prob else 1
    flip = chances.next() <= param.flip_prob
    factor = chances.between(param.scale_min, param.scale_max) if chances.next() <= param.scale_prob else 1
    scale = tuple(away_from_zero(side * factor) for side in size)
    rotation = chances.between(-1, 1) * param.max_rotate_degree if chances.next() <= param.rotation_prob else 0
    before = plain_bounds(scale, rotation) if rotation else scale
    offsets, shifts = [0.5, 0.5], [0, 0]
    if chances.next() <= param.crop_prob:
        offsets, shifts = [chances.next(), chances.next()], [param.shift_y, param.shift_x]
    crop = tuple(
        away_from_zero(offset * (have - want + shift) - shift // 2)
        for offset, have, want, shift in zip(offsets, before, output, shifts, strict=True)
    )
    return max(min(hue, 180), -180), saturation, flip, scale, rotation, crop


CHOICES = (
    "hue_rotation_prob: 0.4 hue_rotation: 200 desaturation_prob: 0.6 desaturation_max: 0.7 flip_prob: 0.3 "
    "scale_prob: 0.55 scale_min: 0.6 scale_max: 1.5 rotation_prob: 0.45 max_rotate_degree: 7 crop_prob: 0.7 "
    "shift_x: 13 shift_y: 21"
)


@given(st.lists(st.floats(0.01, 0.99), min_size=12, max_size=12))
@settings(max_examples=150, derandomize=True)
def test_choices_against_a_plain_computation(parts):
    param = text_format.Parse(CHOICES, DetectNetAugmentationParameter())
    hue, saturation, flip, scale, rotation, crop = plain_choice(param, SIZE, (70, 100), parts)
    for factor in (1 - 1e-5, 1 + 1e-5):  # what the last bits of a draw decide is rounded otherwise in float32
        other = plain_choice(param, SIZE, (70, 100), [part * factor for part in parts])
        assume((other[2], other[3], other[5]) == (flip, scale, crop))
    assume(rotation == 0 or abs(rotation) > 1e-4)  # smaller angles count as none in float32
    found = draw_augmentation(param, SIZE, (70, 100), ScriptedRng(parts))
    np.testing.assert_allclose(
        [found.hue, found.saturation, found.rotation], [hue, saturation, rotation], rtol=1e-4, atol=1e-4
    )
    assert (found.flip, found.scale, found.crop) == (flip, scale, crop)


def test_nothing_happens_without_chances_but_a_centred_crop():
    image = np.random.default_rng(0).uniform(0, 255, (*SIZE, 3)).astype(np.float32)
    one = chosen("", output=(60, 100))
    assert one == Augmentation(SIZE, (10, 10))
    mean = np.array([10, 20, 30], np.float32)
    np.testing.assert_allclose(augment_image(image, one, mean, (60, 100)), image[10:70, 10:110] - mean, atol=1e-3)


def test_a_larger_output_is_filled_with_zeros():
    one = chosen("", output=(100, 120))
    image = augment_image(np.full((*SIZE, 3), 9, np.float32), one, np.zeros(3, np.float32), (100, 120))
    assert (image[:10] == 0).all()
    assert (image[90:] == 0).all()
    np.testing.assert_allclose(image[10:90], 9, rtol=1e-5)


def test_ranges():
    found = [
        chosen("hue_rotation_prob: 0.5 hue_rotation: 20 desaturation_prob: 1 desaturation_max: 0.4", n)
        for n in range(400)
    ]
    hues = np.array([one.hue for one in found])
    assert 140 < (hues == 0).sum() < 260
    assert np.abs(hues).max() <= 20
    assert hues.min() < -15
    saturations = [one.saturation for one in found]
    assert 0.6 <= min(saturations) < 0.63
    assert 0.97 < max(saturations) <= 1
    flips = sum(chosen("flip_prob: 0.25", n).flip for n in range(400))
    assert 70 < flips < 130


def test_saturation_and_hue():
    pixels = np.tile(np.array([50, 100, 200], np.float32), (4, 5, 1))
    gray = augment_image(pixels, Augmentation((4, 5), saturation=0), np.zeros(3, np.float32), (4, 5))
    np.testing.assert_allclose(gray, 200, rtol=1e-4)  # the value, the largest channel, stays
    turned = augment_image(pixels, Augmentation((4, 5), hue=120), np.zeros(3, np.float32), (4, 5))
    np.testing.assert_allclose(turned[0, 0], [100, 200, 50], rtol=1e-3)


def test_sizes():
    assert rotated_size((80, 120), 90)[0] in range(120, 124)
    with pytest.raises(DataError, match="would be resized to 0 x 0; see scale_min and scale_max"):
        chosen("scale_prob: 1 scale_min: 0 scale_max: 0")


# -- coverage --------------------------------------------------------------------------------------------


def coverage(text):
    return CoverageMap(text_format.Parse(text, DetectNetGroundTruthParameter()))


def plain_coverage(box, stride, rows, columns, scale):
    """For one box, square by square in Python."""
    x, y, w, h = box
    cx, cy, cw, ch = x + w / 2, y + h / 2, w * scale, h * scale
    found = np.zeros((9, rows, columns))
    for row in range(rows):
        for column in range(columns):
            left, top = column * stride, row * stride
            across = min(left + stride, cx + cw / 2) - max(left, cx - cw / 2)
            down = min(top + stride, cy + ch / 2) - max(top, cy - ch / 2)
            if across > 1e-4 and down > 1e-4:
                found[:, row, column] = [
                    1,
                    x - left,
                    y - top,
                    x + w - left,
                    y + h - top,
                    1 / w,
                    1 / h,
                    stride**2 / (cw * ch),
                    1,
                ]
    return found


def test_coverage_of_one_box():
    subject = coverage("stride: 8 image_size_x: 120 image_size_y: 80 scale_cvg: 0.5 obj_norm: true")
    assert subject.shape == (9, 10, 15)
    for box in ([20, 30, 40, 20], [3, 5, 99.5, 60.25], [60, 40, 30, 30]):
        found = subject.generate(np.array([box], np.float32), np.array([1]))
        np.testing.assert_allclose(found, plain_coverage(box, 8, 10, 15, 0.5), rtol=1e-5, atol=1e-5)


def test_boxes_are_cut_at_the_border_or_left():
    text = "stride: 8 image_size_x: 120 image_size_y: 80 scale_cvg: 1 max_cvg_len: 1000 "
    box = np.array([[-20, 10, 40, 30]], np.float32)
    cut = coverage(text).generate(box, np.array([1]))
    np.testing.assert_allclose(cut[1, 2, :3], [0, -8, -16])
    whole = coverage(text + "crop_bboxes: false").generate(box, np.array([1]))
    np.testing.assert_allclose(whole[1, 2, :3], [-20, -28, -36])


def test_other_classes_and_empty_boxes_are_left_out():
    subject = coverage("image_size_x: 40 image_size_y: 40 object_class { src: 3 dst: 1 }")
    assert subject.shape == (10, 10, 10)
    boxes = np.array([[5, 5, 20, 20], [5, 5, 0, 20], [50, 50, 9, 9]], np.float32)
    assert not subject.generate(boxes, np.array([1, 3, 3])).any()
    found = subject.generate(boxes[:1], np.array([3]))
    assert not found[8].any()
    assert found[9].any()
    assert found[7].max() == 1  # without obj_norm


@pytest.mark.parametrize(
    ("text", "sides"),
    [
        ("gridbox_type: GRIDBOX_MAX max_cvg_len: 8", (8, 8)),
        ("gridbox_type: GRIDBOX_MAX max_cvg_len: 24", (24, 16)),
        ("gridbox_type: GRIDBOX_MAX min_cvg_len: 60", (32, 16)),  # which GRIDBOX_MIN alone reads
        ("gridbox_type: GRIDBOX_MIN min_cvg_len: 24", (32, 24)),
        ("gridbox_type: GRIDBOX_MIN min_cvg_len: 40 max_cvg_len: 8", (40, 32)),  # not beyond the box
        ("gridbox_type: GRIDBOX_MIN", (50, 32)),
        ("", (32, 16)),
    ],
)
def test_covered_regions_have_a_least_or_largest_length(text, sides):
    """The box is 64 wide and 32 high; half of each is covered."""
    subject = coverage(f"stride: 2 image_size_x: 100 image_size_y: 60 scale_cvg: 0.5 {text}")
    found = subject.generate(np.array([[10, 12, 64, 32]], np.float32), np.array([1]))[0]
    columns, rows = (np.flatnonzero(found.any(axis)) for axis in (0, 1))
    center = (10 + 32, 12 + 16)
    for squares, middle, side in zip((columns, rows), center, sides, strict=True):
        wanted = [n for n in range(100) if n * 2 + 2 > middle - side / 2 and n * 2 < middle + side / 2]
        assert squares.tolist() == wanted
    assert found.sum() == len(columns) * len(rows)


# -- the layer -------------------------------------------------------------------------------------------


PLAIN = "crop_prob: -1 scale_prob: -1 rotation_prob: -1 hue_rotation_prob: -1 desaturation_prob: -1"


def transformed(images, labels, augmentation):
    """The tops of a DetectNetTransformation in training with a grid of 4 pixels."""
    shapes = " ".join(f"shape {{ {' '.join(f'dim: {size}' for size in one.shape)} }}" for one in (images, labels))
    net = build_net(
        f"layer {{ name: 'i' type: 'Input' top: 'x' top: 'y' input_param {{ {shapes} }} }} "
        "layer { name: 'L' type: 'DetectNetTransformation' bottom: 'x' bottom: 'y' top: 'a' top: 'b' "
        "detectnet_groundtruth_param { stride: 4 image_size_x: 16 image_size_y: 8 "
        "object_class { src: 1 dst: 0 } } "
        f"detectnet_augmentation_param {{ {augmentation} }} }}"
    )
    for top, values in (("x", images), ("y", labels)):
        net.context.backend.from_host(values, net.blobs[top].data)
    net.forward()
    found = [net.blobs[top].host_data().copy() for top in ("a", "b")]
    net.close()
    return found


def test_detectnet_augmentation_param_mirrors_images_and_their_coverage():
    images = np.random.default_rng(0).uniform(0, 255, (2, 3, 8, 16)).astype(np.float32)
    labels = np.zeros((2, 1, 2, 16), np.float32)
    labels[:, 0, 0, :2] = 1, 16
    labels[:, 0, 1, :6] = 0, 0, 8, 8, 0, 1
    plain, plain_maps = transformed(images, labels, f"{PLAIN} flip_prob: -1")
    flipped, flipped_maps = transformed(images, labels, f"{PLAIN} flip_prob: 1")
    np.testing.assert_allclose(plain, images, atol=1e-4)
    np.testing.assert_allclose(flipped, images[..., ::-1], atol=1e-4)
    covered = np.zeros((2, 4))
    covered[:, :2] = 1  # the middle half of the box, the pixels 2 to 6 each way, has a part in four squares of 4
    np.testing.assert_array_equal(plain_maps[:, 0], [covered, covered])
    np.testing.assert_array_equal(plain_maps[:, 3, 0, :2], [[8, 4], [8, 4]])  # the right edge, from each square
    np.testing.assert_array_equal(flipped_maps[:, 0], plain_maps[:, 0, :, ::-1])

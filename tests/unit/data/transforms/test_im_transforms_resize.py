import math

import cv2
import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_rng import Parts, ScriptedRng

from caffepy.data.random import SampleRng
from caffepy.data.transforms.im_transforms import (
    apply_resize,
    intel_resize,
    random_resize,
    random_size,
    resizes_randomly,
)
from caffepy.errors import DataError
from caffepy.formats.proto.caffe_pb2 import ResizeParameter, TransformationParameter

NEAREST = cv2.INTER_NEAREST


def param(text):
    return text_format.Parse(text, TransformationParameter())


def pixels(height, width, channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def sizes(text, height, width, least=(0, 0), count=400):
    return [random_size(param(text), height, width, least, SampleRng(1, 2, n)) for n in range(count)]


# -- the random resize -----------------------------------------------------------------------------------


@given(
    height=st.integers(4, 200),
    width=st.integers(4, 200),
    lower=st.integers(1, 300),
    more=st.integers(0, 50),
    up=st.booleans(),
    crop=st.integers(0, 8),
)
def test_the_shorter_side_is_drawn_and_the_ratio_kept(height, width, lower, more, up, crop):
    text = f"img_rand_resize_lower: {lower} img_rand_resize_upper: {lower + more} allow_upscale: {str(up).lower()}"
    for rows, columns in sizes(text, height, width, (crop, crop), 5):
        if not up:
            assert rows <= height
            assert columns <= width
            if lower > max(height, width):
                assert (rows, columns) == (height, width)
            continue
        assert rows >= crop
        assert columns >= crop
        shorter, longer = sorted((rows, columns))
        assert max(lower, crop) <= shorter <= max(lower + more, crop)
        if lower >= crop:
            assert abs(longer - shorter * max(height, width) / min(height, width)) <= max(1, longer / 100)


def plain_size(param, height, width, crop, parts):
    """Step by step: the shorter side, the ratio, the stretches, the crop, the bound; rounded to float32 at each."""
    f32, chances = np.float32, Parts(parts)
    shorter = min(height, width)
    if param.img_rand_resize_lower and param.img_rand_resize_upper:
        count = param.img_rand_resize_upper - param.img_rand_resize_lower + 1
        shorter = param.img_rand_resize_lower + math.floor(count * chances.next())
    scale = f32(shorter) / f32(min(height, width))
    rows, columns = scale * f32(height), scale * f32(width)
    if param.rand_resize_ratio_lower >= 1 and param.rand_resize_ratio_upper > 1:
        ratio = f32(chances.between(param.rand_resize_ratio_lower, param.rand_resize_ratio_upper))
        widens = columns > rows or (columns == rows and chances.next() >= 0.5)
        rows, columns = (rows, rows * ratio) if widens else (columns * ratio, columns)
    if param.vertical_stretch_lower > 0 and param.vertical_stretch_upper > 0:
        rows *= f32(chances.between(param.vertical_stretch_lower, param.vertical_stretch_upper))
    if param.horizontal_stretch_lower > 0 and param.horizontal_stretch_upper > 0:
        columns *= f32(chances.between(param.horizontal_stretch_lower, param.horizontal_stretch_upper))
    size = [max(side, math.floor(float(made) + 0.5)) for side, made in zip(crop, (rows, columns), strict=True)]
    return tuple(size) if param.allow_upscale else (min(size[0], height), min(size[1], width))


RANGES = [
    "img_rand_resize_lower: 13 img_rand_resize_upper: 90",
    "rand_resize_ratio_lower: 1.1 rand_resize_ratio_upper: 1.75",
    "vertical_stretch_lower: 0.7 vertical_stretch_upper: 1.4",
    "horizontal_stretch_lower: 0.55 horizontal_stretch_upper: 0.95",
]
PART = st.floats(0, 0.999)


@settings(max_examples=80)
@given(
    chosen=st.sets(st.sampled_from(RANGES), min_size=1),
    up=st.booleans(),
    parts=st.lists(PART, min_size=6, max_size=6),
    height=st.integers(20, 60),
    width=st.integers(20, 60),
    crop=st.sampled_from([(0, 0), (31, 31), (24, 37)]),
)
def test_sizes_against_a_plain_computation(chosen, up, parts, height, width, crop):
    settings = param(" ".join(sorted(chosen)) + f" allow_upscale: {str(up).lower()}")
    wanted = plain_size(settings, height, width, crop, parts)
    assert random_size(settings, height, width, crop, ScriptedRng(parts)) == wanted


@pytest.mark.parametrize(
    ("more", "height", "width", "size"),
    [
        ("img_rand_resize_upper: 10", 20, 40, (20, 40)),  # one bound alone does nothing
        ("img_rand_resize_lower: 10 img_rand_resize_upper: 29", 20, 40, (20, 40)),
        ("img_rand_resize_lower: 10 img_rand_resize_upper: 20", 20, 40, (15, 30)),
        ("img_rand_resize_lower: 21 img_rand_resize_upper: 40 allow_upscale: true", 20, 40, (31, 62)),
        ("rand_resize_ratio_lower: 1 rand_resize_ratio_upper: 1.5", 20, 40, (20, 25)),
        ("rand_resize_ratio_lower: 1.25 rand_resize_ratio_upper: 1.5", 40, 20, (28, 20)),
        ("rand_resize_ratio_lower: 0.5 rand_resize_ratio_upper: 1.5", 40, 20, (40, 20)),
        ("vertical_stretch_lower: 0.5 vertical_stretch_upper: 1", 20, 40, (15, 40)),
        ("vertical_stretch_lower: 1.5 vertical_stretch_upper: 2.5 allow_upscale: true", 20, 40, (40, 40)),
        ("horizontal_stretch_lower: 0.5 horizontal_stretch_upper: 0.75", 20, 40, (20, 25)),
        ("horizontal_stretch_lower: 1 horizontal_stretch_upper: 2 allow_upscale: true", 20, 40, (20, 60)),
    ],
)
def test_the_middle_of_each_range(more, height, width, size):
    assert random_size(param(more), height, width, (0, 0), ScriptedRng([0.5] * 4)) == size


def test_every_length_is_as_likely():
    found = sizes("img_rand_resize_lower: 10 img_rand_resize_upper: 14", 40, 50, count=2000)
    counts = np.bincount([rows for rows, _ in found])[10:]
    assert len(counts) == 5
    assert counts.min() > 320


def test_a_ratio_is_given_to_the_longer_side():
    text = "rand_resize_ratio_lower: 1 rand_resize_ratio_upper: 1.5 allow_upscale: true"
    wide = np.array(sizes(text, 100, 300))
    assert (wide[:, 0] == 100).all()
    assert 100 <= wide[:, 1].min() < 103
    assert 147 < wide[:, 1].max() <= 150
    tall = np.array(sizes(text, 300, 100))
    assert (tall[:, 1] == 100).all()
    square = np.array(sizes(text, 100, 100))
    assert 120 < (square[:, 0] == 100).sum() < 280


def test_a_square_becomes_wide_or_high_by_chance():
    """The pixels are those of one of the two resized images, and both occur."""
    square = pixels(10, 10)
    either = [cv2.resize(square, size, interpolation=NEAREST) for size in ((12, 10), (10, 12))]
    text = "rand_resize_ratio_lower: 1.18 rand_resize_ratio_upper: 1.18 allow_upscale: true "
    text += "interpolation_algo_up: INTER_NEAREST"
    found = [random_resize(square, param(text), (8, 8), SampleRng(1, 2, n)) for n in range(20)]
    assert {tuple(np.array_equal(one, other) for other in either) for one in found} == {(True, False), (False, True)}


def test_stretches_are_of_each_side():
    text = "vertical_stretch_lower: 0.5 vertical_stretch_upper: 0.9 horizontal_stretch_lower: 0.25 "
    found = np.array(sizes(text + "horizontal_stretch_upper: 0.25", 1000, 100))
    assert (found[:, 1] == 25).all()
    assert 500 <= found[:, 0].min() < 510
    assert 890 < found[:, 0].max() <= 900


def test_which_fields_ask_for_it():
    assert not resizes_randomly(param("crop_size: 4 interpolation_algo_up: INTER_AREA allow_upscale: true"))
    assert resizes_randomly(param("vertical_stretch_upper: 1"))
    assert resizes_randomly(param("img_rand_resize_upper: 4"))


@pytest.mark.parametrize(
    ("size", "more", "shape", "downwards"),
    [
        (10, "", (10, 15), True),
        (26, "", (26, 39), False),
        (20, "vertical_stretch_lower: 0.5 vertical_stretch_upper: 0.5", (10, 30), True),
        (26, "horizontal_stretch_lower: 0.5 horizontal_stretch_upper: 0.5", (26, 20), False),  # one side grows
    ],
)
@pytest.mark.parametrize(("down", "up"), [("LINEAR", "CUBIC"), ("CUBIC", "NEAREST"), ("AREA", "LINEAR")])
def test_interpolation_downwards_and_upwards(size, more, shape, downwards, down, up):
    image = pixels(20, 30)
    text = f"img_rand_resize_lower: {size} img_rand_resize_upper: {size} interpolation_algo_down: INTER_{down} "
    text += f"interpolation_algo_up: INTER_{up} allow_upscale: true {more}"
    algorithm = getattr(cv2, f"INTER_{down if downwards else up}")
    cv2.setUseOptimized(False)  # without Intel's IPP
    try:
        wanted = cv2.resize(image, shape[::-1], interpolation=algorithm)
        np.testing.assert_array_equal(random_resize(image, param(text), (0, 0), SampleRng(0, 0, 0)), wanted)
    finally:
        cv2.setUseOptimized(True)


def test_down_and_up_have_their_own_interpolation():
    image = pixels(8, 8)
    text = (
        "img_rand_resize_lower: {0} img_rand_resize_upper: {0} allow_upscale: true interpolation_algo_up: INTER_NEAREST"
    )
    up = random_resize(image, param(text.format(16)), (0, 0), SampleRng(0, 0, 0))
    np.testing.assert_array_equal(up, image.repeat(2, 0).repeat(2, 1))
    text = text.replace("_up:", "_down:") + " interpolation_algo_up: INTER_LINEAR"
    down = random_resize(image, param(text.format(4)), (0, 0), SampleRng(0, 0, 0))
    np.testing.assert_array_equal(down, image[::2, ::2])


def test_a_stretch_beyond_all_bounds_is_refused():
    text = "vertical_stretch_lower: 60000 vertical_stretch_upper: 60000 allow_upscale: true"
    with pytest.raises(DataError, match="is 8 x 8 and would be resized to 480000 x 8"):
        random_resize(pixels(8, 8), param(text), (0, 0), SampleRng(0, 0, 0))


# -- resize_param ----------------------------------------------------------------------------------------


def resized(image, text, sample=0):
    return apply_resize(image, text_format.Parse(text, ResizeParameter()), SampleRng(3, 4, sample))


def test_warp_ignores_the_ratio_and_the_chance():
    image = pixels(10, 20)
    found = resized(image, "prob: 0 height: 6 width: 7 interp_mode: NEAREST")
    np.testing.assert_array_equal(found, cv2.resize(image, (7, 6), interpolation=NEAREST))


@pytest.mark.parametrize(("height", "width", "inner"), [(10, 20, (5, 10)), (20, 10, (10, 5)), (10, 10, (10, 10))])
@pytest.mark.parametrize("pad", ["CONSTANT", "MIRRORED", "REPEAT_NEAREST"])
def test_a_large_image_is_fitted_and_padded(height, width, inner, pad):
    image = pixels(height, width)
    text = f"resize_mode: FIT_LARGE_SIZE_AND_PAD height: 10 width: 10 interp_mode: NEAREST pad_mode: {pad} "
    found = resized(image, text + "pad_value: 1 pad_value: 2 pad_value: 3")
    small = cv2.resize(image, inner[::-1], interpolation=NEAREST)
    before = [(10 - side) // 2 for side in inner]
    pads = [(before[axis], 10 - inner[axis] - before[axis]) for axis in (0, 1)]
    if pad == "CONSTANT":
        wanted = np.stack([np.pad(small[..., c], pads, constant_values=c + 1) for c in range(3)], -1)
    else:
        wanted = np.pad(small, [*pads, (0, 0)], "reflect" if pad == "MIRRORED" else "edge")
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("height", "width", "size"), [(10, 20, (8, 16)), (20, 10, (12, 6)), (9, 9, (8, 8)), (16, 12, (8, 6))]
)
def test_the_small_side_is_fitted(height, width, size):
    image = pixels(height, width)
    found = resized(image, "resize_mode: FIT_SMALL_SIZE height: 8 width: 6 interp_mode: NEAREST")
    np.testing.assert_array_equal(found, cv2.resize(image, size[::-1], interpolation=NEAREST))


@pytest.mark.parametrize(("height", "width", "inner"), [(10, 20, (3, 6)), (20, 10, (8, 4)), (12, 9, (8, 6))])
def test_the_padding_of_an_oblong_size(height, width, inner):
    image = pixels(height, width)
    found = resized(image, "resize_mode: FIT_LARGE_SIZE_AND_PAD height: 8 width: 6 interp_mode: NEAREST pad_value: 7")
    wanted = np.full((8, 6, 3), 7, np.uint8)
    top, left = (8 - inner[0]) // 2, (6 - inner[1]) // 2
    wanted[top : top + inner[0], left : left + inner[1]] = cv2.resize(image, inner[::-1], interpolation=NEAREST)
    np.testing.assert_array_equal(found, wanted)


def test_one_of_several_interpolations_is_picked():
    image = pixels(16, 16)
    modes = {"NEAREST": 0, "LINEAR": 0, "AREA": 0, "CUBIC": 0, "LANCZOS4": 0}
    text = "height: 7 width: 9"
    wanted = {mode: resized(image, f"{text} interp_mode: {mode}").tobytes() for mode in modes}
    assert len(set(wanted.values())) == len(modes)
    for sample in range(200):
        found = resized(image, text + "".join(f" interp_mode: {mode}" for mode in modes), sample).tobytes()
        modes[next(mode for mode, one in wanted.items() if one == found)] += 1
    assert min(modes.values()) > 20


def test_what_cannot_be_resized():
    text = "resize_mode: FIT_LARGE_SIZE_AND_PAD height: 4 width: 4"
    with pytest.raises(DataError, match="is 1 x 100 and would be resized to 0 x 4"):
        resized(pixels(1, 100), text)
    with pytest.raises(DataError, match="has 3 channels, but resize_param has 2 pad_value; give 1 or 3"):
        resized(pixels(5, 9), text + " pad_value: 1 pad_value: 2")
    with pytest.raises(DataError, match="is 1 x 30000 and would be resized to 9 x 270000"):
        resized(pixels(1, 30000), "resize_mode: FIT_SMALL_SIZE height: 9 width: 9")


# -- Intel's random resizes ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(20, 30), (30, 20), (25, 25)])
def test_intels_shorter_side_is_drawn(size):
    text = param("crop_size: 5 random_resize_param { min_size: 8 max_size: 10 resize_param { interp_mode: CUBIC } }")
    seen = set()
    for n in range(60):
        found = intel_resize(pixels(*size), text, SampleRng(1, 2, n))
        seen.add(min(found.shape[:2]))
        rows, columns = (int(np.float32(side) / min(size) * min(found.shape[:2])) for side in size)
        assert found.shape[:2] == (rows, columns)
        wanted = cv2.resize(pixels(*size), (columns, rows), interpolation=cv2.INTER_CUBIC)
        np.testing.assert_allclose(found, wanted, atol=1)
    assert seen == {8, 9, 10}


def test_intels_shorter_side_is_within_the_image_if_no_bounds_are_given():
    text = param("crop_size: 5 random_resize_param { }")
    seen = {min(intel_resize(pixels(8, 12), text, SampleRng(1, 2, n)).shape[:2]) for n in range(60)}
    assert seen == set(range(8, 13))


def test_intels_parts_have_the_area_and_proportions_of_the_bounds():
    rows, columns = np.indices((200, 100))
    image = np.stack([rows, columns, columns], 2).astype(np.uint8)
    bounds = "min_area_ratio: 0.08 max_area_ratio: 1 aspect_ratio_change: 0.75"
    text = param(f"crop_size: 50 random_aspect_ratio_param {{ {bounds} }}")
    areas, proportions = [], []
    for n in range(300):
        found = intel_resize(image, text, SampleRng(1, 2, n)).astype(np.int64)
        assert found.shape == (50, 50, 3)
        height, width = (np.ptp(found[:, :, axis]) + 1 for axis in (0, 1))
        areas.append(height * width / 20000)
        proportions.append(height / width)
    inside = [0.7 * 0.5625 < p < 1.4 / 0.5625 for p in proportions]
    assert np.mean(inside) > 0.99
    assert min(areas) < 0.15 and max(areas) > 0.4


def test_intels_parts_that_never_fit_give_the_whole_image():
    text = param("crop_size: 10 random_aspect_ratio_param { min_area_ratio: 1 max_area_ratio: 1 max_attempt: 3 }")
    found = intel_resize(pixels(20, 40), text, SampleRng(1, 2, 3))
    np.testing.assert_allclose(found, cv2.resize(pixels(20, 40), (20, 10)), atol=1)
    part = intel_resize(pixels(20, 20), text, SampleRng(1, 2, 3))
    np.testing.assert_allclose(part, cv2.resize(pixels(20, 20), (10, 10)), atol=1)

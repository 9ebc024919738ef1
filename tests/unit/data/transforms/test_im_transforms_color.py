import cv2
import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_rng import Parts, ScriptedRng

from caffepy.data.random import SampleRng
from caffepy.data.transforms.im_transforms import distort, scale_bytes
from caffepy.errors import DataError
from caffepy.formats.proto.caffe_pb2 import DistortionParameter

ALL_BYTES = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, 2)


def image(seed=0):
    return np.random.default_rng(seed).integers(0, 256, (6, 7, 3), dtype=np.uint8)


def distorted(pixels, text, sample=0):
    return distort(pixels, text_format.Parse(text, DistortionParameter()), SampleRng(5, 6, sample))


def saturated(values):
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


def plain_hsv(pixels, channel, function):
    hsv = cv2.cvtColor(pixels, cv2.COLOR_BGR2HSV)
    hsv[:, :, channel] = saturated(function(hsv[:, :, channel].astype(np.float32)))
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR)


def plain_distortion(pixels, param, parts):
    """Change by change; each has its chance and then its amount."""
    f32, chances = np.float32, Parts(parts)
    contrast_first = chances.next() > 0.5

    def contrast(image):
        if chances.next() < f32(param.contrast_prob):
            factor = f32(chances.between(param.contrast_lower, param.contrast_upper))
            return saturated(image.astype(np.float32) * factor)
        return image

    if chances.next() < f32(param.brightness_prob):
        summand = f32(chances.between(-param.brightness_delta, param.brightness_delta))
        pixels = saturated(pixels.astype(np.float32) + summand)
    if contrast_first:
        pixels = contrast(pixels)
    if chances.next() < f32(param.saturation_prob):
        factor = f32(chances.between(param.saturation_lower, param.saturation_upper))
        pixels = plain_hsv(pixels, 1, lambda values: values * factor)
    if chances.next() < f32(param.hue_prob):
        summand = f32(chances.between(-param.hue_delta, param.hue_delta))
        pixels = plain_hsv(pixels, 0, lambda values: values + summand)
    return pixels if contrast_first else contrast(pixels)


DISTORTION = (
    "brightness_prob: 0.6 brightness_delta: 40 contrast_prob: 0.5 contrast_lower: 0.4 contrast_upper: 1.7 "
    "saturation_prob: 0.7 saturation_lower: 0.3 saturation_upper: 1.6 hue_prob: 0.55 hue_delta: 20"
)
CHANCES = st.lists(st.sampled_from([0.02, 0.3, 0.45, 0.52, 0.58, 0.65, 0.8, 0.97]), min_size=12, max_size=12)


@settings(max_examples=100)
@given(parts=CHANCES)
def test_all_changes_against_a_plain_computation(parts):
    param = text_format.Parse(DISTORTION, DistortionParameter())
    wanted = plain_distortion(image(3), param, parts)
    np.testing.assert_array_equal(distort(image(3), param, ScriptedRng(parts)), wanted)


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation", "hue", "random_order"])
def test_each_change_happens_as_often_as_its_chance_says(name):
    """One quarter of 600 images; an order of the channels that is drawn is the old one in a sixth of the cases."""
    more = {
        "brightness": "brightness_delta: 30",
        "contrast": "contrast_lower: 0.3 contrast_upper: 0.6",
        "saturation": "saturation_lower: 0.2 saturation_upper: 0.5",
        "hue": "hue_delta: 60",
        "random_order": "",
    }[name]
    pixels = np.array([[[20, 90, 200]]], np.uint8)
    found = [distorted(pixels, f"{name}_prob: 0.25 {more}", sample) for sample in range(600)]
    changed = sum((one != pixels).any() for one in found)
    assert abs(changed / 600 - (0.25 * 5 / 6 if name == "random_order" else 0.25)) < 0.055


def test_without_chances_nothing_changes():
    np.testing.assert_array_equal(distorted(image(), "brightness_delta: 9 hue_delta: 3"), image())


def test_brightness_is_added_and_evenly_distributed():
    differences = []
    for sample in range(300):
        found = distorted(ALL_BYTES, "brightness_prob: 1 brightness_delta: 32", sample)
        difference = int(found[8, 0, 0]) - 128
        np.testing.assert_array_equal(found, saturated(ALL_BYTES.astype(float) + difference))
        differences.append(difference)
    assert -32 <= min(differences) < -28
    assert 28 < max(differences) <= 32
    assert abs(np.mean(differences)) < 4


def test_contrast_multiplies():
    for sample in range(50):
        found = distorted(ALL_BYTES, "contrast_prob: 1 contrast_lower: 0.5 contrast_upper: 1.5", sample)
        factor = np.polyfit(np.arange(100), found.reshape(-1, 3)[:100, 0], 1)[0]
        assert 0.48 < factor < 1.52
        assert np.abs(found - np.clip(ALL_BYTES * factor, 0, 255)).max() < 3
    np.testing.assert_array_equal(
        distorted(ALL_BYTES, "contrast_prob: 1 contrast_lower: 2 contrast_upper: 2"), saturated(ALL_BYTES * 2.0)
    )


def test_saturation_and_hue_change_hsv():
    hsv = cv2.cvtColor(image(), cv2.COLOR_BGR2HSV)
    hsv[:, :, 1] = saturated(hsv[:, :, 1] * 0.5)
    wanted = cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR)
    text = "saturation_prob: 1 saturation_lower: 0.5 saturation_upper: 0.5"
    np.testing.assert_array_equal(distorted(image(), text), wanted)
    hues = {distorted(image(), "hue_prob: 1 hue_delta: 18", sample).tobytes() for sample in range(60)}
    possible = set()
    for change in range(-18, 19):
        hsv = cv2.cvtColor(image(), cv2.COLOR_BGR2HSV)
        hsv[:, :, 0] = saturated(hsv[:, :, 0].astype(float) + change)
        possible.add(cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR).tobytes())
    assert hues <= possible
    assert len(hues) > 15


def test_a_hue_that_stays_leaves_the_image_alone():
    """HSV of bytes and back rounds, which a hue_delta of 0 must not show."""
    hsv = cv2.cvtColor(image(), cv2.COLOR_BGR2HSV)
    assert (cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR) != image()).any()
    np.testing.assert_array_equal(distorted(image(), "hue_prob: 1 hue_delta: 0"), image())


def test_channels_take_every_order():
    pixels = np.array([[[1, 2, 3]]], np.uint8)
    found = [tuple(distorted(pixels, "random_order_prob: 1", sample)[0, 0].tolist()) for sample in range(300)]
    counts = {order: found.count(order) for order in set(found)}
    assert len(counts) == 6
    assert min(counts.values()) > 25
    kept = sum((distorted(pixels, "random_order_prob: 0.5", n) == pixels).all() for n in range(300))
    assert 130 < kept < 220


def test_contrast_comes_before_or_after_saturation():
    text = (
        "contrast_prob: 1 contrast_lower: 2 contrast_upper: 2 "
        "saturation_prob: 1 saturation_lower: 0.5 saturation_upper: 0.5"
    )
    assert len({distorted(image(), text, sample).tobytes() for sample in range(40)}) == 2


def test_rounding_is_opencvs():
    found = scale_bytes(ALL_BYTES, 0.5, 0)
    np.testing.assert_array_equal(found, cv2.convertScaleAbs(ALL_BYTES, alpha=0.5))


def test_what_cannot_be_distorted():
    with pytest.raises(DataError, match="distort_param needs uint8"):
        distorted(np.zeros((2, 2, 3), np.float32), "")
    with pytest.raises(DataError, match="cannot be transformed: OpenCV's cvtColor says"):
        distorted(np.zeros((2, 2, 1), np.uint8), "hue_prob: 1 hue_delta: 2")
    with pytest.raises(DataError, match="has 1 channels; random_order_prob needs 3"):
        distorted(np.zeros((2, 2, 1), np.uint8), "random_order_prob: 1")

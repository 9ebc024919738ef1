"""Classifier and Detector over a small net whose outputs can be computed by hand: the mean of each channel."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from caffepy.errors import DataError, UserError
from caffepy.pycaffe.classifier import Classifier
from caffepy.pycaffe.detector import Detector

NET = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: [2, 3, 8, 8] } } }
layer { name: "mean" type: "Pooling" bottom: "data" top: "mean" pooling_param { pool: AVE global_pooling: true } }
layer { name: "out" type: "Flatten" bottom: "mean" top: "out" }
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "net.prototxt"
    path.write_text(NET)
    return path


def image(height=20, width=16, seed=0):
    return np.random.default_rng(seed).random((height, width, 3), dtype=np.float32)


def test_the_centre_is_classified(model):
    net = Classifier(
        model, None, image_dims=(10, 12), mean=np.array([1.0, 2, 3]), raw_scale=255, channel_swap=(2, 1, 0)
    )
    images = [image(10, 12, seed) for seed in range(3)]
    found = net.predict(images, oversample=False)
    centres = np.stack([one[1:9, 2:10].mean((0, 1))[::-1] * 255 - [1, 2, 3] for one in images])
    np.testing.assert_allclose(found, centres, rtol=1e-4)


def test_ten_crops_are_averaged(model):
    net = Classifier(model, None, image_dims=(10, 12), input_scale=2)
    one = image(10, 12)
    crops = [one[:8, :8], one[:8, 4:], one[2:, :8], one[2:, 4:], one[1:9, 2:10]]
    expected = 2 * np.mean([crop.mean((0, 1)) for crop in crops], axis=0)
    np.testing.assert_allclose(net.predict([one]), expected[np.newaxis], rtol=1e-4)


@pytest.mark.parametrize("options", [{"channel_swap": (2, 1, 0)}, {"mean": np.array([1.0, 2, 3])}])
def test_a_gray_image_for_a_color_net(model, options):
    with pytest.raises(UserError, match="the image has 1 channel, and 'data' takes 3"):
        Classifier(model, None, **options).predict([image()[:, :, :1]], oversample=False)


def test_an_image_without_channels(model):
    with pytest.raises(UserError, match=r"an image has the shape \(20, 16\); images are \(H, W, K\), gray ones"):
        Classifier(model, None).predict([image()[:, :, 0]])


def test_images_are_resized_to_the_input(model):
    net = Classifier(model, None)
    assert list(net.image_dims) == [8, 8]
    np.testing.assert_allclose(
        net.predict([np.full((30, 20, 3), 0.5)], oversample=False), np.full((1, 3), 0.5), rtol=1e-5
    )


def test_image_dims_below_the_input(model):
    for oversample in (False, True):
        with pytest.raises(UserError, match="crops of 8 x 8 cannot be cut out of images of 6 x 9"):
            Classifier(model, None, image_dims=(6, 9)).predict([image()], oversample)


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "picture.png"
    pixels = np.random.default_rng(3).integers(0, 255, (20, 30, 3), dtype=np.uint8)
    cv2.imwrite(str(path), pixels)
    return str(path), pixels[:, :, ::-1] / 255


def test_windows_are_classified(model, picture):
    name, pixels = picture
    net = Detector(model, None, channel_swap=(2, 1, 0), raw_scale=10)
    windows = [(2, 3, 10, 11), np.array([0, 0, 8, 8])]
    found = net.detect_windows(iter([(name, windows), (name, [(5, 5, 13, 13)])]))
    assert [entry["filename"] for entry in found] == [name] * 3
    for entry, (top, left, bottom, right) in zip(found, [*windows, (5, 5, 13, 13)], strict=True):
        expected = pixels[top:bottom, left:right].mean((0, 1))[::-1] * 10
        np.testing.assert_allclose(entry["prediction"], expected, rtol=1e-4)
        assert tuple(entry["window"]) == (top, left, bottom, right)
    assert net.detect_windows([]) == []


def test_context_within_the_image(model, picture):
    _, pixels = picture
    net = Detector(model, None, context_pad=2)
    # 4 x 4 pixels of the window (its corners included) become the middle 4 of 8: the scale is 1.
    crop = net.crop(pixels, (8, 10, 11, 13))
    assert crop.shape == (8, 8, 3)
    np.testing.assert_allclose(crop[1:-1, 1:-1].mean(), pixels[6:14, 8:16].mean(), atol=0.05)


def test_context_beyond_the_image_is_the_mean(model, picture):
    _, pixels = picture
    mean = np.array([10.0, 20, 30])
    net = Detector(model, None, mean=mean, raw_scale=100, channel_swap=(2, 1, 0), context_pad=2)
    np.testing.assert_allclose(net.crop_mean[0, 0], mean[::-1] / 100)
    crop = net.crop(pixels, np.array([0, 0, 3, 3]))
    np.testing.assert_allclose(crop[0], np.broadcast_to([0.3, 0.2, 0.1], (8, 3)), rtol=1e-6)
    np.testing.assert_allclose(crop[:, 0], np.broadcast_to([0.3, 0.2, 0.1], (8, 3)), rtol=1e-6)
    assert abs(crop[-2, -2] - [0.3, 0.2, 0.1]).max() > 1e-3
    without = Detector(model, None, context_pad=2)
    np.testing.assert_array_equal(without.crop(pixels, (0, 0, 3, 3))[0], 0)


def test_windows_that_cannot_be(model, picture):
    name, pixels = picture
    for context_pad in (None, 2):
        net = Detector(model, None, context_pad=context_pad)
        with pytest.raises(UserError, match=r"the window \[50, 60, 58, 68\] is empty in an image of 20 x 30"):
            net.crop(pixels, (50, 60, 58, 68))
    with pytest.raises(UserError, match="context_pad 4 does not fit the net's input of 8 x 8"):
        Detector(model, None, context_pad=4)
    with pytest.raises(DataError, match=r"absent.png' cannot be read"):
        Detector(model, None).detect_windows([(name.replace("picture", "absent"), [(0, 0, 8, 8)])])


def test_selective_search_needs_its_package(model, picture, tmp_path, monkeypatch):
    name, _ = picture
    net = Detector(model, None)
    with pytest.raises(UserError, match="selective search needs .* pass windows to detect_windows"):
        net.detect_selective_search([name])
    (tmp_path / "selective_search_ijcv_with_python.py").write_text(
        "def get_windows(names, cmd):\n"
        "    assert cmd == 'selective_search_rcnn'\n"
        "    return [[(0, 0, 8, 8)] for _ in names]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert len(net.detect_selective_search([name])) == 1

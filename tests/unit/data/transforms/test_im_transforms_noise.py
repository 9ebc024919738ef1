import cv2
import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.data.random import SampleRng
from caffepy.data.transforms.im_transforms import apply_noise
from caffepy.errors import DataError
from caffepy.formats.proto.caffe_pb2 import NoiseParameter


def image(channels=3):
    return np.random.default_rng(1).integers(0, 200, (18, 20, channels), dtype=np.uint8)


def noisy(text, pixels=None, sample=0):
    return apply_noise(
        image() if pixels is None else pixels, text_format.Parse(text, NoiseParameter()), SampleRng(7, 8, sample)
    )


def brightness(function):
    planes = cv2.cvtColor(image(), cv2.COLOR_BGR2YCrCb)
    planes[:, :, 0] = function(planes[:, :, 0].copy())
    return cv2.cvtColor(planes, cv2.COLOR_YCrCb2BGR)


def jpeg():
    return cv2.imdecode(cv2.imencode(".jpg", image(), [cv2.IMWRITE_JPEG_QUALITY, 40])[1], cv2.IMREAD_COLOR)


EROSION = np.array([[0, 1, 0], [1, 1, 1], [0, 1, 0]], np.uint8)
KINDS = {
    "decolorize: true": lambda: cv2.cvtColor(cv2.cvtColor(image(), cv2.COLOR_BGR2GRAY), cv2.COLOR_GRAY2BGR),
    "gauss_blur: true": lambda: cv2.GaussianBlur(image(), (7, 7), 1.5),
    "hist_eq: true": lambda: brightness(cv2.equalizeHist),
    "clahe: true": lambda: brightness(cv2.createCLAHE(4).apply),
    "jpeg: 40": jpeg,
    "erode: true": lambda: cv2.erode(image(), EROSION),
    "posterize: true": lambda: (image() // 64 * 64 + 32).astype(np.uint8),
    "inverse: true": lambda: 255 - image(),
    "convert_to_hsv: true": lambda: cv2.cvtColor(image(), cv2.COLOR_BGR2HSV),
    "convert_to_lab: true": lambda: cv2.cvtColor(image().astype(np.float32) / 255, cv2.COLOR_BGR2Lab),
}


@pytest.mark.parametrize("text", KINDS)
def test_each_kind(text):
    """Whatever `prob` says, as in Caffe."""
    found = noisy(f"prob: 0 {text}")
    np.testing.assert_allclose(found, KINDS[text](), rtol=1e-5, atol=1e-4)
    assert (found != image()).any()


@pytest.mark.parametrize("kind", ["hist_eq", "clahe"])
def test_gray_images_are_equalised_too(kind):
    gray = image(1)
    function = cv2.equalizeHist if kind == "hist_eq" else cv2.createCLAHE(4).apply
    np.testing.assert_array_equal(noisy(f"{kind}: true", gray)[:, :, 0], function(gray[:, :, 0]))


@pytest.mark.parametrize("values", [[255], [1, 2, 3]])
def test_salt_and_pepper(values):
    text = "saltpepper: true saltpepper_param { fraction: 0.1 " + " ".join(f"value: {v}" for v in values) + " }"
    pixels = np.full((40, 50, 3), 100, np.uint8)
    counts = []
    for sample in range(20):
        found = noisy(text, pixels, sample)
        hit = (found != 100).all(2)
        assert (found[hit] == values).all()
        assert (found[~hit] == 100).all()
        counts.append(hit.sum())
    assert min(counts) > 170  # 200 hits, some of them on one pixel
    assert max(counts) <= 200
    assert (pixels == 100).all()


def test_jpeg_leaves_a_gray_image_its_channel():
    gray = image(1)
    wanted = cv2.imdecode(cv2.imencode(".jpg", gray, [cv2.IMWRITE_JPEG_QUALITY, 40])[1], cv2.IMREAD_GRAYSCALE)
    np.testing.assert_array_equal(noisy("jpeg: 40", gray), wanted[:, :, None])


def test_salt_and_pepper_pass_over_transparent_images():
    """As in Caffe, which knows one and three channels."""
    text = "saltpepper: true saltpepper_param { fraction: 0.5 value: 255 }"
    np.testing.assert_array_equal(noisy(text, image(4)), image(4))


def test_what_cannot_be_done():
    with pytest.raises(DataError, match="cannot be transformed: OpenCV's cvtColor says"):
        noisy("decolorize: true", image(1))
    with pytest.raises(DataError, match="has 3 channels, but saltpepper_param has 2 value"):
        noisy("saltpepper: true saltpepper_param { value: 1 value: 2 }")

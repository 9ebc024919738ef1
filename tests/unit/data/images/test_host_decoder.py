"""nvImageCodec on the CPU gives OpenCV's pixels, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator

import cv2
import numpy as np
import pytest
from image_files import files, jpeg, smooth_image

from caffepy.backend.cpu.jit.deferred import JitThreshold
from caffepy.data.images import bulk_copy
from caffepy.data.images.datum import decode_image
from caffepy.data.images.host_decoder import HostImageDecoder
from caffepy.data.transforms.pixels import resize

pytest.importorskip("nvidia.nvimgcodec", reason="no nvImageCodec for this platform")

SAMPLINGS = (0x411111, 0x221111, 0x211111, 0x121111, 0x111111)
"""Subsampling of the colours, in `cv2.imwrite`'s numbers."""


@pytest.fixture(params=["resizes", "crops", "crops by the kernel"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostImageDecoder]:
    """A decoder with two threads."""
    by_kernel = request.param == "crops by the kernel"
    monkeypatch.setattr(bulk_copy._copy_crops, "should_compile", lambda items, compiling: by_kernel)
    monkeypatch.setattr(JitThreshold, "ends", lambda self, items: by_kernel)
    one = HostImageDecoder(2, request.param == "resizes")
    yield one
    one.close()
    one.close()


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("restarts", [0, 3])
def test_pixels_are_opencvs(decoder: HostImageDecoder, sampling: int, restarts: int) -> None:
    rng = np.random.default_rng(sampling + restarts)
    for height, width in ((8, 8), (9, 17), (16, 31), (33, 56), (50, 16)):
        images = [smooth_image(n, height, width) for n in range(3)]
        images += list(rng.integers(0, 256, (4, height, width, 3), dtype=np.uint8))
        settings = (cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling, cv2.IMWRITE_JPEG_RST_INTERVAL, restarts)
        encoded = [jpeg(image, *settings, cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(5, 100))) for image in images]
        pixels = np.zeros((7, 3, height, width), np.uint8)
        places = np.tile([height, width, 0, 0, 0], (7, 1))
        assert decoder.decode([np.frombuffer(file, np.uint8) for file in encoded], places, pixels) == [True] * 7
        for file, found in zip(encoded, pixels, strict=True):
            np.testing.assert_array_equal(found, decode_image(file))


@pytest.mark.parametrize("interpolation", range(4))
def test_resized_crops_are_opencvs(interpolation: int) -> None:
    decoder = HostImageDecoder(2, True)
    encoded = [np.frombuffer(jpeg(smooth_image(n)), np.uint8) for n in range(5)]
    places = np.array([[30 + 7 * n, 40 + 9 * n, n, 2 * n, interpolation] for n in range(4)] + [[40, 56, 3, 4, 0]])
    pixels = np.zeros((5, 3, 20, 24), np.uint8)
    assert all(decoder.decode(encoded, places, pixels))
    for file, (rows, columns, top, left, _), found in zip(encoded, places.tolist(), pixels, strict=True):
        image = np.ascontiguousarray(decode_image(file.tobytes()).transpose(1, 2, 0))
        if image.shape[:2] != (rows, columns):
            image = resize(image, rows, columns, interpolation)
        np.testing.assert_array_equal(found, image[top : top + 20, left : left + 24].transpose(2, 0, 1))
    decoder.close()


def test_what_cannot_be_decoded_is_named(decoder: HostImageDecoder) -> None:
    plain = files()["baseline"]
    garbage = plain[:2] + bytes(len(plain) - 4) + plain[-2:]
    batch = [None, *(np.frombuffer(file, np.uint8) for file in (plain, garbage, plain[: len(plain) // 2], plain))]
    pixels = np.zeros((5, 3, 40, 56), np.uint8)
    for _ in range(2):
        flags = decoder.decode(batch, np.tile([40, 56, 0, 0, 0], (5, 1)), pixels)
        assert flags == [False, True, False, False, True]
        np.testing.assert_array_equal(pixels[1], decode_image(plain))
        np.testing.assert_array_equal(pixels[4], pixels[1])


def test_batches_of_changing_sizes_reuse_memory(decoder: HostImageDecoder) -> None:
    for count, height in ((3, 40), (7, 90), (2, 33), (7, 64)):
        images = [jpeg(smooth_image(n, height, height + n)) for n in range(count)]
        pixels = np.zeros((count, 3, 32, 32), np.uint8)
        places = np.array([[height, height + n, 1, n, 0] for n in range(count)])
        assert all(decoder.decode([np.frombuffer(image, np.uint8) for image in images], places, pixels))
        for n, image in enumerate(images):
            np.testing.assert_array_equal(pixels[n], decode_image(image)[:, 1:33, n : n + 32])

"""Images that the GPU decodes against the CPU's, file by file and as batches of a data layer; needs nvImageCodec.

`--log-cli-level=INFO` shows the differences. Allowed: pixels of smooth images differ by at most 12 with subsampled
colors, which decoders enlarge in different ways, and by at most 4 without; on average by at most 1.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from google.protobuf import text_format
from image_files import files, jpeg, smooth_image

from caffepy.blob import Blob
from caffepy.data.images.datum import decode_image
from caffepy.data.sources.record_write import record_key, write_datums
from caffepy.layers.core.base import LayerContext, layer_class
from caffepy.proto.caffe_pb2 import TRAIN, Datum, LayerParameter

logger = logging.getLogger(__name__)
pytest.importorskip("nvidia.nvimgcodec", reason="no nvImageCodec: pip install '.[decode13]'")

LARGEST = {"not subsampled": 4}
"""Largest allowed difference of a pixel, where it is not 12."""
MEAN = 1.0
"""Largest allowed mean of the differences."""


def difference(found: np.ndarray, expected: np.ndarray, name: str) -> tuple[float, float]:
    """Log and return the largest and the mean difference."""
    differences = np.abs(found.astype(np.float64) - expected)
    logger.info("%s: largest difference %.2f, mean %.4f", name, differences.max(), differences.mean())
    return differences.max(), differences.mean()


def decoded(backend: Any, images: list[bytes], places: np.ndarray, size: tuple[int, int]) -> tuple[list[bool], Any]:
    """What a decoder makes of files."""
    flat = backend.host_memory(len(images) * 3 * size[0] * size[1])
    pixels = flat.reshape(len(images), 3, *size)
    pixels[...] = 77
    decoder = backend.image_decoder()
    flags = decoder.decode([np.frombuffer(image, np.uint8) for image in images], places, pixels)
    decoder.close()
    decoder.close()
    return flags, pixels


@pytest.mark.parametrize("name", ["baseline", "subsampled", "not subsampled", "with restarts"])
def test_plain_files_differ_little(backend: Any, name: str) -> None:
    images = [files(seed)[name] for seed in range(20)]
    flags, pixels = decoded(backend, images, np.tile([40, 56, 0, 0, 0], (20, 1)), (40, 56))
    assert all(flags)
    expected = np.stack([decode_image(image) for image in images])
    largest, mean = difference(pixels, expected, name)
    assert largest <= LARGEST.get(name, 12)
    assert mean <= MEAN


@pytest.mark.parametrize("interpolation", range(4))
@pytest.mark.parametrize(("rows", "columns"), [(30, 33), (34, 48), (47, 60), (60, 61)])
def test_resized_crops_are_opencvs(backend: Any, interpolation: int, rows: int, columns: int) -> None:
    if interpolation == cv2.INTER_AREA and rows > 40:
        pytest.skip("the CPU enlarges with INTER_AREA")
    image = files()["not subsampled"]
    places = np.array([[rows, columns, 3, 5, interpolation], [40, 56, 0, 0, 0]])
    flags, pixels = decoded(backend, [image, image], places, (25, 27))
    assert flags == [True, True]
    whole = np.ascontiguousarray(decode_image(image).transpose(1, 2, 0))
    expected = cv2.resize(whole, (columns, rows), interpolation=interpolation)[3:28, 5:32].transpose(2, 0, 1)
    largest, mean = difference(pixels[0], expected, f"interpolation {interpolation}")
    assert largest <= 6
    assert mean <= MEAN


def test_files_that_cannot_be_decoded_are_named(backend: Any) -> None:
    plain = files()["baseline"]
    garbage = plain[:2] + bytes(len(plain) - 4) + plain[-2:]
    flags, pixels = decoded(backend, [plain, garbage, b"abc", plain], np.tile([40, 56, 0, 0, 0], (4, 1)), (40, 56))
    assert flags == [True, False, False, True]
    np.testing.assert_array_equal(pixels[0], pixels[3])
    assert difference(pixels[0], decode_image(plain), "among bad files")[1] <= MEAN


def test_batches_of_changing_sizes(backend: Any) -> None:
    """Memory of earlier batches is reused."""
    decoder = backend.image_decoder()
    for count, height in ((3, 40), (7, 90), (2, 33), (7, 64)):
        images = [jpeg(smooth_image(n, height, height + n)) for n in range(count)]
        pixels = backend.host_memory(count * 3 * 32 * 32).reshape(count, 3, 32, 32)
        places = np.array([[height, height + n, 1, n, 0] for n in range(count)])
        assert all(decoder.decode([np.frombuffer(image, np.uint8) for image in images], places, pixels))
        for n, image in enumerate(images):
            expected = decode_image(image)[:, 1:33, n : n + 32]
            assert difference(pixels[n], expected, f"{count} images")[1] <= MEAN
    decoder.close()


def layer_over(backend: Any, path: Path, text: str) -> tuple[Any, list[Blob]]:
    """A Data layer with its blobs."""
    data = f"data_param {{ source: '{path}' backend: LMDB batch_size: 20 }} transform_param {{ {text} }}"
    param = text_format.Parse(f"name: 'd' type: 'Data' top: 'x' top: 'y' {data}", LayerParameter())
    layer: Any = layer_class("Data")(param, LayerContext(backend, TRAIN, seed=1))
    tops = [Blob(backend), Blob(backend)]
    layer.setup([], tops)
    return layer, tops


@pytest.mark.parametrize(
    "text",
    [
        "crop_size: 24 mirror: true mean_value: 104 mean_value: 117 mean_value: 123",
        "crop_size: 32 mirror: true img_rand_resize_lower: 34 img_rand_resize_upper: 39",
    ],
)
def test_a_layer_gives_the_cpus_batches(backend: Any, tmp_path: Path, text: str) -> None:
    """All kinds of files in one database; what the GPU does not decode is exactly the CPU's."""
    kinds = files()
    images = [*kinds.values(), *(jpeg(smooth_image(n, 40 + n, 60 - n)) for n in range(20 - len(kinds)))]
    datums = (Datum(data=image, encoded=True, label=n) for n, image in enumerate(images))
    write_datums(tmp_path / "db", ((record_key(n), datum) for n, datum in enumerate(datums)))
    batches = []
    with backend.activate():
        for decoder in ("CPU", "GPU"):
            layer, tops = layer_over(backend, tmp_path / "db", f"{text} decode: {decoder}")
            for number in range(3):
                layer.context.passes.number = number
                layer.forward([], tops)
                batches.append((tops[0].host_data().copy(), tops[1].host_data().copy()))
            layer.close()
    exact = [list(kinds).index(name) for name in ("progressive", "rotated by Exif", "CMYK", "PNG", "BMP")]
    for (expected, labels), (found, found_labels) in zip(batches[:3], batches[3:], strict=True):
        np.testing.assert_array_equal(found_labels, labels)
        np.testing.assert_array_equal(found[exact], expected[exact])
        largest, mean = difference(found, expected, "batch")
        assert largest <= 12
        assert 0 < mean <= MEAN, "the GPU decoded none of them"

"""Which images are decoded in batches, and where their crops go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from google.protobuf import text_format
from image_files import files, jpeg, smooth_image
from memory_records import Records

from caffepy.backend.image_decoder import ImageDecoder
from caffepy.backend.input_ring import ImageSlot
from caffepy.data.batch_decoding import BatchDecoding
from caffepy.data.images import bulk_copy
from caffepy.data.loader import DatumLoader
from caffepy.data.order import RecordOrder
from caffepy.data.prefetch import Batch
from caffepy.data.sources.lmdb import LmdbSource
from caffepy.data.sources.record_write import write_datums
from caffepy.data.sources.source import RecordSource
from caffepy.data.transform import Transformer
from caffepy.data.transforms.pixels import resize
from caffepy.errors import DataError
from caffepy.proto.caffe_pb2 import TRAIN, Datum, TransformationParameter

CROP = "crop_size: 24 mirror: true "
RESIZED = CROP + "img_rand_resize_lower: 30 img_rand_resize_upper: 60 allow_upscale: true "


class Cv2Decoder(ImageDecoder):
    """Decodes with OpenCV.

    Args:
        refused: files that it cannot decode.
    """

    def __init__(self, refused: Sequence[bytes] = ()) -> None:
        self.decoded: list[bytes] = []
        self._refused = refused

    def decode(self, files: Sequence[Any], places: Any, pixels: Any) -> list[bool]:
        for file, (rows, columns, top, left, interpolation), crop in zip(files, places.tolist(), pixels, strict=True):
            if file is None or file.tobytes() in self._refused:
                crop[...] = 99
                continue
            image = cv2.imdecode(file, cv2.IMREAD_COLOR)
            if image.shape[:2] != (rows, columns):
                image = resize(image, rows, columns, interpolation)
            crop[...] = image[top : top + crop.shape[1], left : left + crop.shape[2]].transpose(2, 0, 1)
            self.decoded.append(file.tobytes())
        return [file is not None and file.tobytes() not in self._refused for file in files]

    def close(self) -> None:
        """There is nothing to close."""


def load(
    images: Sequence[bytes], text: str, decoder: Cv2Decoder | None = None, count: int = 0, lmdb: Path | None = None
) -> Any:
    """How many slots `load_bytes` filled, and their parts."""
    datums = [Datum(data=image, encoded=True, label=n - 3) for n, image in enumerate(images)]
    if lmdb is not None:
        write_datums(lmdb, ((b"%03d" % n, datum) for n, datum in enumerate(datums)))
    records: RecordSource = Records(datums) if lmdb is None else LmdbSource(lmdb)
    transformer = Transformer(text_format.Parse(text, TransformationParameter()), TRAIN, where="layer 'd'")
    loader = DatumLoader(records, RecordOrder(len(images)), transformer, 1, 2, "layer 'd'", 2)
    if decoder is not None:
        loader.decode_with(BatchDecoding([decoder] * 2, transformer))
    slot = ImageSlot(count or len(images), 3, 24, 24)
    slots = len(images) // slot.count
    block = np.zeros(slots * slot.size, np.uint8)
    filled = loader.load_bytes(range(0, len(images), slot.count), slot.count, slot, block)
    loader.close()
    return filled, [slot.parts(block[n * slot.size : (n + 1) * slot.size]) for n in range(slots)]


def check(images: Sequence[bytes], text: str, decoder: Cv2Decoder, count: int = 0) -> None:
    """The slots are those of the host."""
    expected, found = load(images, text, count=count), load(images, text, decoder, count)
    assert found[0] == expected[0]
    for parts, wanted in zip(found[1], expected[1], strict=True):
        for part, wanted_part in zip(parts, wanted, strict=True):
            np.testing.assert_array_equal(part, wanted_part)


INTERPOLATIONS = [
    f"interpolation_algo_down: {down} interpolation_algo_up: {up} "
    for down, up in (("INTER_NEAREST", "INTER_CUBIC"), ("INTER_LINEAR", "INTER_LINEAR"), ("INTER_AREA", "INTER_AREA"))
]


@pytest.mark.parametrize("text", [CROP, *(RESIZED + interpolation for interpolation in INTERPOLATIONS)])
def test_crops_and_sizes_are_those_of_the_host(text: str) -> None:
    images = [jpeg(smooth_image(n, 40 + n, 70 - n)) for n in range(12)]
    decoder = Cv2Decoder()
    check(images, text, decoder, count=4)
    assert len(decoder.decoded) >= 3


@pytest.mark.parametrize("text", [CROP, RESIZED + INTERPOLATIONS[1]])
def test_files_that_were_located_in_bulk_are_decoded(text: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(bulk_copy._copy_records, "should_compile", lambda items, compiling: True)
    images = [*files().values(), *(jpeg(smooth_image(n, 40 + n, 70 - n)) for n in range(12))][-20:]
    decoder = Cv2Decoder(refused=images[-1:])
    expected, found = load(images, text, count=5), load(images, text, decoder, 5, tmp_path / "db")
    assert found[0] == expected[0]
    assert len(decoder.decoded) >= 8
    for parts, wanted in zip(found[1][: found[0]], expected[1], strict=False):
        for part, wanted_part in zip(parts, wanted, strict=True):
            np.testing.assert_array_equal(part, wanted_part)


def test_unusual_files_are_left_to_the_host() -> None:
    by_name, decoder = files(), Cv2Decoder()
    images = [*by_name.values(), jpeg(smooth_image(1))]
    check(images, CROP, decoder)
    plain = {by_name[name] for name in ("baseline", "subsampled", "not subsampled", "with restarts")} | {images[-1]}
    assert set(decoder.decoded) == plain


def test_what_the_device_cannot_decode_is_left_to_the_host() -> None:
    images = [jpeg(smooth_image(n)) for n in range(5)]
    decoder = Cv2Decoder(refused=[images[0], images[3]])
    check(images, RESIZED, decoder)
    assert sorted(decoder.decoded) == sorted([images[1], images[2], images[4]])


@pytest.mark.parametrize(
    "bad", [b"\xff\xd8\xff", jpeg(smooth_image(0, 20, 20)), b"", jpeg(smooth_image(0, channels=1))]
)
def test_bad_records_end_the_block_as_on_the_host(bad: bytes) -> None:
    images = [jpeg(smooth_image(n)) for n in range(6)]
    images[4] = bad
    decoder = Cv2Decoder()
    assert load(images, CROP, decoder, 2)[0] == load(images, CROP, count=2)[0] == 2


def test_the_host_reports_a_damaged_file() -> None:
    records = Records([Datum(data=jpeg(smooth_image(0)), encoded=True), Datum(data=b"abc", encoded=True)])
    transformer = Transformer(text_format.Parse(CROP, TransformationParameter()), TRAIN, where="layer 'd'")
    loader = DatumLoader(records, RecordOrder(2), transformer, 1, 2, "layer 'd'")
    loader.decode_with(BatchDecoding([Cv2Decoder()], transformer))
    slot = ImageSlot(2, 3, 24, 24)
    assert loader.load_bytes([0], 2, slot, np.zeros(slot.size, np.uint8)) == 0
    with pytest.raises(DataError, match="record 1 .*OpenCV"):
        loader.load(0, 2, Batch(2))
    loader.close()

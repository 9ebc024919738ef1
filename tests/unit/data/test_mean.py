"""Mean files: read, subtracted, and computed from databases."""

from __future__ import annotations

import gzip
from pathlib import Path

import cv2
import numpy as np
import pytest
from databases import BACKENDS

from caffepy.data.mean import channel_means, compute_mean, read_mean, write_mean
from caffepy.data.sources.databases import record_key, write_datums
from caffepy.data.sources.lmdb_index import LmdbIndex
from caffepy.errors import DataError
from caffepy.formats.proto.caffe_pb2 import FLOAT16, BlobProto, BlobShape, Datum

VALUES = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.mark.parametrize(
    "blob",
    [
        BlobProto(num=1, channels=2, height=3, width=4, data=VALUES.ravel()),
        BlobProto(shape=BlobShape(dim=[2, 3, 4]), data=VALUES.ravel()),
        BlobProto(shape=BlobShape(dim=[1, 2, 3, 4]), double_data=VALUES.ravel()),
        BlobProto(shape=BlobShape(dim=[2, 3, 4]), raw_data=VALUES.astype("<f2").tobytes(), raw_data_type=FLOAT16),
    ],
)
def test_means_are_read_as_every_caffe_writes_them(tmp_path, blob):
    path = tmp_path / "mean.binaryproto"
    path.write_bytes(blob.SerializeToString())
    mean = read_mean(path)
    assert mean.dtype == np.float32
    np.testing.assert_array_equal(mean, VALUES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\1", "is not a BlobProto.*: it is truncated"),
        (gzip.compress(b"mean", mtime=0), "is not a BlobProto .*: it is packed with gzip; unpack it first"),
        (b"layer { }", r"is not a BlobProto .*: it is text \('layer { }'\); give the binary file"),
        (b"", "holds 0 values in the shape 0 x 0 x 0 x 0; a mean is one image"),
        (
            BlobProto(shape=BlobShape(dim=[2, 3]), data=range(6)).SerializeToString(),
            "holds 6 values in the shape 2 x 3;",
        ),
        (
            BlobProto(num=1, channels=9, height=9, width=9, data=[1]).SerializeToString(),
            "1 values in the shape 9 x 9 x 9;",
        ),
        (
            BlobProto(num=2, channels=1, height=1, width=1, data=[1, 2]).SerializeToString(),
            "in the shape 2 x 1 x 1 x 1;",
        ),
    ],
)
def test_what_is_no_mean(tmp_path, content, message):
    path = tmp_path / "mean.binaryproto"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_mean(path)


def test_absent(tmp_path):
    with pytest.raises(DataError, match=r"mean_file '.*nothing' cannot be read: No such file"):
        read_mean(tmp_path / "nothing")


# -- computed from a database ----------------------------------------------------------------------------


IMAGES = np.random.default_rng(5).integers(0, 256, (150, 3, 4, 5), np.uint8)


def plain(image: np.ndarray) -> Datum:
    channels, height, width = image.shape
    return Datum(channels=channels, height=height, width=width, data=image.tobytes(), label=1)


def write(path: Path, datums: list[Datum], backend: str = "lmdb") -> None:
    write_datums(path, ((record_key(number), datum) for number, datum in enumerate(datums)), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("threads", [1, 3])
def test_the_mean_of_bytes_is_exact(tmp_path: Path, backend: str, threads: int):
    write(tmp_path / "db", [plain(image) for image in IMAGES], backend)
    mean = compute_mean(tmp_path / "db", backend, threads)
    np.testing.assert_array_equal(compute_mean(tmp_path / "db", "leveldb" if backend == "lmdb" else "lmdb"), mean)
    np.testing.assert_array_equal(mean, IMAGES.mean(0).astype(np.float32))
    np.testing.assert_allclose(channel_means(mean), IMAGES.mean((0, 2, 3)), rtol=1e-6)


def test_a_database_that_is_written_to_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path / "db", [plain(image) for image in IMAGES])
    record = LmdbIndex.record

    def changed(index: LmdbIndex, number: int) -> bytes:
        if number > 100:
            raise DataError("was modified during reading")
        return record(index, number)

    monkeypatch.setattr(LmdbIndex, "record", changed)
    with pytest.raises(DataError, match=f"^LMDB '{tmp_path}/db' was modified during reading$"):
        compute_mean(tmp_path / "db")


def test_floats_and_encoded_images(tmp_path: Path):
    values = IMAGES[0].astype(np.float32) * 0.5
    floats = Datum(channels=3, height=4, width=5, float_data=values.ravel().tolist())
    png = cv2.imencode(".png", IMAGES[1].transpose(1, 2, 0))[1].tobytes()
    write(tmp_path / "db", [floats, Datum(data=png, encoded=True)])
    np.testing.assert_array_equal(compute_mean(tmp_path / "db"), (values + IMAGES[1]) / 2)


def test_the_file_is_a_blob_with_its_old_shape(tmp_path: Path):
    mean = IMAGES[0].astype(np.float32)
    write_mean(tmp_path / "mean.binaryproto", mean)
    blob = BlobProto(num=1, channels=3, height=4, width=5, data=mean.ravel())
    assert (tmp_path / "mean.binaryproto").read_bytes() == blob.SerializeToString()
    np.testing.assert_array_equal(read_mean(tmp_path / "mean.binaryproto"), mean)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            plain(IMAGES[1][:, :2]),
            r"record 1 \(key '00000001'\) is 3 x 2 x 5, but the first is 3 x 4 x 5; a mean needs",
        ),
        (Datum(channels=3, height=4, width=5, data=b"1"), r"record 1 \(key '00000001'\) is a Datum of 1 bytes"),
        (Datum(data=b"1", encoded=True), r"record 1 \(key '00000001'\) is an image of 1 bytes that OpenCV cannot"),
    ],
)
def test_records_that_have_no_mean(tmp_path: Path, second: Datum, message: str):
    write(tmp_path / "db", [plain(IMAGES[0]), second])
    with pytest.raises(DataError, match=message):
        compute_mean(tmp_path / "db")

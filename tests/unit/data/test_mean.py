import gzip

import numpy as np
import pytest

from caffepy.data.mean import read_mean
from caffepy.errors import DataError
from caffepy.formats.proto.caffe_pb2 import FLOAT16, BlobProto, BlobShape

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

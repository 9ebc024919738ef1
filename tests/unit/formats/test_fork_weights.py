"""Weights of binary nets whose layers have settings that another Caffe's schema numbers: made here byte by byte."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from caffepy.errors import SnapshotError
from caffepy.formats.binary import from_blob_proto, read_message
from caffepy.formats.caffemodel import read_caffemodel, read_weights
from caffepy.formats.messages import DELIMITED, FOUR_BYTES, VARINT, encode_delimited, field_header
from caffepy.formats.proto.caffe_pb2 import BlobProto, LayerParameter, NetParameter, V1LayerParameter

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)
BLOB = BlobProto(data=VALUES.ravel().tolist(), shape={"dim": [2, 3]})
LARGE = np.arange(40_000, dtype=np.float32)


def net_bytes(layer: bytes, field: int = NetParameter.LAYER_FIELD_NUMBER) -> bytes:
    return b"".join(encode_delimited(field, [layer]))


def setting(number: int, content: bytes) -> bytes:
    return b"".join(encode_delimited(number, [content]))


def read_values(path: Path) -> list[np.ndarray]:
    stored = read_caffemodel(path)
    return [from_blob_proto(blob, "w", stored.content) for layer in stored.message.layer for blob in layer.blobs]


@pytest.mark.parametrize(
    "content",
    [b"\xff\xff", b"\x0a\x7f", b"\x03", b"\x07\x00", b"\x08", b"a string"],
    ids=["open varint", "open length", "open group", "wire type 7", "no value", "a string"],
)
def test_a_setting_that_is_no_message_of_caffepys(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    layer = LayerParameter(name="c", type="Mine", bottom=["a"], blobs=[BLOB]).SerializeToString()
    path = tmp_path / "fork.caffemodel"
    path.write_bytes(net_bytes(layer + setting(LayerParameter.CONVOLUTION_PARAM_FIELD_NUMBER, content)))
    with caplog.at_level(logging.INFO):
        net = read_weights(path)
    assert (net.layer[0].name, net.layer[0].type, list(net.layer[0].bottom)) == ("c", "Mine", ["a"])
    assert np.array_equal(from_blob_proto(net.layer[0].blobs[0], "w"), VALUES)
    assert "settings of its layers are of another Caffe and are skipped; --proto FILE reads them" in caplog.text


def test_large_arrays_stay_in_the_files_bytes(tmp_path: Path) -> None:
    blob = BlobProto(data=LARGE.tolist(), shape={"dim": [len(LARGE)]})
    layer = LayerParameter(name="c", blobs=[blob]).SerializeToString()
    path = tmp_path / "fork.caffemodel"
    path.write_bytes(net_bytes(layer + setting(LayerParameter.POOLING_PARAM_FIELD_NUMBER, b"\xff")))
    stored = read_caffemodel(path)
    assert stored.content
    assert np.array_equal(from_blob_proto(stored.message.layer[0].blobs[0], "w", stored.content), LARGE)


def test_layers_of_the_old_format(tmp_path: Path) -> None:
    layer = V1LayerParameter(name="c", type=V1LayerParameter.CONVOLUTION, blobs=[BLOB]).SerializeToString()
    path = tmp_path / "fork.caffemodel"
    clash = setting(V1LayerParameter.POOLING_PARAM_FIELD_NUMBER, b"\xff")
    path.write_bytes(net_bytes(layer + clash, NetParameter.LAYERS_FIELD_NUMBER))
    net = read_weights(path)
    assert (net.layer[0].name, net.layer[0].type) == ("c", "Convolution")
    assert np.array_equal(from_blob_proto(net.layer[0].blobs[0], "w"), VALUES)


def test_the_number_of_nvidias_recurrent_settings(tmp_path: Path) -> None:
    layer = LayerParameter(name="c", blobs=[BLOB]).SerializeToString()
    path = tmp_path / "fork.caffemodel"
    path.write_bytes(net_bytes(layer + setting(151, b"\xff\xff")))
    assert np.array_equal(read_values(path)[0], VALUES)


def test_an_upgrade_of_the_file_loses_no_settings(tmp_path: Path) -> None:
    """Where settings would be lost, the message is refused."""
    path = tmp_path / "fork.caffemodel"
    path.write_bytes(net_bytes(LayerParameter(name="c").SerializeToString() + setting(106, b"\xff")))
    with pytest.raises(SnapshotError, match="of its layers are of another Caffe; give its caffe.proto with --proto"):
        read_message(path, NetParameter, inline_arrays=True)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    layer = LayerParameter(name="c").SerializeToString()
    clash = setting(LayerParameter.POOLING_PARAM_FIELD_NUMBER, b"\xff")
    path = tmp_path / "fork.caffemodel"
    path.write_bytes(net_bytes(layer + clash + setting(LayerParameter.BLOBS_FIELD_NUMBER, b"\xff")))
    with pytest.raises(SnapshotError, match="not a binary NetParameter"):
        read_weights(path)


KINDS = st.sampled_from([VARINT, DELIMITED, FOUR_BYTES])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.lists(st.tuples(st.integers(100, 400), KINDS, st.binary(max_size=12)), max_size=6))
def test_weights_are_read_whatever_the_settings_are(tmp_path: Path, parts: list[tuple[int, int, bytes]]) -> None:
    layer = LayerParameter(name="c", type="Mine", blobs=[BLOB]).SerializeToString()
    for number, kind, content in parts:
        if kind == DELIMITED:
            layer += setting(number, content)
        else:
            value = bytes([len(content)]) if kind == VARINT else content[:4].ljust(4, b"\0")
            layer += field_header(b"", number << 3 | kind) + value
    path = tmp_path / "fork.caffemodel"
    path.write_bytes(net_bytes(layer))
    (values,) = read_values(path)
    assert np.array_equal(values, VALUES)

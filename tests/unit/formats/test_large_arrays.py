"""Large arrays of a .caffemodel that stay in the file's bytes: the same values, whatever the file looks like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caffepy.backend import create_backend
from caffepy.errors import SnapshotError
from caffepy.formats import binary
from caffepy.formats.binary import from_blob_proto, split_large_fields
from caffepy.formats.caffemodel import read_caffemodel, read_weights
from caffepy.formats.messages import field_header
from caffepy.formats.proto.caffe_pb2 import (
    TEST,
    BlobProto,
    BlobShape,
    LayerParameter,
    NetParameter,
    SolverState,
    V0LayerParameter,
    V1LayerParameter,
)
from caffepy.formats.prototxt import parse_text
from caffepy.formats.solverstate import read_solverstate
from caffepy.layers import LayerContext
from caffepy.net import Net


@pytest.fixture(autouse=True)
def _small_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of 16 bytes are large."""
    monkeypatch.setattr(binary, "MIN_BYTES", 16)


def blob_of(count: int, **fields: Any) -> BlobProto:
    """A blob of one axis."""
    return BlobProto(shape=BlobShape(dim=[count]), data=np.arange(count, dtype=np.float32) / 3, **fields)


def brought_back(content: bytes) -> NetParameter:
    """The message of a file's bytes, read without the large arrays, which are then put where they belong."""
    param = NetParameter.FromString(split_large_fields(content, NetParameter)[0])
    for layer in [*param.layer, *param.layers]:
        for blob in layer.blobs:
            if blob.HasField("data_end"):
                blob.data[:] = np.frombuffer(content[blob.data_begin : blob.data_end], "<f4").tolist()
                blob.ClearField("data_begin")
                blob.ClearField("data_end")
    return param


BLOBS = st.builds(
    BlobProto,
    data=st.lists(st.floats(width=32, allow_nan=False), max_size=9),
    diff=st.lists(st.floats(width=32, allow_nan=False), max_size=9),
    double_data=st.lists(st.floats(allow_nan=False), max_size=3),
    raw_data=st.binary(max_size=40),
    num=st.none() | st.integers(-3, 9),
    shape=st.none() | st.builds(BlobShape, dim=st.lists(st.integers(-1, 2**40), max_size=4)),
)
NAMES = st.text("abc", max_size=3)
LAYERS = st.builds(LayerParameter, name=NAMES, type=NAMES, bottom=st.lists(NAMES), blobs=st.lists(BLOBS, max_size=3))
V0_LAYERS = st.builds(V0LayerParameter, name=NAMES, blobs=st.lists(BLOBS, max_size=2))
V1_LAYERS = st.builds(V1LayerParameter, name=NAMES, blobs=st.lists(BLOBS, max_size=3), layer=st.none() | V0_LAYERS)
NETS = st.builds(
    NetParameter,
    name=NAMES,
    layer=st.lists(LAYERS, max_size=3),
    layers=st.lists(V1_LAYERS, max_size=3),
    input_dim=st.lists(st.integers(1, 300), max_size=4),
)


@given(NETS, st.binary(max_size=30))
def test_any_net_is_read_alike(net: NetParameter, unknown: bytes) -> None:
    """Old and new layers, blobs of every kind, and bytes behind the net."""
    content = net.SerializeToString()
    assert brought_back(content) == net
    number = field_header(b"", 3000 << 3 | 2) + field_header(b"", len(unknown)) + unknown
    assert split_large_fields(content + number, NetParameter)[0].endswith(number)
    assert (
        brought_back(content + number).SerializeToString()
        == NetParameter.FromString(content + number).SerializeToString()
    )


@given(NETS, st.data())
def test_damaged_bytes_are_left_to_protobuf(net: NetParameter, data: st.DataObject) -> None:
    """What protobuf refuses is refused as before; what it reads has the same arrays."""
    content = bytearray(net.SerializeToString() + b"\n\x01x")
    for _ in range(3):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        whole = NetParameter.FromString(damaged)
    except Exception as error:  # protobuf's; whichever it is, it must be the same
        with pytest.raises(type(error)):
            NetParameter.FromString(split_large_fields(damaged, NetParameter)[0])
        return
    if not any(blob.HasField("data_end") for layer in [*whole.layer, *whole.layers] for blob in layer.blobs):
        assert brought_back(damaged).SerializePartialToString() == whole.SerializePartialToString()


def blobs_file(*blobs: bytes) -> bytes:
    """A file with a layer of these serialised blobs."""
    inner = b"".join(field_header(b"\x3a", len(blob)) + blob for blob in blobs)
    return field_header(b"\xa2\x06", len(inner)) + inner


def data_field(count: int) -> bytes:
    """`data` of so many numbers."""
    content = np.arange(count, dtype="<f4").tobytes()
    return field_header(b"\x2a", len(content)) + content


@pytest.mark.parametrize(
    "content",
    [
        blobs_file(data_field(8) + data_field(8)),  # protobuf joins them
        blobs_file(data_field(8) + b"\x2d\x00\x00\x80\x3f"),  # one more number by itself
        blobs_file(data_field(8) + b"\x0b\x0c"),  # a group
        blobs_file(data_field(8), b"\x2a\x11" + bytes(17)),  # ends within a number
        blobs_file(data_field(8)) + b"\x0a\x05x",  # the file ends within a name
        blobs_file(data_field(8)) + b"\x80" * 11,  # no number is that long
    ],
)
def test_unusual_bytes_are_read_whole(content: bytes) -> None:
    rest, arrays = split_large_fields(content, NetParameter)
    assert rest is content
    assert not arrays


def test_many_fields_are_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers one by one, as proto2 writes lists that are not packed, take protobuf no time and Python much."""
    content = blobs_file(data_field(8), b"\x2d\x00\x00\x80\x3f")
    monkeypatch.setattr(binary, "MAX_FIELDS", 4)
    assert split_large_fields(blobs_file(data_field(8)), NetParameter)[1]
    many = blobs_file(data_field(8)) + b"\x28\x01" * 10
    assert split_large_fields(many, NetParameter)[0] is many
    assert not split_large_fields(content, NetParameter)[1]


@pytest.mark.parametrize("position", [{"data_end": 32}, {"data_begin": 4, "data_end": 36}, {"data_begin": 0}])
def test_positions_in_a_file_are_refused(position: dict[str, int], tmp_path: Path) -> None:
    """Nobody may say by a file that a blob's values are other bytes of it."""
    path = tmp_path / "x.caffemodel"
    blob = BlobProto(shape=BlobShape(dim=[8]), **position)  # type: ignore[arg-type]
    layer = LayerParameter(name="ip", type="InnerProduct", blobs=[blob_of(8), blob])
    path.write_bytes(NetParameter(layer=[layer]).SerializeToString())
    for read in (read_caffemodel, read_weights):
        with pytest.raises(
            SnapshotError, match=r"x\.caffemodel: a blob has data_begin or data_end, which no file contains"
        ):
            read(path)


def test_the_history_of_a_state(tmp_path: Path) -> None:
    path = tmp_path / "x.solverstate"
    state = SolverState(iter=3, history=[blob_of(8), blob_of(3), blob_of(40)], learned_net="x")
    path.write_bytes(state.SerializeToString())
    stored = read_solverstate(path)
    assert (stored.message.iter, stored.message.learned_net) == (3, "x")
    assert [len(blob.data) for blob in stored.message.history] == [0, 3, 0]
    for found, expected in zip(stored.message.history, state.history, strict=True):
        values = from_blob_proto(found, "x", stored.content)
        np.testing.assert_array_equal(values, np.array(expected.data, np.float32))
    state.history[1].data_end = 60
    path.write_bytes(state.SerializeToString())
    with pytest.raises(SnapshotError, match=r"x\.solverstate: a blob has data_begin or data_end"):
        read_solverstate(path)


@pytest.mark.parametrize("old", [False, True])
def test_layers_of_a_file(old: bool, tmp_path: Path) -> None:
    """Of the current format and of V1, whose upgrade copies blobs."""
    path = tmp_path / "x.caffemodel"
    blobs = [blob_of(40), blob_of(3)]
    if old:
        kind = V1LayerParameter.LayerType.Value("INNER_PRODUCT")
        net = NetParameter(layers=[V1LayerParameter(name="ip", type=kind, blobs=blobs)])
    else:
        net = NetParameter(layer=[LayerParameter(name="ip", type="InnerProduct", blobs=blobs)])
    path.write_bytes(net.SerializeToString())
    trained = read_caffemodel(path)
    large, small = trained.message.layer[0].blobs
    assert (len(large.data), large.data_end - large.data_begin, len(small.data)) == (0, 160, 3)
    for found, expected in zip((large, small), blobs, strict=True):
        values = from_blob_proto(found, "x", trained.content)
        np.testing.assert_array_equal(values, np.array(expected.data, np.float32))
    assert list(read_weights(path).layer[0].blobs[0].data) == list(blobs[0].data)


def test_an_array_that_does_not_fit_its_shape(tmp_path: Path) -> None:
    path = tmp_path / "x.caffemodel"
    blob = blob_of(8)
    blob.shape.dim[0] = 9
    path.write_bytes(NetParameter(layer=[LayerParameter(name="ip", blobs=[blob])]).SerializeToString())
    with pytest.raises(SnapshotError, match="layer 'ip' blob 0 holds 8 values where its shape .*9.* needs 9"):
        read_caffemodel(path)


def net_of(text: str) -> Net:
    """A net on the CPU."""
    return Net(parse_text(text, NetParameter(), "x"), LayerContext(create_backend(None), phase=TEST))


def test_a_net_takes_them(tmp_path: Path) -> None:
    text = """
        layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 2 dim: 6 } } }
        layer { name: "ip" type: "InnerProduct" bottom: "x" top: "ip"
                inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
    """
    path, net = tmp_path / "x.caffemodel", net_of(text)
    path.write_bytes(net.to_proto().SerializeToString())
    other = net_of(text.replace("xavier", "gaussian"))
    trained = read_caffemodel(path)
    assert trained.content
    assert other.copy_trained_layers_from(trained, str(path)) == ["ip"]
    for mine, theirs in zip(other.layers[-1].blobs, net.layers[-1].blobs, strict=True):
        np.testing.assert_array_equal(mine.host_data(), theirs.host_data())

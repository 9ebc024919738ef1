"""Binary nets as NVIDIA Caffe writes them, made here byte by byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from caffepy.formats.caffemodel import adopt_nvidia_fields, read_weights
from caffepy.formats.proto.caffe_pb2 import (
    BOOL,
    DOUBLE,
    FLOAT,
    FLOAT16,
    INT,
    LayerParameter,
    NetParameter,
    RecurrentParameter,
)

VARINT, BYTES = 0, 2


def _varint(number: int) -> bytes:
    head, rest = number & 127, number >> 7
    return bytes([head | 128]) + _varint(rest) if rest else bytes([head])


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _nvidia(**types: int) -> bytes:
    numbers = {"forward_type": 145, "backward_type": 146, "forward_math": 147, "backward_math": 148}
    return b"".join(_key(numbers[name], VARINT) + _varint(value) for name, value in types.items())


def _parsed(raw: bytes) -> NetParameter:
    layer = LayerParameter(name="l", type="ReLU").SerializeToString() + raw
    net = _key(100, BYTES) + _varint(len(layer)) + layer
    return NetParameter.FromString(net)


def test_types_of_a_layer_are_found() -> None:
    net = _parsed(_nvidia(forward_type=FLOAT16, backward_type=FLOAT, forward_math=DOUBLE, backward_math=INT))
    assert adopt_nvidia_fields(net)
    assert list(net.layer) == [
        LayerParameter(
            name="l", type="ReLU", forward_type=FLOAT16, backward_type=FLOAT, forward_math=DOUBLE, backward_math=INT
        )
    ]


def test_the_recurrent_settings_are_found() -> None:
    settings = RecurrentParameter(num_output=5).SerializeToString()
    net = _parsed(_key(151, BYTES) + _varint(len(settings)) + settings)
    assert adopt_nvidia_fields(net)
    assert net.layer[0].recurrent_param.num_output == 5


def test_nothing_is_left_to_be_adopted_twice() -> None:
    net = _parsed(_nvidia(forward_type=FLOAT16))
    adopt_nvidia_fields(net)
    assert not adopt_nvidia_fields(NetParameter.FromString(net.SerializeToString()))


@pytest.mark.parametrize("field", ["parameter_param", "recurrent_param", "swish_param", "clip_param"])
def test_bvlc_s_messages_under_the_same_numbers_stay(field: str) -> None:
    layer = LayerParameter(name="l", type="ReLU")
    getattr(layer, field).SetInParent()
    if field == "clip_param":
        layer.clip_param.min, layer.clip_param.max = 0, 1
    net = NetParameter.FromString(NetParameter(layer=[layer]).SerializeToString())
    assert not adopt_nvidia_fields(net)
    assert list(net.layer) == [layer]


def test_numbers_that_are_no_type_are_ignored() -> None:
    net = _parsed(_nvidia(forward_type=BOOL + 1))
    assert not adopt_nvidia_fields(net)
    assert not net.layer[0].HasField("forward_type")


def test_unknown_fields_of_others_do_no_harm() -> None:
    net = _parsed(_key(3000, VARINT) + _varint(7))
    assert not adopt_nvidia_fields(net)


def test_reading_weights_adopts_them(tmp_path: Path) -> None:
    path = tmp_path / "nvidia.caffemodel"
    path.write_bytes(_parsed(_nvidia(forward_type=FLOAT16)).SerializeToString())
    assert read_weights(path).layer[0].forward_type == FLOAT16

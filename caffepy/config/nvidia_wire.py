"""Binary nets written by NVIDIA Caffe, whose LayerParameter uses some of BVLC's numbers otherwise.

===== ============================ ==========================
field NVIDIA Caffe                 BVLC Caffe and our schema
===== ============================ ==========================
145   forward_type (an enum)       parameter_param (a message)
146   backward_type (an enum)      recurrent_param (a message)
147   forward_math (an enum)       swish_param (a message)
148   backward_math (an enum)      clip_param (a message)
151   recurrent_param (a message)  unused
===== ============================ ==========================

An enum and a message differ in their wire type, so protobuf leaves NVIDIA's among the unknown
fields, where they are found here. Prototxt files use names and need none of this.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, cast

from google.protobuf.unknown_fields import UnknownFieldSet

from caffepy.proto.caffe_pb2 import LayerParameter, NetParameter, Type

VARINT = 0
LENGTH_DELIMITED = 2

TYPE_FIELDS = {145: "forward_type", 146: "backward_type", 147: "forward_math", 148: "backward_math"}
RECURRENT = 151


class UnknownField(Protocol):
    """What protobuf keeps of a field that the schema does not have; its stubs do not say so."""

    field_number: int
    wire_type: int
    data: Any


def adopt_nvidia_fields(param: NetParameter) -> bool:
    """Moves NVIDIA's clashing fields of every layer to where our schema has them.

    Returns whether there were any.
    """
    adopted = [_adopt(layer) for layer in param.layer]
    return any(adopted)


def _adopt(layer: LayerParameter) -> bool:
    adopted = False
    for field in cast("Iterable[UnknownField]", UnknownFieldSet(layer)):
        if field.field_number in TYPE_FIELDS and field.wire_type == VARINT and field.data in Type.values():
            setattr(layer, TYPE_FIELDS[field.field_number], field.data)
            adopted = True
        elif field.field_number == RECURRENT and field.wire_type == LENGTH_DELIMITED:
            layer.recurrent_param.MergeFromString(field.data)
            adopted = True
    if adopted:
        layer.DiscardUnknownFields()
    return adopted

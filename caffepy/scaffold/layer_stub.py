"""Files for a layer type of a fork that the user writes: a class with its settings, and a test."""

from __future__ import annotations

import keyword
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto

from caffepy.errors import ConfigError
from caffepy.formats.alias import settings_field
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.proto.schemas import fork_schema

_ENDING = "_param"
_MAX_NAMED = 30
"""Maximum number of fields to list in a message."""
_NUMBERS = ("FLOAT", "DOUBLE", "INT32", "INT64", "UINT32", "UINT64")
_TYPES = {
    getattr(FieldDescriptor, f"TYPE_{name}"): name.lower() for name in (*_NUMBERS, "BOOL", "STRING", "BYTES", "ENUM")
}
_EXAMPLES = {"bool": "true", "string": '""', "bytes": '""', "message": "{ }"}
"""A value in a prototxt of each type that is no number."""


@dataclass(frozen=True)
class LayerStub:
    """A layer type to be written.

    Args:
        type: its name in prototxts.
        field: LayerParameter's field with its settings; None: it has none.
        proto: the fork's schema; None: caffepy's own.
    """

    type: str
    field: Any
    proto: Path | None

    @property
    def file_name(self) -> str:
        """The name of the class's file: that of the field, else of the type in small letters."""
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", self.type).lower()
        name = str(self.field.name).removesuffix(_ENDING) if self.field is not None else words
        taken = keyword.iskeyword(name) or name in sys.stdlib_module_names or name in sys.modules
        return f"{name}_layer.py" if taken else f"{name}.py"

    @property
    def prototxt(self) -> str:
        """The layer with the settings that it must have."""
        if self.field is None:
            return f'type: "{self.type}"'
        needed = [
            f"{each.name}{_example(each)}" for each, needed in _described_fields(self.field.message_type) if needed
        ]
        return f'type: "{self.type}" {" ".join([self.field.name, "{", *needed, "}"])}'

    def layer_text(self) -> str:
        """Return the text of the class's file."""
        return f'''"""The layer type {self.type}."""

import numpy as np

import caffepy


@caffepy.register_layer("{self.type}")
class {self.type}:
    """The formula: y = ...{self._settings()}
    """

    def shape(self, x):
        # The top's shape from the bottom's; a list of shapes for several tops.
        # A layer with several bottoms takes as many arguments, here and below.
        return x

    def forward(self, x):
        # The top's array from the bottom's, with NumPy as np{self._hint()}.
        raise NotImplementedError("fill in forward of {self.type}")

    def backward(self, x, y, dy):
        # The gradient of x from that of y. Without this method a net does not train through the layer.
        raise NotImplementedError("fill in backward of {self.type}")
'''

    def test_text(self, layer_file: Path) -> str:
        """Return the text of the test's file.

        Args:
            layer_file: the class's file, beside the test's.
        """
        lines = ["import numpy as np", "", "import caffepy"]
        if self.proto is not None:
            place = os.path.relpath(self.proto.resolve(), layer_file.resolve().parent)
            lines[:0] = ["from pathlib import Path", ""]
            lines += ["", f"caffepy.register_proto(Path(__file__).parent / {place!r})  # before nets are read"]
        return f'''"""Shapes and gradient of the layer type {self.type}: pytest test_{layer_file.name}"""

{chr(10).join(lines)}

import {layer_file.stem}  # registers the type

LAYER = {self.prototxt!r}


def test_shape_and_gradient():
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)
    (y,) = caffepy.check_gradient(LAYER, x)  # compares backward with differences of forward
    assert y.shape == (2, 3, 4, 5)
    # Compare y with numbers of the fork here.
'''

    def _settings(self) -> str:
        """Return the part of the class's docstring that lists the settings."""
        if self.field is None:
            return ""
        rows = [(each.name, _describe(each, needed)) for each, needed in _described_fields(self.field.message_type)]
        width = max((len(name) for name, _ in rows), default=0)
        listed = "\n".join(f"        {name:{width}}  {text}" for name, text in rows)
        return f"\n\n    Settings, as self.param.{self.field.name}.NAME:\n\n{listed}"

    def _hint(self) -> str:
        return f" and self.param.{self.field.name}" if self.field is not None else ""


def make_stub(type_name: str, field_name: str = "") -> LayerStub:
    """Return the stub of a type, with the settings that the process's schema has for it.

    Args:
        type_name: as prototxts write it.
        field_name: LayerParameter's field with the settings; "": the one whose name is the type's with `_param`.

    Raises:
        ConfigError: the name is no Python name, or there is no such field.
    """
    if not (type_name.isascii() and type_name.isidentifier()) or keyword.iskeyword(type_name):
        raise ConfigError(f"TYPE is '{type_name}'; give a layer type of letters and digits, as prototxts write it")
    schema = fork_schema()
    fields = _settings_fields()
    wanted = field_name or settings_field(type_name)
    if field_name and field_name not in fields:
        raise ConfigError(f"--param {field_name}: LayerParameter has no such message; {list_fields()}")
    return LayerStub(type_name, fields.get(wanted), schema.path if schema is not None else None)


def list_fields() -> str:
    """Return a clause with LayerParameter's fields that hold settings, only the fork's if there is a fork's schema."""
    schema = fork_schema()
    names = [name for name in _settings_fields() if schema is None or f"LayerParameter.{name}" in schema.fields]
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{'caffepy' if schema is None else schema.path.name} has {', '.join(names[:_MAX_NAMED]) or 'none'}{more}"


def _settings_fields() -> dict[str, Any]:
    descriptor: Any = caffe_pb2.LayerParameter.DESCRIPTOR
    return {each.name: each for each in descriptor.fields if each.message_type and each.name.endswith(_ENDING)}


def _type_name(each: Any) -> str:
    return _TYPES.get(each.type, "message")


def _described_fields(message: Any) -> list[tuple[Any, bool]]:
    """Return the fields of a message, and whether each must be set."""
    proto = DescriptorProto()
    message.CopyToProto(proto)
    return [
        (message.fields_by_name[each.name], each.label == FieldDescriptorProto.LABEL_REQUIRED) for each in proto.field
    ]


def _describe(each: Any, needed: bool) -> str:
    """Return type and default of a field, for a docstring."""
    kind, default, repeated = _type_name(each), each.default_value, each.default_value == []
    if kind == "enum":
        kind = f"one of {', '.join(f'{value.name} = {value.number}' for value in each.enum_type.values)}"
        default = "" if repeated else each.enum_type.values_by_number[default].name
    elif kind == "message":
        kind, default = str(each.message_type.name), "its own defaults"
    elif isinstance(default, float):
        default = f"{default:.7g}"
    else:
        default = repr(default).replace("\\", "\\\\").replace('"', '\\"')
    if repeated:
        return f"list of {kind}"
    return f"{kind}, required" if needed else f"{kind}, default {default}"


def _example(each: Any) -> str:
    """Return a value of a required field, as a prototxt has it behind the field's name."""
    kind = _type_name(each)
    if kind == "message":
        return " { }"
    return f": {each.enum_type.values[0].name if kind == 'enum' else _EXAMPLES.get(kind, '1')}"

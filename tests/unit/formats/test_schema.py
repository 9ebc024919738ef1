"""The compiled schema against what both Caffes read and write (tests/golden/wire.json)."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from caffepy.formats.proto import caffe_pb2

ROOT = Path(__file__).parents[3]
WIRE = json.loads((ROOT / "tests" / "golden" / "wire.json").read_text())
FACTS = ("number", "type", "label", "default", "packed")
KINDS = {
    value.number: value.name[len("TYPE_") :].lower()
    for value in descriptor_pb2.FieldDescriptorProto.DESCRIPTOR.enum_types_by_name["Type"].values
}
LABELS = {1: "optional", 2: "required", 3: "repeated"}

# Where the Caffes contradict each other BVLC's hold; NVIDIA's numbers move from 1000 up.
NVIDIA_EXCEPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("LayerParameter", "forward_type"): {"number": 1000},
    ("LayerParameter", "backward_type"): {"number": 1001},
    ("LayerParameter", "forward_math"): {"number": 1002},
    ("LayerParameter", "backward_math"): {"number": 1003},
    ("LayerParameter", "recurrent_param"): {"number": 146},
    ("SolverParameter", "rampup_interval"): {"number": 1000},
    ("SolverParameter", "rampup_lr"): {"number": 1001},
    ("SolverParameter", "test_initialization"): {"default": "true"},
    ("DataParameter", "prefetch"): {"default": "4"},
    ("BatchNormParameter", "use_global_stats"): {"default": None},
    ("TransformationParameter", "resize_param"): {"label": "repeated"},
}
OURS = range(2000, 4000)
FORKS = {"shuffle_channel_param": 164, "roi_pooling_param": 8266711, "smooth_l1_loss_param": 8266712}
"""Fields of LayerParameter that have the numbers of the public repositories that brought them."""


def _messages(holder: Any, prefix: str = "") -> dict[str, Any]:
    found = {}
    for message in holder:
        found[prefix + message.name] = message
        found.update(_messages(message.nested_type, f"{prefix}{message.name}."))
    return found


def _enums() -> dict[str, dict[str, int]]:
    holders = [("", SCHEMA.enum_type), *((f"{name}.", message.enum_type) for name, message in MESSAGES.items())]
    return {f"{start}{enum.name}": {v.name: v.number for v in enum.value} for start, enums in holders for enum in enums}


SCHEMA = descriptor_pb2.FileDescriptorProto()
caffe_pb2.DESCRIPTOR.CopyToProto(SCHEMA)
MESSAGES = _messages(SCHEMA.message_type)


def _facts(field: descriptor_pb2.FieldDescriptorProto) -> dict[str, Any]:
    kind = field.type_name[len(".caffepy.") :] if field.type_name else KINDS[field.type]
    default = field.default_value if field.HasField("default_value") else None
    return dict(zip(FACTS, (field.number, kind, LABELS[field.label], default, field.options.packed), strict=True))


def _same_default(ours: str | None, theirs: str | None) -> bool:
    """Equal as text, or as the single-precision numbers that float fields hold."""
    if ours is None or theirs is None or ours == theirs:
        return ours == theirs
    try:
        return struct.pack("f", float(ours)) == struct.pack("f", float(theirs))
    except ValueError:
        return False


@pytest.mark.parametrize("dialect", ["bvlc", "nvcaffe"])
def test_every_field_has_the_number_type_label_and_default_of_both_caffes(dialect: str) -> None:
    wrong = []
    for message, fields in WIRE[dialect]["messages"].items():
        ours = {field.name: _facts(field) for field in MESSAGES[message].field}
        for name, facts in fields.items():
            expected = dict(zip(FACTS, facts, strict=True))
            if dialect == "nvcaffe":
                expected.update(NVIDIA_EXCEPTIONS.get((message, name), {}))
            got = ours.get(name, dict.fromkeys(FACTS))
            if not _same_default(got.pop("default"), expected.pop("default")) or got != expected:
                wrong.append((message, name, got, expected))
    assert not wrong


@pytest.mark.parametrize("dialect", ["bvlc", "nvcaffe"])
def test_every_value_of_an_enumeration_has_its_number(dialect: str) -> None:
    ours = _enums()
    for name, values in WIRE[dialect]["enums"].items():
        assert values.items() <= ours[name].items()


def test_fields_that_neither_caffe_has_take_numbers_from_2000() -> None:
    theirs = {(m, f) for dialect in WIRE.values() for m, fields in dialect["messages"].items() for f in fields}
    both = {message for dialect in WIRE.values() for message in dialect["messages"]}
    for name, message in MESSAGES.items():
        for field in message.field:
            if name in both and (name, field.name) not in theirs:
                wanted = [FORKS[field.name]] if field.name in FORKS else OURS
                assert field.number in wanted, f"{name}.{field.name}"


def test_every_message_of_the_schema_is_explained() -> None:
    lines = (ROOT / "proto" / "caffe.proto").read_text().splitlines()
    bare = [line for above, line in zip(lines, lines[1:], strict=False) if line.startswith("message") and not above]
    assert not bare


_TWO_SCHEMAS = """
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

def foreign():
    "A caffe_pb2 of somebody else's: package caffe, file caffe.proto, another LayerParameter."
    file = descriptor_pb2.FileDescriptorProto(name="caffe.proto", package="caffe", syntax="proto2")
    message = file.message_type.add(name="LayerParameter")
    message.field.add(name="other", number=1, type=5, label=1)
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("caffe.LayerParameter"))

def ours():
    from caffepy.formats.proto import caffe_pb2
    return caffe_pb2.LayerParameter

first, second = ({first}(), {second}())
print(first.DESCRIPTOR.full_name, second.DESCRIPTOR.full_name)
"""


@pytest.mark.parametrize("first, second", [("foreign", "ours"), ("ours", "foreign")])
def test_another_caffe_schema_can_be_loaded_in_the_same_process(first: str, second: str):
    code = _TWO_SCHEMAS.format(first=first, second=second)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    names = {"foreign": "caffe.LayerParameter", "ours": "caffepy.LayerParameter"}
    assert result.stdout.split() == [names[first], names[second]], result.stderr

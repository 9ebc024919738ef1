"""The reader of .proto texts: against protoc, which compiled caffepy's own schema, and on texts that are wrong."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.errors import ConfigError
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.proto.schemas import MAX_BYTES, parse_schema

SCHEMA = (Path(__file__).parents[4] / "proto" / "caffe.proto").read_text()


SCALARS = {
    name.removeprefix("TYPE_").lower(): kind
    for name, kind in FieldDescriptorProto.Type.items()
    if name not in ("TYPE_GROUP", "TYPE_MESSAGE", "TYPE_ENUM")
}


def compiled() -> FileDescriptorProto:
    """What protoc made of caffepy's schema, with types named as the reader names them."""
    file = FileDescriptorProto()
    caffe_pb2.DESCRIPTOR.CopyToProto(file)
    for _, message in messages(file.message_type):
        for field in message.field:
            field.type_name = field.type_name.replace(".caffepy.", ".")
    return file


def messages(holder: Any, prefix: str = "") -> Iterator[tuple[str, DescriptorProto]]:
    for message in holder:
        yield f"{prefix}{message.name}", message
        yield from messages(message.nested_type, f"{prefix}{message.name}.")


def enums(file: FileDescriptorProto) -> dict[str, EnumDescriptorProto]:
    found = {enum.name: enum for enum in file.enum_type}
    for name, message in messages(file.message_type):
        found.update({f"{name}.{enum.name}": enum for enum in message.enum_type})
    return found


def facts(file: FileDescriptorProto) -> dict[str, object]:
    """All that a schema says; defaults as numbers, because protoc rounds floats."""
    found: dict[str, object] = {name: [(v.name, v.number) for v in enum.value] for name, enum in enums(file).items()}
    for name, message in messages(file.message_type):
        found[name] = [field.name for field in message.field]
        for field in message.field:
            default: object = field.default_value
            if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE) and default:
                default = pytest.approx(float(field.default_value), rel=1e-6)
            typed = (field.type, field.type_name, field.label, field.number, field.options.packed)
            found[f"{name}.{field.name}"] = (*typed, default)
    return found


def test_the_schema_is_read_as_protoc_reads_it() -> None:
    mine, theirs = facts(parse_schema(SCHEMA, "caffe.proto")), facts(compiled())
    assert mine.keys() == theirs.keys()
    assert {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]} == {}


def only_message(text: str) -> DescriptorProto:
    return parse_schema(text, "f.proto").message_type[0]


def test_every_kind_of_statement() -> None:
    text = """\
        // A comment; /* another */
        syntax = 'proto2'; package caffe.fork;
        import public "google/protobuf/descriptor.proto";
        option optimize_for = SPEED;
        message M { ;
          option deprecated = true;
          reserved 4, 9 to 11; reserved "old"; extensions 1000 to max;
          optional .caffe.fork.M self = 1; repeated M.Inner inner = 2 [deprecated = true];
          message Inner { enum E { A = 0; B = -0x10 [deprecated = true]; } optional E e = 1 [default = B]; }
          optional Inner.E e = 0x3; oneof kind { string s = 5; E2 other = 6; }
          optional string text = 7 [default = "a\\"b" 'c\\n\\x41\\101'];
          repeated float f = 8 [packed = true];
          optional double d = 12 [default = -inf]; optional float g = 13 [default = .5];
          optional uint64 u = 14 [default = 0xffffffffffffffff]; optional bool optional = 15 [default = true];
          /* message Hidden { } */ extend M { optional int32 more = 1000; }
        }
        enum E2 { option allow_alias = true; X = 1; Y = 1; reserved 7; };
        service S { rpc F (M) returns (M) ; }
        extend M { optional int32 most = 1001; }"""
    file = parse_schema(text, "f.proto")
    assert [message.name for message in file.message_type] == ["M"]
    assert [value.number for value in file.enum_type[0].value] == [1, 1]
    fields = {field.name: field for field in file.message_type[0].field}
    assert " ".join(f"{name}={field.number}" for name, field in fields.items()) == (
        "self=1 inner=2 e=3 s=5 other=6 text=7 f=8 d=12 g=13 u=14 optional=15"
    )
    assert fields["self"].type_name == ".M"
    assert fields["inner"].type_name == ".M.Inner"
    assert (fields["e"].type_name, fields["other"].type_name) == (".M.Inner.E", ".E2")
    assert fields["text"].default_value == 'a"bc\nAA'
    assert [fields[name].default_value for name in ("d", "g", "u", "optional")] == [
        "-inf",
        "0.5",
        str(2**64 - 1),
        "true",
    ]
    assert fields["f"].options.packed
    assert [value.number for value in file.message_type[0].nested_type[0].enum_type[0].value] == [0, -16]


def test_a_type_is_looked_up_from_its_message_outwards() -> None:
    text = "message T { } message M { message T { } optional T t = 1; optional .T u = 2; }"
    fields = parse_schema(text, "f.proto").message_type[1].field
    assert [field.type_name for field in fields] == [".M.T", ".T"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("message M {\n optional T t = 1; }", r'f\.proto:2: "T" is not defined$'),
        ("message M {\n int32 t = 1; }", r'f\.proto:2: Expected "required", "optional", or "repeated"'),
        ("message M {\n\n optional int32 t = 0; }", r"f\.proto:3: Field numbers must be positive"),
        ("message M { optional int32 t = 19500; }", r"f\.proto: Field numbers 19000 through 19999 are reserved"),
        ("message M { optional int32 t = 99999999999; }", r"f\.proto:1: Integer out of range"),
        ("message M { optional int32 t = -1; }", r"Expected field number"),
        ("message M { optional int32 a = 1; optional int32 b = 1; }", r'Field number 1 has already been used in "M"'),
        ("message M { optional int32 a = 1; optional int32 a = 2; }", r'"a" is already defined in "M"'),
        ("message M { }\nmessage M { }", r'f\.proto:2: "M" is already defined'),
        ("enum E { A = 0; }\nenum F { A = 0; }", r'f\.proto:2: "A" is already defined'),
        ("enum E { }", r"Enums must contain at least one value"),
        ("enum E { A = 0; B = 0; }", r'"B" uses the same enum value as "A"'),
        ("enum E { A = 3000000000; }", r"Integer out of range"),
        ("message M { optional int32 t = 1 [default = 1.5]; }", r"Expected integer for field default"),
        ("message M { optional int32 t = 1 [default = 2147483648]; }", r"Integer out of range"),
        ("message M { optional uint32 t = 1 [default = -1]; }", r"Unsigned field can't have negative default"),
        ("message M { optional bool t = 1 [default = 1]; }", r'Expected "true" or "false"'),
        ("message M { optional string t = 1 [default = x]; }", r"Expected string for field default"),
        ("message M { optional M t = 1 [default = x]; }", r"Messages can't have default values"),
        ("message M { enum E { A = 0; } optional E t = 1 [default = B]; }", r'"M\.E" has no value named "B"'),
        ("message M { repeated int32 t = 1 [default = 0]; }", r"Repeated fields can't have default"),
        ("message M { optional int32 t = 1 [packed = true]; }", r"can only be specified for repeated primitive fields"),
        ("message M { map<int32, int32> t = 1; }", r"groups and maps, as in TEntry, are not supported"),
        ("message M { optional group T = 1 { } }", r"groups and maps, as in M, are not supported"),
        ('syntax = "proto3";', r"its language is proto3; Caffe's schema is proto2"),
        ('edition = "2023";', r"its language is editions"),
        ("message M {", r"Reached end of input in message"),
        ("message M { reserved 3", r'Expected ";"'),
        ("enum E { option x", r'Expected "="'),
        ("service S {\n rpc", r"f\.proto:2: Expected method name"),
        ("message M { optional int32 t 1; }", r"Missing field number"),
        ("message 3 { }", r"Expected message name"),
        ("layer { name: 'x' }", r"Expected top-level statement"),
        ('message M { optional string t = 1 [default = "x]; }', r"Unexpected end of string"),
        ("/* open", r"End-of-file inside block comment"),
        ("message A { " * 40, r"recursion limit for nested messages"),
        ("/" * (MAX_BYTES + 1), r"has \d+ bytes"),
        ('import "/etc/passwd";', r'f\.proto:1: Import "/etc/passwd" was not found .*; add its definitions'),
    ],
)
def test_an_error_names_file_line_and_problem(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        parse_schema(text, "f.proto")


PIECES = re.findall(r"//[^\n]*|\"[^\"\n]*\"|[\w.]+|\s+|[^\w\s]", SCHEMA[SCHEMA.index("message LayerParameter") :])[
    :1500
]


@given(st.data())
def test_damaged_texts_are_read_or_refused(data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(PIECES) - 60))
    pieces = PIECES[begin : begin + data.draw(st.integers(1, 60))]
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(pieces)))
        pieces.insert(at, data.draw(st.sampled_from([*PIECES, "{", "}", "[", '"', "'", "/*", "\\", "-", "\0", "é"])))
    try:
        parse_schema("message M {" + "".join(pieces), "f.proto")
    except ConfigError as error:
        assert re.match(r"f\.proto(:\d+)?: ", str(error))


NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: name not in ("reserved", "option"))


SCALAR_FIELDS = st.tuples(NAMES, st.sampled_from(sorted(SCALARS)), st.integers(1, 18000))
MESSAGES = st.lists(SCALAR_FIELDS, max_size=8, unique_by=(lambda field: field[0], lambda field: field[2]))


@settings(max_examples=15)
@given(st.lists(MESSAGES, min_size=7, max_size=7))
def test_fields_of_any_scalar_type(wanted: list[list[tuple[str, str, int]]]) -> None:
    """Many messages at a time: each text starts a protoc."""
    bodies = [" ".join(f"optional {kind} {name} = {number};" for name, kind, number in fields) for fields in wanted]
    text = "".join(f"message M{at} {{ {body} }}" for at, body in enumerate(bodies))
    for message, fields in zip(parse_schema(text, "f.proto").message_type, wanted, strict=True):
        read = [(field.name, field.type, field.number) for field in message.field]
        assert read == [(name, SCALARS[kind], number) for name, kind, number in fields]


def test_a_number_that_is_used_twice() -> None:
    with pytest.raises(ConfigError, match="has already been used"):
        parse_schema("message M { optional int32 a = 7; optional string b = 7; }", "f.proto")


@pytest.mark.parametrize(
    "text", ["/*" * 500_000, "message M { " + "optional M m = 1 [default = " * 30_000, '"\\' * 500_000]
)
def test_hostile_texts_take_linear_time(text: str) -> None:
    begin = time.perf_counter()
    with pytest.raises(ConfigError):
        parse_schema(text, "f.proto")
    assert time.perf_counter() - begin < 5


OWN = FileDescriptorProto()
caffe_pb2.DESCRIPTOR.CopyToProto(OWN)


def test_types_that_a_text_lacks_are_those_of_caffe() -> None:
    text = """message LayerParameter { optional FooParameter foo_param = 300; }
    message FooParameter { optional FillerParameter filler = 1; optional Phase phase = 2 [default = TEST];
      optional PoolingParameter.PoolMethod pool = 3; }"""
    with pytest.raises(ConfigError, match=r"f:2: \"FillerParameter\" is not defined"):
        parse_schema(text, "f")
    foo = next(message for message in parse_schema(text, "f", OWN).message_type if message.name == "FooParameter")
    kinds = [".FillerParameter", ".Phase", ".PoolingParameter.PoolMethod"]
    assert [field.type_name for field in foo.field] == kinds


def test_a_type_that_neither_has_is_named() -> None:
    with pytest.raises(ConfigError, match=r'f:1: "BarParameter" is not defined'):
        parse_schema("message Foo { optional BarParameter bar = 1; optional Phase phase = 2; }", "f", OWN)


def test_a_schema_without_messages_warns(caplog: pytest.LogCaptureFixture) -> None:
    assert not parse_schema('syntax = "proto2"; package caffe;', "f").message_type
    assert caplog.messages == ["f has no message; give the fork's caffe.proto"]

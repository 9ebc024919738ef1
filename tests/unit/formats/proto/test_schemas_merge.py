"""The union of a fork's schema with caffepy's."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from google.protobuf import message_factory, text_format
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.errors import ConfigError
from caffepy.formats.proto.schemas import FIRST_FREE_NUMBER, Merged, merge_schemas, parse_schema, unite

OWN_TEXT = """
    message LayerParameter { optional string name = 1; optional string type = 2; optional PoolParameter pool_param = 9;
      optional float rate = 10 [default = 1]; repeated uint32 pad = 11; optional int32 own = 12; }
    message PoolParameter { enum Method { MAX = 0; AVE = 1; STOCHASTIC = 2; } optional Method pool = 1;
      enum Rounding { DOWN = 0; UP = 1; } }
    message V1LayerParameter { enum LayerType { NONE = 0; POOL = 1; } optional LayerType type = 5;
      optional string name = 4; }
    message NetParameter { repeated V1LayerParameter layers = 2; repeated LayerParameter layer = 100; }
"""


def own_schema() -> FileDescriptorProto:
    """A small schema as protoc would have made it, in the package caffepy."""
    file = parse_schema(OWN_TEXT, "own")
    file.package, file.name = "caffepy", "own.proto"
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = f".caffepy{field.type_name}"
    return file


def merge(text: str) -> tuple[Merged, Any]:
    """The union and a function that makes a message of it."""
    merged = merge_schemas(parse_schema(text, "fork"), own_schema())
    pool = DescriptorPool()
    pool.AddSerializedFile(merged.file.SerializeToString())
    return merged, lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"caffepy.{name}"))()


def test_the_forks_field_decides_number_type_and_default() -> None:
    text = "message LayerParameter { optional double rate = 150 [default = 0.25]; optional int32 own = 1; }"
    merged, make = merge(text)
    layer = make("LayerParameter")
    fields = layer.DESCRIPTOR.fields_by_name
    assert (layer.rate, fields["rate"].number, fields["rate"].type) == (0.25, 150, FieldDescriptorProto.TYPE_DOUBLE)
    assert fields["own"].number == 1
    assert fields["name"].number >= FIRST_FREE_NUMBER  # the fork uses its number
    assert fields["type"].number == 2
    assert not merged.fields


def test_new_fields_messages_and_enumerations_are_added_and_named() -> None:
    merged, make = merge(
        "message LayerParameter { optional FocalParameter focal_param = 150; optional Kind kind = 151; }\n"
        "message FocalParameter { optional float alpha = 1 [default = 2]; } enum Kind { A = 0; B = 1; }"
    )
    layer = text_format.Parse("name: 'a' kind: B focal_param { alpha: 3 }", make("LayerParameter"))
    assert (layer.focal_param.alpha, layer.kind) == (3, 1)
    assert merged.fields == {"LayerParameter.focal_param", "LayerParameter.kind", "FocalParameter.alpha"}


def test_a_field_of_another_kind_is_the_forks_and_counts_as_unknown() -> None:
    merged, make = merge(
        "message LayerParameter { optional string rate = 10; optional P pool_param = 9; } message P { }"
    )
    assert make("LayerParameter").rate == ""
    assert merged.fields == {"LayerParameter.rate", "LayerParameter.pool_param"}


def test_values_of_enumerations() -> None:
    merged, make = merge("message PoolParameter { enum Method { MAX = 0; MEDIAN = 1; AVE = 5; } }")
    enum = make("PoolParameter").DESCRIPTOR.enum_types_by_name["Method"]
    values = {value.name: value.number for value in enum.values}
    assert values == {"MAX": 0, "MEDIAN": 1, "AVE": 5, "STOCHASTIC": 2}
    assert merged.values == {"PoolParameter.Method.MEDIAN"}
    merged, make = merge("message PoolParameter { enum Method { MAX = 0; MEDIAN = 2; } }")
    enum = make("PoolParameter").DESCRIPTOR.enum_types_by_name["Method"]
    assert enum.values_by_number[2].name == "MEDIAN"
    assert enum.values_by_name["STOCHASTIC"].number >= FIRST_FREE_NUMBER


def test_every_number_that_a_fork_may_use() -> None:
    _, make = merge(f"message LayerParameter {{ optional int32 a = {2**29 - 1}; optional int32 b = 1; }}")
    fields = make("LayerParameter").DESCRIPTOR.fields_by_name
    assert fields["name"].number == FIRST_FREE_NUMBER


def test_code_reads_single_fields_as_before_and_lists_as_before() -> None:
    merged, make = merge(
        "message LayerParameter { repeated float rate = 10 [packed = true]; optional uint32 pad = 11 [default = 3];"
        " required int32 own = 12; }"
    )
    layer = text_format.Parse("rate: 2 pad: 1 pad: 2", make("LayerParameter"))
    assert (layer.rate, list(layer.pad), layer.IsInitialized()) == (2, [1, 2], True)
    assert list(make("LayerParameter").pad) == []
    assert merged.single == {"LayerParameter.rate"}
    assert not merged.fields


def test_an_enumeration_whose_values_caffepy_uses_elsewhere() -> None:
    _, make = merge(
        "message PoolParameter { enum Way { AVE = 3; UP = 4; } optional Way way = 7 [default = AVE];\n"
        " optional Method pool = 1; enum Method { MAX = 0; } }"
    )
    pool = text_format.Parse("way: UP pool: AVE", make("PoolParameter"))
    assert (pool.way, pool.pool, make("PoolParameter").way) == (4, 1, 3)


def test_a_value_whose_name_another_enumeration_of_caffepys_has() -> None:
    merged, make = merge("message PoolParameter { enum Method { MAX = 0; UP = 4; AVE = 5; } }")
    methods = make("PoolParameter").DESCRIPTOR.enum_types_by_name["Method"].values_by_name
    assert {name: value.number for name, value in methods.items()} == {"MAX": 0, "AVE": 5, "STOCHASTIC": 2}
    assert not merged.values


def test_layers_of_caffes_second_format_under_their_first_name() -> None:
    merged, make = merge(
        "message NetParameter { repeated LayerParameter layers = 2; }\n"
        "message LayerParameter { enum LayerType { NONE = 0; MINE = 7; } optional LayerType type = 5;\n"
        " optional LayerParameter.LayerType again = 6; optional int32 depth = 9; }"
    )
    net = text_format.Parse(
        "layers { type: MINE depth: 3 again: MINE } layer { type: 'a' depth: 1 }", make("NetParameter")
    )
    assert (net.layers[0].depth, net.layer[0].type, net.layer[0].depth) == (3, "a", 1)
    assert merged.values == {"V1LayerParameter.LayerType.MINE"}
    assert {"V1LayerParameter.depth", "LayerParameter.depth"} <= merged.fields


def test_a_schema_that_contradicts_caffepys_is_refused_by_name() -> None:
    module = importlib.import_module("caffepy.formats.proto.caffe_pb2")
    with pytest.raises(ConfigError, match=r"^f\.proto: its schema does not fit caffepy's: "):
        unite(b"enum LayerParameter { A = 0; }", "f.proto", module)


def test_a_fork_may_use_the_numbers_of_fields_that_caffepy_had() -> None:
    module = importlib.import_module("caffepy.formats.proto.caffe_pb2")
    file, _ = unite(b"message TransformationParameter { optional int32 fork = 2000; }", "f.proto", module)
    assert file.message_types_by_name["TransformationParameter"].fields_by_name["fork"].number == 2000


@settings(max_examples=30)
@given(st.randoms(use_true_random=False))
def test_a_fork_with_any_numbers_can_be_read(random: Any) -> None:
    """Messages that a fork with other numbers has written are read by their names, and no two fields share a number."""
    fork = parse_schema(OWN_TEXT, "fork")
    for message in fork.message_type:
        kept = random.sample(list(message.field), random.randint(1, len(message.field)))
        copies = [FieldDescriptorProto.FromString(field.SerializeToString()) for field in kept]
        numbers = random.sample(range(1, 40), len(copies))
        del message.field[:]
        for field, number in zip(copies, numbers, strict=True):
            field.number = number
        message.field.extend(copies)
    merged = merge_schemas(fork, own_schema())
    pool = DescriptorPool()
    pool.AddSerializedFile(merged.file.SerializeToString())
    for message in own_schema().message_type:
        union = pool.FindMessageTypeByName(f"caffepy.{message.name}")
        assert {field.name for field in message.field} == set(union.fields_by_name)
        given_numbers = {
            field.name: field.number for each in fork.message_type if each.name == message.name for field in each.field
        }
        assert given_numbers.items() <= {name: field.number for name, field in union.fields_by_name.items()}.items()


def test_fields_whose_json_names_collide_stay_apart() -> None:
    fields = "optional int32 pool__param = 150; optional int32 own = 12; optional int32 o_wn = 13;"
    _, make = merge(f"message LayerParameter {{ {fields} }}")
    layer = text_format.Parse("pool__param: 3 pool_param { } own: 1 o_wn: 2", make("LayerParameter"))
    assert (layer.pool__param, layer.own, layer.o_wn) == (3, 1, 2)


def test_fields_that_the_fork_deprecates_are_noted() -> None:
    merged, _ = merge(
        "message LayerParameter { optional int32 old = 20 [deprecated = true]; optional int32 new = 21; }"
    )
    assert merged.deprecated == {"LayerParameter.old"}

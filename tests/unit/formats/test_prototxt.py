from __future__ import annotations

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from caffepy.errors import ConfigError
from caffepy.formats.proto.caffe_pb2 import LayerParameter, NetParameter, SolverParameter
from caffepy.formats.prototxt import decode_text, layer_blocks, parse_text


def _net(text: str) -> NetParameter:
    return parse_text(text, NetParameter(), "net.prototxt")


def test_a_net_is_read_with_its_comments_lists_and_floats() -> None:
    net = _net(
        '# a net\nname: "n" layer { name: "a" type: "Slice" slice_param { slice_point: [1, 2] } loss_weight: .5f }'
    )
    assert (net.name, list(net.layer[0].slice_param.slice_point), list(net.layer[0].loss_weight)) == (
        "n",
        [1, 2],
        [0.5],
    )


def test_pooling_may_repeat_the_settings_of_its_axes() -> None:
    """As the Caffes that pool over any number of axes declare them; a setting that is given once stays a number."""
    text = """layer { type: 'Convolution' convolution_param { kernel_size: 3 kernel_size: 5 } }
    layer { type: 'Pooling' pooling_param { kernel_size: 1 # kernel_size: 7
      kernel_size: 2, kernel_size:
      3; stride: 2 pad: 0 pad: 1 pad: 0 } }
    layer { type: 'Pooling' pooling_param { kernel_size: 4 } } """
    convolution, pooling, plain = _net(text).layer
    assert list(convolution.convolution_param.kernel_size) == [3, 5]
    param = pooling.pooling_param
    assert (list(param.kernel_shape.dim), list(param.pad_shape.dim), param.stride) == ([1, 2, 3], [0, 1, 0], 2)
    assert not (param.HasField("kernel_size") or param.HasField("pad") or param.HasField("stride_shape"))
    assert plain.pooling_param.kernel_size == 4
    with pytest.raises(ConfigError, match=r"prototxt:6:1: unknown field 'x' of NetParameter"):
        _net(text + "\nx: 1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'layer {\n  nmae: "x"\n}',
            r"^net\.prototxt:2:3: unknown field 'nmae' of LayerParameter; did you mean 'name'\?$",
        ),
        (
            "layer { pooling_param { pool: MAXX } }",
            r"net\.prototxt:1:31: unknown value 'MAXX' of PoolingParameter\.PoolM",
        ),
        ("layer { pooling_param { pool: MAXX } }", r"did you mean 'MAX'\?"),
        (
            "layer { pooling_param { pool: 7 } }",
            r"unknown value '7' of PoolingParameter.PoolMethod; known: AVE, MAX, STOC",
        ),
        ('layer { include { phase: "TRAIN" } }', r"1:26: Phase is an enumeration; write TRAIN without quotes"),
        (
            "layer { num_output: 3 }",
            r"unknown field 'num_output' of LayerParameter; it belongs inside .*convolution_param",
        ),
        ("layer { param { momentum: 1 } }", r"of ParamSpec; known: decay_mult, lr_mult, name, share_mode"),
        (
            'layer { name: "b" type: "Qmix" # {\n qmix_param { frozen: true } }',
            r"^net\.prototxt:2:2: unknown field 'qmix_param' of .*, in a layer of type 'Qmix'; if a Caffe fork "
            r"has it, give .* --proto FILE or caffepy\.register_proto\(path\)",
        ),
        ("layer { nms_box_param { } type: 'NmsBox' }", r"'nms_box_param' .*, in a layer of type 'NmsBox'; if"),
        ('layer { type: "Deconvolution" convolutoin_param { } }', r"did you mean 'convolution_param'\?$"),
        ("layer { blobs_lr: 1 }", r"unknown field 'blobs_lr' of LayerParameter; .*; write param { lr_mult: 1 }, one"),
        ("layers {\n param { lr_mult: 1 } }", r"2:8: in layers { }, the old format, param is a name; write blobs_lr"),
        ("layer { top { } }", r"1:13: found a block where 'top' takes a value; write top: and the value$"),
        ("// a net\nlayer { }", r"1:1: comments begin with #, not with a slash$"),
        ("layer { qmix_param { } }", r"unknown field 'qmix_param' of LayerParameter; if a Caffe fork has it"),
        ("layer { zzqq: 1 }", r"unknown field 'zzqq' of LayerParameter; if a Caffe fork has it"),
        ("layer { pooling_param { pool: MEDIAN } }", r"'MEDIAN' of .*; known: AVE, MAX, STOCHASTIC; if a Caffe fork"),
        (
            "layer { detectnet_groundtruth_param { object_class { src2: 1 } } }",
            "unknown field 'src2' of ClassMapping; .*'src'",
        ),
        ("layer { name: x }", r"1:15: found 'x' where a quoted string is expected; put it into quotes$"),
        ('layer { name: "a"', r"1:15: the text ends .* close the block that is still open"),
        ('layer { name: "a" } }', r"1:21: this '}' closes nothing"),
        ("layer { convolution_param { num_output: -1 } }", r"1:41: value out of range: -1$"),
        ("layer { convolution_param { num_output: few } }", r"1:41: found few where a whole number is expected"),
        ("layer { type: INNER_PRODUCT }", r"1:15: .*in layer { } write type: \"InnerProduct\", or make it layers { }"),
        ('layer { loss_weight: "2" }', r"1:22: found \"2\" where a number is expected"),
        ('name: "a"\nname: "b"', r":2:\d+: field 'name' of NetParameter is given twice; keep one"),
        ("layer { pooling_param { kernel_h: 1 kernel_h: 2 } }", "field 'kernel_h' of PoolingParameter is given twice"),
        ("[some.extension] { x: 1 }", r"extension names in \[brackets\]"),
        ("layer { clip_param { min: 1 } }", r"required field 'layer\[0\]\.clip_param\.max' is not set"),
        ("base_lr: 0.1", r"1:1: 'base_lr' is a field of a solver, and a net was expected"),
        (
            "base_lr: 0.1 layer { }",
            r"1:1: unknown field 'base_lr' of NetParameter; .*--ignore-fields NetParameter.base_lr",
        ),
    ],
)
def test_an_error_says_what_where_and_what_to_do(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _net(text)


@pytest.mark.parametrize("text", ["base_lr: 0,01", "momentum: -0,9e1 max_iter: 1", "max_iter: 10,000", "display: 1, 2"])
def test_a_comma_is_no_decimal_point(text: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^s\.prototxt:1:\d+: '\d+e?1?' follows a number .* comma is not a decimal point: write 0\.01",
    ):
        parse_text(text, SolverParameter(), "s.prototxt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('layer { name: "a" }', r"s:1:1: 'layer' is a field of a net, and a solver was expected"),
        ("net_param { lyer { } }", "unknown field 'lyer' of NetParameter; did you mean 'layer'"),
    ],
)
def test_a_net_is_told_from_a_solver(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_text(text, SolverParameter(), "s")


def test_encodings() -> None:
    """Comments may be in any encoding, a byte order mark is dropped, values must be UTF-8, and NUL is no text."""
    assert decode_text(b'name: "a" # caf\xe9\ntop: "\xc3\xa9"', "f") == 'name: "a" \ntop: "é"'
    assert decode_text(b'\xef\xbb\xbfname: "a"', "f") == 'name: "a"'
    with pytest.raises(ConfigError, match=r"^f:2:8: byte 0xe9 is not UTF-8; save the file as UTF-8$"):
        decode_text(b'# fine\nname: "\xe9"', "f")
    with pytest.raises(ConfigError, match="f: this is a binary file, not a prototxt"):
        decode_text(b"\n\x03abc\0", "f")


names = st.text(max_size=8)
layers = st.builds(
    LayerParameter,
    name=names,
    type=names,
    bottom=st.lists(names, max_size=3),
    top=st.lists(names, max_size=3),
    loss_weight=st.lists(st.floats(width=32, allow_nan=False), max_size=2),
)


@given(st.builds(NetParameter, name=names, layer=st.lists(layers, max_size=4)))
def test_what_protobuf_prints_is_read_back(net: NetParameter) -> None:
    assert _net(text_format.MessageToString(net)) == net


@given(st.text(max_size=60))
def test_any_text_is_either_read_or_refused_with_a_config_error(text: str) -> None:
    try:
        _net(text)
    except ConfigError as error:
        assert str(error).startswith("net.prototxt:")


@given(st.binary(max_size=60))
def test_any_bytes_are_either_text_or_refused_with_a_config_error(data: bytes) -> None:
    try:
        assert isinstance(decode_text(data, "f"), str)
    except ConfigError as error:
        assert str(error).startswith("f:")


def test_blocks_of_layers_have_their_lines() -> None:
    text = """name: "a layer {" # layer { name: "no" }
layer { name: "one" param { name: "}" } # }
  type: 'x{'
}

layer: < name: "two" include { phase: TEST } >
layers {
  name: "three" }  layer { name: "four" }
"""
    assert [(line, block.split('"')[1]) for line, block in layer_blocks(text)] == [
        (2, "one"),
        (6, "two"),
        (7, "three"),
        (8, "four"),
    ]
    assert all(parse_text(block, NetParameter(), "x") for _, block in layer_blocks(text))
    nested = 'net_param {\n layer { name: "one" }\n layer { name: "two" layer: 3 } }'
    assert [line for line, _ in layer_blocks(nested)] == [2, 3]


def test_blocks_of_layers_are_found_in_time_that_grows_with_the_text() -> None:
    """Ten megabytes; a quadratic search takes hours."""
    assert sum(1 for _ in layer_blocks('layer { name: "x" }\n' * 500_000)) == 500_000
    assert not list(layer_blocks("layer " * 1_700_000))
    assert not list(layer_blocks("layer { a { " * 900_000))

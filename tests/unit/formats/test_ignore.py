"""Fields that a user leaves out of a prototxt."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from caffepy.cli.main import main
from caffepy.errors import ConfigError
from caffepy.formats.ignore import ignored_fields, leave_out
from caffepy.formats.load import read_net
from caffepy.formats.proto import caffe_pb2

LAYER = 'layer {{ name: "{}" type: "Convolution" convolution_param {{ num_output: 3 {} kernel_size: 1 }} }}\n'
VALUES = (
    "4",
    "-1.5e3",
    "LIKE",
    '"a" "b"',
    "'}'",
    "[1, 2]",
    "{ a: 1 b < c: [3] > }",
    "< x { y: '#' } >",
    "2;",
    "2,",
    "2 # {",
)


def ignore(text: str, *names: str) -> caffe_pb2.NetParameter:
    """The net of a text without these fields."""
    left = leave_out(text, caffe_pb2.NetParameter.DESCRIPTOR, frozenset(names), "net.prototxt")
    assert [len(line) for line in left.split("\n")] == [len(line) for line in text.split("\n")]
    return text_format.Parse(left, caffe_pb2.NetParameter())


@given(st.lists(st.tuples(st.sampled_from([":", ""]), st.sampled_from(VALUES)), max_size=6), st.booleans())
def test_what_is_left_is_the_net_without_the_fields(fields: list[tuple[str, str]], every: bool) -> None:
    unknown = "\n".join(f"gen_mode{colon if value[0] in '{<' else ':'} {value}\n" for colon, value in fields)
    text = f"force_backward: true\n{LAYER.format('c', unknown)}{LAYER.format('d', '')}"
    wanted = text_format.Parse(
        f"force_backward: true {LAYER.format('c', '')}{LAYER.format('d', '')}", caffe_pb2.NetParameter()
    )
    assert ignore(text, "all" if every else "ConvolutionParameter.gen_mode") == wanted


def test_a_named_field_that_caffepy_knows_is_left_out_and_all_leaves_it() -> None:
    text = LAYER.format("c", "stride: 2")
    assert not ignore(text, "ConvolutionParameter.stride").layer[0].convolution_param.stride
    assert ignore(text, "all").layer[0].convolution_param.stride == [2]


def test_a_field_is_left_out_of_its_own_message_only() -> None:
    text = 'layer { name: "c" blobs_lr: 1 } layers { name: "d" blobs_lr: 1 }'
    net = ignore(text, "LayerParameter.blobs_lr")
    assert list(net.layers[0].blobs_lr) == [1]


def test_the_log_names_each_field_and_its_layers_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "net.prototxt"
    path.write_text("".join(LAYER.format(f"c{i}", "gen_mode: 1") for i in range(7)))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert len(read_net(path, ["ConvolutionParameter.gen_mode"]).layer) == 7
    [line] = caplog.messages
    assert line.startswith(f'{path}: ConvolutionParameter.gen_mode is ignored in layer "c0"')
    assert line.endswith("and 2 more")


def test_the_variable_holds_for_every_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.prototxt"
    path.write_text(LAYER.format("c", "gen_mode: 1"))
    with pytest.raises(ConfigError, match="--ignore-fields ConvolutionParameter.gen_mode"):
        read_net(path)
    monkeypatch.setenv("CAFFEPY_IGNORE_FIELDS", " ConvolutionParameter.gen_mode, NetParameter.other")
    assert read_net(path).layer[0].convolution_param.num_output == 3


@pytest.mark.parametrize("text", ["layer { x: { ", "layer } a: 1", "x", "x:", "layer { convolution_param {"])
def test_a_text_that_does_not_parse_has_the_parsers_error(text: str) -> None:
    with pytest.raises(text_format.ParseError):
        ignore(f"{text} gen_mode: 3 ] force_backward: maybe", "all")


def test_a_name_without_its_message_is_refused() -> None:
    with pytest.raises(ConfigError, match="'dilation' is not the name of a field; write Message.field"):
        ignored_fields(["dilation"])


def test_the_option_holds_for_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.prototxt"
    path.write_text(
        'layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 1 dim: 2 dim: 3 dim: 3 } } }\n'
        'layer { name: "c" type: "Convolution" bottom: "x" top: "c" convolution_param { num_output: 3 kernel_size: 1 '
        "gen_mode: 1 } }"
    )
    command = ["net", "--model", str(path)]
    assert main([*command, "--ignore-fields", "ConvolutionParameter.gen_mode"]) == 0
    assert 'ConvolutionParameter.gen_mode is ignored in layer "c"' in capsys.readouterr().err
    assert main(command) == 2
    assert "--ignore-fields ConvolutionParameter.gen_mode" in capsys.readouterr().err
    assert main([*command, "--ignore-fields", "gen_mode"]) == 2
    assert "'gen_mode' is not the name of a field" in capsys.readouterr().err

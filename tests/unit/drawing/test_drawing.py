"""`caffepy.drawing.draw_net`: what the picture says, and that names cannot break it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from xml.etree import ElementTree

import cv2
import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.cli.main import main
from caffepy.config.load import read_net
from caffepy.drawing import draw_net, render_net
from caffepy.errors import ConfigError
from caffepy.proto import caffe_pb2

MODELS = Path(__file__).parents[3] / "models"
SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '</text><script>alert(1)</script>"\\"]; n0 -> evil [label=<B>&amp;\n\x00\x1b[31m\u202e\ufffe'


def net_of(text: str) -> caffe_pb2.NetParameter:
    return text_format.Parse(text, caffe_pb2.NetParameter())


def texts_of(net: caffe_pb2.NetParameter, rankdir: str = "LR", phase: int | None = None, **options: bool) -> list[str]:
    root = ElementTree.fromstring(render_net(net, "svg", rankdir, phase, graphviz=False, **options))
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def edges_of(net: caffe_pb2.NetParameter, phase: int | None = None) -> list[str]:
    dot = render_net(net, "dot", phase=phase).decode()
    return [line.strip() for line in dot.splitlines() if "->" in line]


INCEPTION = net_of("""
    name: "two ways"
    layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 dim: 8 dim: 8 } } }
    layer { name: "a" type: "Convolution" bottom: "data" top: "a"
            convolution_param { num_output: 4 kernel_h: 1 kernel_w: 3 pad_w: 1 pad_h: 0 stride: 2 group: 1 } }
    layer { name: "a_relu" type: "ReLU" bottom: "a" top: "a" }
    layer { name: "b" type: "Pooling" bottom: "data" top: "b" pooling_param { kernel_size: 2 stride: 2 pool: AVE } }
    layer { name: "join" type: "Concat" bottom: "a" bottom: "b" top: "both" }
""")


def test_a_picture_says_types_numbers_and_shapes():
    texts = texts_of(read_net(MODELS / "googlenet/deploy.prototxt"))
    assert "GoogLeNet" in texts
    assert "64 outputs, 7x7, stride 2x2, pad 3x3" in texts
    assert "1x64x112x112" in texts
    assert texts.count("Concat") == 9


@pytest.mark.parametrize("rankdir", ["LR", "RL", "TB", "BT"])
def test_every_direction_has_all_texts_within_the_picture(rankdir: str):
    root = ElementTree.fromstring(render_net(INCEPTION, "svg", rankdir, graphviz=False))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    placed = {e.text: (float(e.get("x", -1)), float(e.get("y", -1))) for e in root.iter(f"{SVG}text")}
    assert all(0 < x < width and 0 < y < height for x, y in placed.values())
    assert {"4 outputs, 1x3, stride 2x2, pad 0x1", "Pooling AVE", "a_relu", "1x3x8x8", "1x7x4x4"} <= set(placed)
    axis = 0 if rankdir in ("LR", "RL") else 1
    goes_on = placed["join"][axis] > placed["data"][axis]
    assert goes_on == (rankdir in ("LR", "TB"))


def test_an_in_place_layer_is_a_row_of_the_box_before_it():
    dot = render_net(INCEPTION, "dot").decode()
    node = next(line for line in dot.splitlines() if ">a_relu<" in line)
    assert ">a<" in node
    assert '"#90EE90"' in node


def test_an_in_place_layer_behind_another_reader_has_a_box_of_its_own():
    net = net_of("""
        layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 2 } } }
        layer { name: "early" type: "Power" bottom: "data" top: "early" }
        layer { name: "relu" type: "ReLU" bottom: "data" top: "data" }
        layer { name: "late" type: "Power" bottom: "data" top: "late" }
    """)
    assert edges_of(net)[:3] == ["n0 -> n1;", "n0 -> n2;", "n2 -> n3 [label=<data>];"]


def test_layers_of_other_phases_are_not_joined():
    net = read_net(MODELS / "lenet/train_test.prototxt")
    texts = texts_of(net)
    assert {"Data (TRAIN)", "Data (TEST)", "Accuracy (TEST)"} <= set(texts)
    dot = render_net(net, "dot").decode().splitlines()
    nodes = {key: line.split()[0] for line in dot for key in ("Data (TRAIN)", "Accuracy (TEST)") if key in line}
    assert not [e for e in edges_of(net) if e.startswith(f"{nodes['Data (TRAIN)']} -> {nodes['Accuracy (TEST)']}")]
    assert "Accuracy (TEST)" not in texts_of(net, phase=caffe_pb2.TRAIN)


def test_data_that_are_cropped_have_their_shape():
    texts = texts_of(read_net(MODELS / "caffenet/train_val.prototxt"), phase=caffe_pb2.TRAIN)
    assert [text for text in texts if text.endswith("x3x227x227")]


def test_a_blob_that_nobody_makes_is_an_octagon():
    dot = render_net(net_of('layer { name: "a" type: "ReLU" bottom: "x" top: "y" }'), "dot").decode()
    assert dot.count("octagon") == 2


def test_rates_are_shown_when_asked_for():
    net = net_of("""layer { name: "a" type: "InnerProduct" bottom: "x" top: "y" param { lr_mult: 0.5 }
                    inner_product_param { num_output: 3 } }""")
    assert "lr mult: 0.5, 1.0" in texts_of(net, rates=True)
    assert not [text for text in texts_of(net) if "lr mult" in text]


def test_names_cannot_break_the_picture():
    net = caffe_pb2.NetParameter(name=HOSTILE)
    net.layer.add(name=HOSTILE, type="Python", bottom=[HOSTILE], top=[HOSTILE + "2"])
    root = ElementTree.fromstring(render_net(net, "svg", graphviz=False))
    assert not list(root.iter(f"{SVG}script"))
    assert any(element.text.startswith("</text><script>") for element in root.iter(f"{SVG}text"))
    dot = render_net(net, "dot").decode()
    assert len([line for line in dot.splitlines() if "->" in line and not line.startswith("  n")]) <= 1
    assert "<script>" not in dot
    assert "\x1b" not in dot
    assert "\x00" not in dot


def test_a_png_shows_the_boxes(tmp_path: Path):
    draw_net(INCEPTION, tmp_path / "net.png", graphviz=False)
    image = cv2.imread(str(tmp_path / "net.png"))
    assert np.any(np.all(image == (0x50, 0x50, 0xFF), axis=2)), "a convolution's red"
    assert np.any(np.all(image == (0x90, 0xEE, 0x90), axis=2)), "a ReLU's green"


def fake_dot(folder: Path, body: str) -> None:
    program = folder / "dot"
    program.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
    program.chmod(0o755)


def test_dot_draws_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake_dot(tmp_path, "sys.stdout.write(sys.argv[1] + sys.stdin.read())")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert render_net(INCEPTION, "png").startswith(b"-Tpngdigraph net {")


def test_a_dot_that_fails_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    fake_dot(tmp_path, "sys.exit('no fonts')")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert b"<svg" in render_net(INCEPTION, "svg")
    assert "failed with status 1: no fonts; the net is laid out without it" in caplog.text


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"pictures of nets end in \.svg, .*, not in '\.bmp'"):
        render_net(INCEPTION, "bmp")
    with pytest.raises(ConfigError, match="rankdir is LR or RL or TB or BT, not 'UP'"):
        render_net(INCEPTION, "svg", "up")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"needs Graphviz's dot, or matplotlib: pip install 'caffepy\[plot\]'"):
        render_net(INCEPTION, "png", graphviz=False)


def test_the_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    net, picture = MODELS / "lenet/train_test.prototxt", tmp_path / "net.dot"
    assert main(["draw_net", str(net), str(picture), "-rankdir", "TB", "--phase=TEST", "--display_lrm"]) == 0
    assert "Drawing net to" in capsys.readouterr().out
    assert "rankdir=TB" in picture.read_text()
    assert "lr mult: 1.0, 2.0" in picture.read_text()

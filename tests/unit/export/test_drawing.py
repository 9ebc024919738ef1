"""`caffepy.export.drawing.draw_net`: what the picture says, and that names cannot break it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest
from google.protobuf import text_format

from caffepy.cli.main import main
from caffepy.errors import ConfigError, RunError
from caffepy.export.drawing import draw_net, render_net
from caffepy.formats.load import read_net
from caffepy.formats.proto import caffe_pb2

MODELS = Path(__file__).parents[3] / "models"
HOSTILE = '</text><script>alert(1)</script>"\\"]; n0 -> evil [label=<B>&amp;\n\x00\x1b[31m\u202e\ufffe'


def net_of(text: str) -> caffe_pb2.NetParameter:
    return text_format.Parse(text, caffe_pb2.NetParameter())


def texts_of(net: caffe_pb2.NetParameter, phase: int | None = None, **options: bool) -> list[str]:
    """The lines of all labels in the dot language."""
    dot = render_net(net, "dot", phase=phase, **options).decode()
    labels = re.findall(r"label=<(.*?)>(?:[],;]|$)", dot, re.MULTILINE)
    return [unescape(line) for label in labels for line in re.split("<.*?>", label) if line]


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
def test_the_direction_is_graphvizs(rankdir: str):
    assert f"rankdir={rankdir}," in render_net(INCEPTION, "dot", rankdir.lower()).decode()


def test_boxes_have_settings_and_arrows_have_shapes():
    texts = texts_of(INCEPTION)
    assert {"4 outputs, 1x3, stride 2x2, pad 0x1", "Pooling AVE", "a_relu", "1x3x8x8", "1x7x4x4"} <= set(texts)


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
    dot = render_net(net, "dot").decode()
    assert len([line for line in dot.splitlines() if "->" in line and not line.startswith("  n")]) <= 1
    assert "<script>" not in dot
    assert "\x1b" not in dot
    assert "\x00" not in dot


@pytest.fixture
def fake_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a program `dot` with a Python body on the path, which holds nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def write(body: str) -> None:
        program = folder / "dot"
        program.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
        program.chmod(0o755)

    return write


def test_graphviz_makes_the_picture(fake_dot: Callable[[str], None], tmp_path: Path):
    fake_dot("sys.stdout.write(sys.argv[1] + sys.stdin.read())")
    draw_net(INCEPTION, tmp_path / "net.png")
    assert (tmp_path / "net.png").read_bytes().startswith(b"-Tpngdigraph net {")


def test_a_failure_of_graphviz_writes_no_file(fake_dot: Callable[[str], None], tmp_path: Path):
    fake_dot("sys.exit('no fonts')")
    with pytest.raises(RunError, match=r"dot failed with status 1: no fonts"):
        draw_net(INCEPTION, tmp_path / "net.svg")
    assert not (tmp_path / "net.svg").exists()


@pytest.mark.usefixtures("fake_dot")
def test_without_graphviz_its_package_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"\.svg .*apt-get install graphviz.*\.dot"):
        draw_net(INCEPTION, tmp_path / "net.svg")
    draw_net(INCEPTION, tmp_path / "net.dot")
    assert (tmp_path / "net.dot").read_text().startswith("digraph")


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match=r"\.svg, .*'\.bmp'"):
        render_net(INCEPTION, "bmp")
    with pytest.raises(ConfigError, match="rankdir .*'UP'"):
        render_net(INCEPTION, "svg", "up")


def test_the_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    net, picture = MODELS / "lenet/train_test.prototxt", tmp_path / "net.dot"
    assert main(["draw_net", str(net), str(picture), "-rankdir", "TB", "--phase=TEST", "--display_lrm"]) == 0
    assert "Drawing net to" in capsys.readouterr().out
    assert "rankdir=TB" in picture.read_text()
    assert "lr mult: 1.0, 2.0" in picture.read_text()

"""`caffepy.drawing.draw_net`: what the picture says, and that names cannot break it."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from google.protobuf import text_format

from caffepy.config.load import read_net
from caffepy.drawing import draw_net
from caffepy.proto import caffe_pb2

MODELS = Path(__file__).parents[3] / "models"
SVG = "{http://www.w3.org/2000/svg}"


def net_of(text: str) -> caffe_pb2.NetParameter:
    return text_format.Parse(text, caffe_pb2.NetParameter())


def svg_texts(path: Path) -> list[str]:
    return [element.text or "" for element in ElementTree.parse(path).iter(f"{SVG}text")]


def test_a_picture_says_types_numbers_and_shapes(tmp_path: Path):
    draw_net(read_net(MODELS / "googlenet/deploy.prototxt"), tmp_path / "net.svg", graphviz=False)
    texts = svg_texts(tmp_path / "net.svg")
    assert "GoogLeNet" in texts
    assert "64 outputs, 7x7, stride 2x2, pad 3x3" in texts
    assert "1x64x112x112" in texts
    assert texts.count("Concat") == 9

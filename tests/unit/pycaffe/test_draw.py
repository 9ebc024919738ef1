"""Pictures of nets under pycaffe's names."""

from __future__ import annotations

import sys

import pytest
from google.protobuf import text_format

from caffepy.errors import ConfigError
from caffepy.formats.proto import caffe_pb2
from caffepy.pycaffe import draw

NET = """
name: "small \\"net\\""
layer { name: "data" type: "Data" top: "data" top: "label" include { phase: TRAIN } data_param { batch_size: 7 } }
layer { name: "input" type: "Input" top: "data" include { phase: TEST } input_param { shape { dim: [1, 3, 9, 9] } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" param { lr_mult: 2 }
        convolution_param { num_output: 4 kernel_size: 3 stride: 2 } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "pool" type: "Pooling" bottom: "conv" top: "pool" pooling_param { pool: AVE kernel_size: 2 pad: 1 } }
layer { name: "ip" type: "InnerProduct" bottom: "pool" top: "ip" inner_product_param { num_output: 5 } }
"""


@pytest.fixture
def net():
    return text_format.Parse(NET, caffe_pb2.NetParameter())


def layer(net, name):
    return next(layer for layer in net.layer if layer.name == name)


def test_labels_of_layers(net):
    conv = r'"conv\n(Convolution)\nkernel size: 3\nstride: 2\npad: 0"'
    assert draw.get_layer_label(layer(net, "conv"), "LR") == conv
    assert draw.get_layer_label(layer(net, "conv"), "LR", True) == conv[:-1] + r'\nlr mult: 2.0, 1.0"'
    assert draw.get_layer_label(layer(net, "pool"), "TB") == '"pool (Pooling AVE) kernel size: 2 stride: 1 pad: 1"'
    assert draw.get_layer_label(layer(net, "relu"), "BT", True) == '"relu (ReLU)"'


def test_labels_of_edges(net):
    found = [draw.get_edge_label(layer(net, name)) for name in ("data", "conv", "ip", "relu")]
    assert found == ["Batch 7", "4", "5", '""']


def test_learning_rate_multipliers(net):
    assert draw.get_layer_lr_mult(layer(net, "ip")) == (1.0, 1.0)
    with pytest.raises(ValueError, match="ReLU layers do not have a learning rate multiplier"):
        draw.get_layer_lr_mult(layer(net, "relu"))
    net.layer[2].param.add()
    net.layer[2].param.add()
    with pytest.raises(ValueError, match="layer 'conv' has more than two"):
        draw.get_layer_lr_mult(layer(net, "conv"))


def test_colours_and_pooling_types():
    types = ("Convolution", "Deconvolution", "Pooling", "InnerProduct", "LRN")
    assert list(map(draw.choose_color_by_layertype, types)) == ["#FF5050", "#FF5050", "#FF9900", "#CC33FF", "#6495ED"]
    assert draw.get_pooling_types_dict() == {0: "MAX", 1: "AVE", 2: "STOCHASTIC"}


def test_the_graph_as_text(net):
    text = draw.get_pydot_graph(net, "LR", phase=caffe_pb2.TEST).to_string()
    assert text.startswith('digraph "small \\"net\\"" {\nrankdir=LR;\n')
    assert r'"conv_Convolution" [label="conv\n(Convolution)\nkernel size: 3\nstride: 2\npad: 0", shape=record,' in text
    assert '"conv_blob" -> "pool_Pooling";' in text
    assert '"conv_Convolution" -> "conv_blob" [label="4"];' in text
    assert '"relu_ReLU" [label="relu\\n(ReLU)", shape=record, fillcolor="#90EE90"' in text
    assert text.count('"conv_blob" [label="conv"') == 1
    assert "input_Input" in text
    assert "data_Data" not in text
    plain = draw.get_pydot_graph(net, "LR", label_edges=False).to_string()
    assert '"conv_Convolution" -> "conv_blob" [label=""];' in plain
    assert "data_Data" in plain


def test_pictures(net, tmp_path, monkeypatch):
    (tmp_path / "dot").write_text(f"#!{sys.executable}\nimport sys\nprint(sys.argv[1], sys.stdin.read())\n")
    (tmp_path / "dot").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    svg = draw.draw_net(net, "TB", "svg", phase=caffe_pb2.TEST, display_lrm=True)
    assert svg.startswith(b"-Tsvg digraph")
    assert b"pool" in svg
    assert draw.draw_net(net, "LR").startswith(b"-Tpng")
    draw.draw_net_to_file(net, str(tmp_path / "net.pdf"))
    assert (tmp_path / "net.pdf").read_bytes().startswith(b"-Tpdf")
    graph = draw.get_pydot_graph(net, "LR")
    assert graph.create(format="svg").startswith(b"-Tsvg")
    assert graph.write(tmp_path / "net.dot", format="raw")
    assert (tmp_path / "net.dot").read_text() == graph.to_string()


def test_unknown_formats(net, tmp_path):
    with pytest.raises(ConfigError, match="not in '.bmp'"):
        draw.draw_net_to_file(net, tmp_path / "net.bmp")
    with pytest.raises(ConfigError, match="rankdir"):
        draw.draw_net(net, "XY")

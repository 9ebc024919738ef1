"""Which dtype each blob gets, and the Cast layers between layers that differ."""

from __future__ import annotations

import logging

import pytest
from google.protobuf import text_format
from training import build_net

from caffepy.backend.meta import MetaBackend
from caffepy.errors import ConfigError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import LayerContext
from caffepy.net import Net

NET = """
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 4 dim: 3 dim: 8 dim: 8 } shape { dim: 4 } } }
layer { name: "c" type: "Convolution" bottom: "data" top: "c" convolution_param { num_output: 8 kernel_size: 3 } }
layer { name: "r" type: "ReLU" bottom: "c" top: "c" }
layer { name: "ip" type: "InnerProduct" bottom: "c" top: "ip" inner_product_param { num_output: 5 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
layer { name: "accuracy" type: "Accuracy" bottom: "ip" bottom: "label" top: "accuracy" }
"""
HALF = "default_forward_type: FLOAT16 default_backward_type: FLOAT16 "


def dry_net(text: str, fuse: bool = False) -> Net:
    """A net on a device that has every dtype, without memory."""
    param = text_format.Parse(text, caffe_pb2.NetParameter())
    return Net(param, LayerContext(MetaBackend(), phase=caffe_pb2.TRAIN), fuse=fuse)


def dtypes(net: Net) -> dict[str, str]:
    return {blob.name: blob.dtype for node in net.nodes for blob in node.tops}


def test_float_nets_have_no_casts() -> None:
    net = dry_net(NET)
    assert set(dtypes(net).values()) == {"float32"}
    assert "Cast" not in [layer.type for layer in net.layers]


@pytest.mark.parametrize(("kind", "dtype"), [("FLOAT16", "float16"), ("BFLOAT16", "bfloat16")])
def test_half_nets_keep_labels_and_losses_exact(kind: str, dtype: str) -> None:
    found = dtypes(dry_net(HALF.replace("FLOAT16", kind) + NET))
    assert {found[name] for name in ("data", "c", "ip", "ip_ip_0_split_0")} == {dtype}
    assert {found[name] for name in ("label", "loss", "accuracy", "ip_ip_0_split_0_as_float32")} == {"float32"}


def test_one_layer_may_differ() -> None:
    net = dry_net(HALF + NET.replace('name: "ip"', 'name: "ip" forward_type: FLOAT backward_type: FLOAT'))
    found = dtypes(net)
    assert (found["c"], found["c_as_float32"], found["ip"]) == ("float16", "float32", "float32")
    assert [layer.name for layer in net.layers if layer.type == "Cast"] == ["c_as_float32"]


@pytest.mark.parametrize(
    ("fields", "dtype"), [("", "float16"), ("forward_type", "float32"), ("backward_type", "float32")]
)
def test_either_type_of_a_layer_decides(fields: str, dtype: str) -> None:
    """Blobs of which data and diffs would differ are kept in float32."""
    given = f"{fields}: FLOAT" if fields else ""
    assert dtypes(dry_net(HALF + NET.replace('name: "c"', f'name: "c" {given}')))["c"] == dtype


def test_layers_in_place_and_splits_follow_their_bottom() -> None:
    net = dry_net(HALF + NET.replace('name: "r"', 'name: "r" forward_type: FLOAT backward_type: FLOAT'))
    assert dtypes(net)["c"] == "float16"
    assert "Cast" not in [layer.type for layer in net.layers[:4]]


def test_casts_are_not_saved() -> None:
    net = dry_net(HALF + NET)
    assert "Cast" in [layer.type for layer in net.layers]
    saved = {layer.name for layer in net.layers if layer.type != "Cast"}
    assert saved == {"data", "label_data_1_split", "c", "r", "ip", "ip_ip_0_split", "loss", "accuracy"}
    plain = build_net(HALF + NET)
    assert {layer.name for layer in plain.to_proto().layer} == saved


def test_the_cpu_keeps_float32_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "caffepy"):
        net = build_net(HALF + NET)
    assert set(dtypes(net).values()) == {"float32"}
    told = [r.getMessage() for r in caplog.records if "keeps all blobs in float32" in r.getMessage()]
    assert told == ["cpu keeps all blobs in float32, although the net asks for float16"]


def test_types_that_differ_between_the_passes_are_float(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "caffepy"):
        net = dry_net("default_forward_type: FLOAT16 " + NET)
    assert set(dtypes(net).values()) == {"float32"}
    assert any("forward_type and backward_type differ" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("default_forward_type: DOUBLE ", "layer 'data' .*: type DOUBLE is not supported; use FLOAT, FLOAT16 or BF"),
        (
            "default_forward_type: FLOAT16 default_backward_type: BFLOAT16 ",
            "forward_type is float16 and backward_type bfloat16; make them the same",
        ),
    ],
)
def test_types_that_blobs_cannot_have_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dry_net(text + NET)


@pytest.mark.parametrize("kind", ["Scale", "Bias"])
def test_a_bottom_in_place_of_a_parameter_is_read_in_float32(kind: str) -> None:
    text = f"""{NET} layer {{ name: "s" type: "{kind}" bottom: "ip" bottom: "f" top: "s"
      {kind.lower()}_param {{ axis: 0 }} }}"""
    factor = 'layer { name: "f" type: "DummyData" top: "f" dummy_data_param { shape { dim: 4 } } }'
    net = dry_net(HALF + text.replace("layer", f"{factor} layer", 1))
    bottoms = next(node.bottoms for node in net.nodes if node.layer.name == "s")
    assert [bottom.dtype for bottom in bottoms] == ["float16", "float32"]

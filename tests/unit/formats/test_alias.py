"""Layer types that are others under a new name: `--alias`, CAFFEPY_ALIAS, `register_alias`, and those of families."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from registered_types import forgotten_types
from training import build_net

import caffepy
from caffepy.errors import ConfigError
from caffepy.formats import alias
from caffepy.formats.alias import Alias, aliasing, find_alias, settings_field
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import parse_text
from caffepy.formats.upgrade import upgrade_net

SCHEMA = """
syntax = "proto2";
package caffe;
message LayerParameter { optional RoiGridParameter roi_grid_param = 265; optional SameParameter same_param = 266; }
message RoiGridParameter {
  optional uint64 pooled_h = 1 [default = 3];
  optional int32 pooled_w = 2;
  optional double spatial_scale = 3;
  optional int32 samples = 4 [default = 2];
}
message SameParameter {
  enum Method { AVE = 0; MAX = 1; WILD = 7; }
  optional Method pool = 1 [default = AVE];
  optional uint32 kernel_size = 2;
  optional string stride = 3;
}
"""
NET = """
layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 1 dim: 2 dim: 8 dim: 8 } } }
layer { name: "r" type: "Input" top: "r" input_param { shape { dim: 4 dim: 5 } } }
layer { name: "y" type: "%s" bottom: "x" %s top: "y" %s }
"""


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The aliases and types that a test registers are gone behind it."""
    monkeypatch.setattr(alias, "_registered", {})
    monkeypatch.delenv(alias.VARIABLE, raising=False)
    with forgotten_types(monkeypatch):
        yield


def read(text: str) -> caffe_pb2.NetParameter:
    net = parse_text(text, caffe_pb2.NetParameter(), "net.prototxt")
    upgrade_net(net, "net.prototxt")
    return net


def test_a_type_of_an_environment_variable_a_program_and_a_with_block(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'layer { name: "a" type: "NewReLU" relu_param { negative_slope: 0.5 } }'
    caffepy.register_alias("NewReLU", "ELU")
    assert read(text).layer[0].type == "ELU"
    with aliasing("Other=TanH, NewReLU=ReLU"):
        assert os.environ[alias.VARIABLE] == "Other=TanH, NewReLU=ReLU"
        assert read(text).layer[0] == parse_text(text.replace("New", ""), caffe_pb2.NetParameter(), "").layer[0]
    assert alias.VARIABLE not in os.environ
    monkeypatch.setenv(alias.VARIABLE, "NewReLU=Sigmoid")
    with aliasing("NewReLU=TanH"):
        assert read(text).layer[0].type == "TanH"
    assert read(text).layer[0].type == "Sigmoid"


def test_types_of_the_old_format_may_be_aliases() -> None:
    with aliasing("ReLU=TanH"):
        assert read('layers { name: "a" type: RELU }').layer[0].type == "TanH"


@pytest.mark.parametrize("text", ["A", "A=B=C", "A=B:", "=B", "A=A", "A=B,C", "A-B=C"])
def test_texts_that_are_no_aliases(text: str) -> None:
    with pytest.raises(ConfigError, match=r"alias: '.*' is not NEW=OLD, two layer types"), aliasing(text):
        pass


def test_the_aliases_of_the_families_are_found_without_an_import() -> None:
    assert find_alias("CuDNNBatchNorm") == Alias("BN", fields={"scale_filler": "slope_filler"})
    code = (
        "import sys\nfrom caffepy.formats.alias import find_alias\nassert find_alias('CuDNNBatchNorm')\n"
        "print(*[name for name in sys.modules if name.startswith('caffepy.forks')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_a_class_may_replace_an_alias_of_caffepy() -> None:
    class Own:
        def forward(self, x: object) -> object:
            return x

    with pytest.raises(ConfigError, match="caffepy has the layer type 'CuDNNBatchNorm'"):
        caffepy.register_layer("CuDNNBatchNorm", Own)
    caffepy.register_layer("CuDNNBatchNorm", Own, replace=True)
    text = 'layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 2 } } }'
    net = read(text + 'layer { name: "a" type: "CuDNNBatchNorm" bottom: "x" top: "y" }')
    assert net.layer[1].type == "CuDNNBatchNorm"
    assert [type(layer).__name__ for layer in build_net(str(net)).layers] == ["InputLayer", "Own"]


def test_the_field_that_is_named_after_a_type() -> None:
    names = {
        "ReLU": "relu_param",
        "InnerProduct": "inner_product_param",
        "SoftmaxWithLoss": "",
        "CuDNNBatchNorm": "cudnn_batch_norm_param",
    }
    assert {name: settings_field(name) for name in names} == names


def command(folder: Path, kind: str, settings: str, *words: str, status: int = 0) -> str:
    """What `caffepy upgrade_net_proto_text` makes of a net of a fork, or says."""
    (folder / "fork.proto").write_text(SCHEMA)
    (folder / "net.prototxt").write_text(NET % (kind, 'bottom: "r"' if kind == "RoiGrid" else "", settings))
    line = [
        sys.executable,
        "-m",
        "caffepy",
        "upgrade_net_proto_text",
        "net.prototxt",
        "new.prototxt",
        "--proto",
        "fork.proto",
    ]
    done = subprocess.run([*line, *words], capture_output=True, text=True, cwd=folder, timeout=300, check=False)
    assert done.returncode == status, done.stderr
    return re.sub(r"\s+", " ", (folder / "new.prototxt").read_text()) if status == 0 else done.stderr


def test_settings_of_a_forks_message_are_taken_over_with_its_defaults(tmp_path: Path) -> None:
    words = ("--alias", "RoiGrid=ROIPooling")
    written = command(tmp_path, "RoiGrid", "roi_grid_param { pooled_w: 4 spatial_scale: 0.5 }", *words)
    assert 'type: "ROIPooling"' in written
    assert "roi_pooling_param { pooled_h: 3 pooled_w: 4 spatial_scale: 0.5 } }" in written
    written = command(
        tmp_path, "Same", "same_param { pool: MAX kernel_size: 2 }", "--alias", "Same=Pooling:pooling_param"
    )
    assert "pooling_param { pool: MAX kernel_size: 2 } }" in written
    written = command(tmp_path, "Same", "same_param { kernel_size: 2 }", "--alias", "Same=Pooling")
    assert "pooling_param { pool: AVE kernel_size: 2 } }" in written


@pytest.mark.parametrize(
    ("kind", "settings", "words", "error"),
    [
        (
            "RoiGrid",
            "roi_grid_param { samples: 1 }",
            "RoiGrid=ROIPooling",
            "layer 'y' (RoiGrid): ROIPoolingParameter has no samples",
        ),
        (
            "Same",
            "same_param { pool: WILD }",
            "Same=Pooling",
            "PoolingParameter has no pool, or not of this kind or value",
        ),
        (
            "Same",
            "same_param { stride: '2' }",
            "Same=Pooling",
            "PoolingParameter has no stride, or not of this kind or",
        ),
        (
            "RoiGrid",
            "roi_grid_param { pooled_h: 9999999999 }",
            "RoiGrid=ROIPooling",
            "ROIPoolingParameter has no pooled_h, or",
        ),
        (
            "Same",
            "same_param { kernel_size: 2 }",
            "Same=Deconvolution",
            "no field named after Deconvolution; name the field with",
        ),
        ("Same", "", "Same=Pooling:pooling", "alias: LayerParameter has no field 'pooling'"),
        ("Same", "", "Same", "alias: 'Same' is not NEW=OLD"),
    ],
)
def test_settings_without_a_counterpart_are_refused(
    tmp_path: Path, kind: str, settings: str, words: str, error: str
) -> None:
    assert error in command(tmp_path, kind, settings, "--alias", words, status=2)


def test_settings_without_a_counterpart_are_left_out_by_name(tmp_path: Path) -> None:
    words = ("--alias", "RoiGrid=ROIPooling", "--ignore-fields", "RoiGridParameter.samples")
    assert "samples" not in command(tmp_path, "RoiGrid", "roi_grid_param { samples: 1 pooled_w: 2 }", *words)

from __future__ import annotations

from pathlib import Path

import pytest

from caffepy.errors import ConfigError, SnapshotError
from caffepy.formats.binary import with_checksum
from caffepy.formats.caffemodel import read_weights
from caffepy.formats.load import read_net
from caffepy.formats.proto.caffe_pb2 import BlobProto, LayerParameter, NetParameter, V1LayerParameter
from caffepy.formats.upgrade_files import upgrade_net_binary, upgrade_net_text, upgrade_solver_text

V1 = """
name: "old"
layers { name: "ip" type: INNER_PRODUCT bottom: "x" top: "ip" blobs_lr: 1 blobs_lr: 2
  inner_product_param { num_output: 3 } }
"""
CURRENT = """name: "old"
layer {
  name: "ip"
  type: "InnerProduct"
  bottom: "x"
  top: "ip"
  param {
    lr_mult: 1
  }
  param {
    lr_mult: 2
  }
  inner_product_param {
    num_output: 3
  }
}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_nets_text():
    Path("old").write_text(V1)
    assert upgrade_net_text(Path("old"), Path("new"))
    assert Path("new").read_text().replace("1.0", "1").replace("2.0", "2") == CURRENT
    assert not upgrade_net_text(Path("new"), Path("new"))
    assert read_net("new") == read_net("old")


def test_a_solvers_text():
    Path("old").write_text('net: "n" solver_type: ADAM base_lr: 0.001')
    assert upgrade_solver_text(Path("old"), Path("new"))
    assert Path("new").read_text() == 'base_lr: 0.001\nnet: "n"\ntype: "Adam"\n'  # no snapshot_prefix, as it was
    assert not upgrade_solver_text(Path("new"), Path("newer"))
    assert Path("newer").read_text() == Path("new").read_text()


def test_a_caffemodel():
    layer = V1LayerParameter(name="ip", type=V1LayerParameter.INNER_PRODUCT, blobs_lr=[1])
    layer.blobs.append(BlobProto(num=1, channels=1, height=1, width=2, data=[1, 2]))
    Path("old").write_bytes(NetParameter(name="old", layers=[layer]).SerializeToString())
    assert upgrade_net_binary(Path("old"), Path("new"))
    found = NetParameter.FromString(Path("new").read_bytes())
    assert [(one.name, one.type) for one in found.layer] == [("ip", "InnerProduct")] and not found.layers
    assert read_weights("new") == read_weights("old")


def test_a_file_in_the_current_format_stays_as_it_is():
    """One of ours has a checksum of its bytes, which come in another order than protobuf's."""
    part = NetParameter(layer=[LayerParameter(name="ip", blobs=[BlobProto(data=[1.0])])]).SerializeToString()
    content = b"".join(with_checksum(NetParameter, 1, [part]))
    Path("old").write_bytes(content)
    assert not upgrade_net_binary(Path("old"), Path("new"))
    assert Path("new").read_bytes() == content
    assert read_weights("new").layer[0].name == "ip"


def test_files_that_are_none():
    Path("old").write_text("layers { typ: RELU }")
    with pytest.raises(ConfigError, match="old:1:.*unknown field 'typ'"):
        upgrade_net_text(Path("old"), Path("new"))
    with pytest.raises(ConfigError, match="absent: no such solver"):
        upgrade_solver_text(Path("absent"), Path("new"))
    with pytest.raises(SnapshotError, match="not a binary NetParameter"):
        upgrade_net_binary(Path("old"), Path("new"))
    assert not Path("new").exists()

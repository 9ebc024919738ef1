from __future__ import annotations

import os
from pathlib import Path

import pytest

from caffepy.errors import ConfigError
from caffepy.formats import load
from caffepy.formats.load import read_net, read_solver
from caffepy.formats.proto.caffe_pb2 import BlobProto, BlobShape, LayerParameter, NetParameter


def write(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_a_net_is_read_and_upgraded(tmp_path: Path) -> None:
    path = write(tmp_path / "n.prototxt", 'layers { name: "r" type: RELU }')
    assert read_net(path) == NetParameter(layer=[LayerParameter(name="r", type="ReLU")])


def test_errors_in_a_net_name_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "n.prototxt", "layer {\n  nam: 'x'\n}")
    with pytest.raises(
        ConfigError, match=rf"^{path}:2:3: unknown field 'nam' of LayerParameter; did you mean 'name'\?$"
    ):
        read_net(path)


@pytest.mark.parametrize(("reader", "kind"), [(read_net, "net"), (read_solver, "solver")])
def test_an_absent_prototxt(tmp_path: Path, reader: object, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"absent: no such {kind}; check the path .working directory: "):
        reader(tmp_path / "absent")  # type: ignore[operator]


def test_a_folder_is_not_a_net(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this is a folder; name a net in it"):
        read_net(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = write(tmp_path / "n", "")
    path.chmod(0)
    with pytest.raises(ConfigError, match="cannot read: Permission denied"):
        read_net(path)


def test_weights_are_not_a_prototxt(tmp_path: Path) -> None:
    blob = BlobProto(shape=BlobShape(dim=[2]), data=[0, 0])
    path = write(tmp_path / "w", NetParameter(layer=[LayerParameter(blobs=[blob])]).SerializeToString())
    with pytest.raises(ConfigError, match="this is a binary file, not a prototxt; give the text definition"):
        read_net(path)


@pytest.mark.parametrize(
    ("written", "expected"),
    [("", "solver"), ('snapshot_prefix: "p/q"', "p/q"), ('snapshot_prefix: "dir"', "dir/solver")],
)
def test_the_snapshot_prefix_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dir").mkdir()
    write(tmp_path / "solver.prototxt", written)
    assert read_solver("solver.prototxt").snapshot_prefix == expected


def test_a_prefix_that_is_not_given_is_beside_the_solver(tmp_path: Path) -> None:
    assert read_solver(write(tmp_path / "s.prototxt", "")).snapshot_prefix == str(tmp_path / "s")


def test_a_net_is_parsed_once_and_each_reader_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    inner = load.parse_text
    monkeypatch.setattr(load, "parse_text", lambda text, *rest: (parsed.append(text), inner(text, *rest))[1])
    path = tmp_path / "net.prototxt"
    path.write_text('name: "once" layer { name: "a" type: "Input" top: "x" }')
    first, second = load.read_net(path), load.read_net(path)
    assert first == second
    first.layer[0].name = "changed"
    assert load.read_net(path) == second
    assert len(parsed) == 1
    path.write_text('name: "twice"')
    assert load.read_net(path).name == "twice"

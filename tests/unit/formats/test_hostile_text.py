"""Prototxts from strangers: paths that are none, sizes, numbers that no computation stands; each is a ConfigError."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from caffepy.errors import ConfigError, SnapshotError
from caffepy.formats import load
from caffepy.formats.caffemodel import read_weights
from caffepy.formats.load import read_net, read_solver
from caffepy.formats.paths import PathResolver, is_folder
from caffepy.formats.proto.caffe_pb2 import NetParameter, SolverParameter
from caffepy.training.solver_check import check_solver

TRAIN = 'net: "n" max_iter: 10 base_lr: 0.1 '


def solver(folder: Path, text: str) -> SolverParameter:
    path = folder / "s.prototxt"
    path.write_text(TRAIN + text)
    return read_solver(path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("a\0b", "cannot read the net: the path has a NUL character"),
        ("x" * 5000, "cannot read the net: File name too long"),
        ("/dev/zero", "cannot read the net: it is a device, not a regular file"),
    ],
)
def test_paths_that_are_no_files(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_net(path)


def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "net.prototxt")
    with pytest.raises(ConfigError, match="it is a FIFO, not a regular file"):
        read_net(tmp_path / "net.prototxt")


def test_a_folder_that_has_been_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(
        ConfigError, match="no such net; check the path .working directory: a folder that has been removed"
    ):
        read_net("net.prototxt")


def test_a_prototxt_of_that_size_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MAX_TEXT_BYTES", 10)
    (tmp_path / "n").write_text("name: 'longer than that'")
    with pytest.raises(ConfigError, match="more than the 10 that are read; a net's prototxt is shorter"):
        read_net(tmp_path / "n")


@pytest.mark.parametrize("written", ["a\0b", "x" * 5000, "~nobody-of-that-name/x", "\udcff"])
def test_resolving_what_is_no_path_raises_nothing(tmp_path: Path, written: str) -> None:
    resolve = PathResolver(tmp_path / "s.prototxt")
    assert resolve(written) == Path(written)
    assert not is_folder(written)
    assert resolve.output(written) == Path(written)


def test_a_solver_whose_own_path_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff.prototxt")
    path.write_text(TRAIN)
    with pytest.raises(ConfigError, match="this path is not UTF-8; rename the file, or give snapshot_prefix"):
        read_solver(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('lr_policy: "fixed" momentum: nan', "momentum is nan; it must be a finite number"),
        ('lr_policy: "exp" gamma: inf', "gamma is inf; it must be a finite number"),
        ('lr_policy: "fixed" type: "Adam" momentum: 1', "momentum is 1; with Adam it must be at least 0 and below 1"),
        ('lr_policy: "fixed" type: "Adam" momentum2: 1', "momentum2 is 1; with Adam it must be at least 0 and below 1"),
        ('lr_policy: "fixed" iter_size: 2000000000', "iter_size is 2000000000; it must be at most 65536"),
        ('lr_policy: "fixed" momentum_power: -1', "momentum_power is -1; it must be at least 0"),
        ('lr_policy: "fixed" weight_decay_power: -1', "weight_decay_power is -1; it must be at least 0"),
        ('lr_policy: "fixed" snapshot_prefix: "a\\000b"', "snapshot_prefix has a NUL character"),
    ],
)
def test_numbers_that_no_solver_stands(tmp_path: Path, text: str, message: str) -> None:
    param = solver(tmp_path, text)
    with pytest.raises(ConfigError, match=f"s.prototxt: {message}"):
        check_solver(param, "s.prototxt")


def test_weights_that_are_blanks(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b" \n" * 20)
    with pytest.raises(SnapshotError, match=r"not a binary NetParameter: it is text \(''\)"):
        read_weights(tmp_path / "w")


def test_weights_whose_text_is_not_utf8(tmp_path: Path) -> None:
    layers = NetParameter(layers=[{"name": "naem"}]).SerializeToString()
    (tmp_path / "w").write_bytes(layers.replace(b"naem", b"na\xe8m"))
    with pytest.raises(SnapshotError, match="layers.name is not UTF-8"):
        read_weights(tmp_path / "w")


@pytest.mark.parametrize(
    "net",
    [
        NetParameter(layer=[{"name": "d", "type": "Data", "data_param": {"source": "path"}}]),
        NetParameter(layers=[{"name": "d", "type": "DATA", "transform_param": {"mean_file": "path"}}]),
        NetParameter(layers=[{"layer": {"name": "d", "type": "data", "meanfile": "path"}}]),
    ],
    ids=["layer", "V1", "V0"],
)
def test_weights_with_a_path_in_another_encoding(tmp_path: Path, net: NetParameter) -> None:
    (tmp_path / "w").write_bytes(net.SerializeToString().replace(b"path", b"\xd6\xd0\xce\xc4"))
    (layer,) = read_weights(tmp_path / "w").layer
    assert layer.data_param.source + layer.transform_param.mean_file == r"\xd6\xd0\xce\xc4"


LONG = "a" * 10_000_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f'name: "{LONG}" x: 1', "unknown field 'x'"),
        (f'layer {{ name: "{LONG}" top {{ }} }}', "found a block where 'top' takes a value"),
        ('layer { name: "x" top' + " " * 2_000_000 + "{ } }", "found a block where 'top' takes a value"),
        ('layer { type: "X" zzz_param { } "' + '\\"' * 2_000_000, "unknown field 'zzz_param' of LayerParameter"),
        ('layer { type: "X" zzz_param { } ' + "'\\" * 2_000_000, "unknown field 'zzz_param' of LayerParameter"),
        ('name: "a"\nlayer { name: "' + "\\" * 200_000 + '" }', "prototxt:2: 1000 consecutive backslashes"),
        ("layer { " + "type: 'X' name: 'x' " * 1000 + "}", "field 'type' of LayerParameter is given twice"),
        ("input_dim: 0x" + "9" * 1_000_000, "a number is outside the range of its field"),
        ("input_dim: " + "9" * 1_000_000, "a whole number is expected"),
        ("layer { " * 100_000, "unknown field 'layer' of LayerParameter"),
    ],
    ids=range(10),
)
def test_long_texts_are_refused_in_time_that_is_linear_in_them(tmp_path: Path, text: str, message: str) -> None:
    """Each took minutes at a hundredth of its length where a regular expression tried each place in it."""
    (tmp_path / "n.prototxt").write_text(text)
    start = time.thread_time()
    with pytest.raises(ConfigError, match=message):
        read_net(tmp_path / "n.prototxt")
    assert time.thread_time() - start < 30


@pytest.mark.parametrize("piece", ['\\"', "device_id: [", "device_id: 1 "])
def test_long_solvers_are_refused_in_linear_time(tmp_path: Path, piece: str) -> None:
    """The search for several `device_id` passes each character once."""
    (tmp_path / "s.prototxt").write_text(piece * 100_000 + " x: 1")
    start = time.thread_time()
    with pytest.raises(ConfigError, match="s.prototxt:1:"):
        read_solver(tmp_path / "s.prototxt")
    assert time.thread_time() - start < 10

from __future__ import annotations

import gzip
import os
from pathlib import Path

import h5py
import pytest

from caffepy.config import load
from caffepy.config.load import blob_shape, check_blob, read_net, read_solver, read_solver_state, read_weights
from caffepy.errors import ConfigError, SnapshotError
from caffepy.net.weights import same_shape
from caffepy.proto.caffe_pb2 import (
    FLOAT,
    FLOAT16,
    BlobProto,
    BlobShape,
    LayerParameter,
    NetParameter,
    SolverState,
    V1LayerParameter,
)

BLOB = BlobProto(shape=BlobShape(dim=[2, 2]), data=[1, 2, 3, 4])
WEIGHTS = NetParameter(name="n", layer=[LayerParameter(name="ip", type="InnerProduct", blobs=[BLOB])])
STATE = SolverState(iter=3, learned_net="x.caffemodel", history=[BLOB])


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


@pytest.mark.parametrize("reader", [read_weights, read_solver_state])
def test_an_absent_snapshot(tmp_path: Path, reader: object) -> None:
    with pytest.raises(SnapshotError, match="absent: no such file"):
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


def test_weights_are_read(tmp_path: Path) -> None:
    assert read_weights(write(tmp_path / "w", WEIGHTS.SerializeToString())) == WEIGHTS


def test_v1_weights_are_upgraded(tmp_path: Path) -> None:
    old = NetParameter(
        input=["data"], layers=[V1LayerParameter(name="ip", type=V1LayerParameter.INNER_PRODUCT, blobs=[BLOB])]
    )
    result = read_weights(write(tmp_path / "w", old.SerializeToString()))
    assert result == NetParameter(layer=WEIGHTS.layer)


def test_a_solver_state_is_read(tmp_path: Path) -> None:
    assert read_solver_state(write(tmp_path / "s", STATE.SerializeToString())) == STATE


def _hdf5(path: Path) -> bytes:
    with h5py.File(path, "w") as file:
        file["data"] = [1.0]
    return path.read_bytes()


@pytest.mark.parametrize("reader", [read_weights, read_solver_state])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is empty; an interrupted copy or a full disk"),
        (b'layer { name: "x" }', r"it is text \('layer \{ name: \"x\" \}'\); give the binary file"),
        (b"version https://git-lfs.github.com/spec/v1\noid 1", "it is a Git LFS pointer; .*git lfs pull"),
        (gzip.compress(b"net", mtime=0), "it is packed with gzip; unpack it first, with gunzip"),
        (b"PK\x03\x04 and so on", "it is a zip archive; unpack it first, with unzip"),
        (bytes(range(256)), "it is truncated or of another format; copy it again"),
        (BLOB.SerializeToString(), "it is a single blob, such as a mean image"),
    ],
)
def test_other_files_are_told_apart(tmp_path: Path, reader: object, data: bytes, message: str) -> None:
    with pytest.raises(SnapshotError, match=message):
        reader(write(tmp_path / "f", data))  # type: ignore[operator]


def test_hdf5_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="it is an HDF5 file; rename it so that it ends in .h5"):
        read_weights(write(tmp_path / "f", _hdf5(tmp_path / "h")))


def test_a_solver_state_given_as_weights(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="it is a .solverstate; resume from it with --snapshot"):
        read_weights(write(tmp_path / "s", STATE.SerializeToString()))


def test_weights_given_as_a_solver_state(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="not a .solverstate: it is a .caffemodel; load it with --weights"):
        read_solver_state(write(tmp_path / "w", WEIGHTS.SerializeToString()))


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_truncated_weights(tmp_path: Path, cut: int) -> None:
    with pytest.raises(SnapshotError, match="truncated or of another format"):
        read_weights(write(tmp_path / "w", WEIGHTS.SerializeToString()[:-cut]))


def test_files_above_the_limit_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MAX_BYTES", 10)
    with pytest.raises(
        SnapshotError,
        match=r"bytes, more than the 10 that are read; protobuf can read no more; store larger snapshots as HDF5",
    ):
        read_weights(write(tmp_path / "w", WEIGHTS.SerializeToString()))


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (BlobProto(shape=BlobShape(dim=[2, 3]), data=[1, 2]), r"holds 2 values where its shape \(2, 3\) needs 6"),
        (
            BlobProto(num=1, channels=1, height=2, width=2, data=[1]),
            r"holds 1 values where its shape \(1, 1, 2, 2\) needs 4",
        ),
        (BlobProto(data=[1, 2]), r"holds 2 values where its shape \(\) needs 1"),
        (BlobProto(shape=BlobShape(dim=[-1, 3])), r"has the impossible shape \(-1, 3\); the file is damaged"),
        (BlobProto(shape=BlobShape(dim=[3]), raw_data_type=FLOAT16, raw_data=b"1234"), "holds 2 values"),
    ],
)
def test_blobs_must_be_whole(tmp_path: Path, blob: BlobProto, message: str) -> None:
    weights = NetParameter(layer=[LayerParameter(name="ip", blobs=[BLOB, blob])])
    with pytest.raises(SnapshotError, match=f"layer 'ip' blob 1 {message}"):
        read_weights(write(tmp_path / "w", weights.SerializeToString()))
    with pytest.raises(SnapshotError, match=f"history 0 {message}"):
        read_solver_state(write(tmp_path / "s", SolverState(iter=1, history=[blob]).SerializeToString()))


@pytest.mark.parametrize(
    "blob",
    [
        BlobProto(shape=BlobShape(dim=[2, 2])),
        BlobProto(shape=BlobShape(), data=[1]),
        BlobProto(data=[1]),
        BlobProto(double_data=[1]),
        BlobProto(shape=BlobShape(dim=[2]), double_data=[1, 2]),
        BlobProto(shape=BlobShape(dim=[2]), raw_data_type=FLOAT, raw_data=b"12345678"),
    ],
)
def test_good_blobs_pass(blob: BlobProto) -> None:
    check_blob(blob, "here")


def test_old_blobs_have_four_axes() -> None:
    assert blob_shape(BlobProto(num=1, channels=2, height=3, width=4)) == (1, 2, 3, 4)
    assert blob_shape(BlobProto(num=1, data=[1])) == (1, 0, 0, 0)


def test_a_blob_without_any_shape_has_no_axes() -> None:
    assert blob_shape(BlobProto(data=[1])) == ()
    assert same_shape(BlobProto(data=[1]), ())
    assert not same_shape(BlobProto(data=[1]), (1,))
    assert same_shape(BlobProto(num=1, channels=1, height=1, width=1, data=[1]), ())


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

"""Reading .caffemodel and .solverstate: what is read, what is refused and what the message says."""

from __future__ import annotations

from pathlib import Path

import h5py
import pytest

from caffepy.errors import SnapshotError
from caffepy.formats.binary import blob_shape, check_blob, same_shape
from caffepy.formats.caffemodel import read_weights
from caffepy.formats.proto.caffe_pb2 import (
    FLOAT,
    FLOAT16,
    BlobProto,
    BlobShape,
    LayerParameter,
    NetParameter,
    SolverState,
    V1LayerParameter,
)
from caffepy.formats.solverstate import read_solverstate

BLOB = BlobProto(shape=BlobShape(dim=[2, 2]), data=[1, 2, 3, 4])
WEIGHTS = NetParameter(name="n", layer=[LayerParameter(name="ip", type="InnerProduct", blobs=[BLOB])])
STATE = SolverState(iter=3, learned_net="x.caffemodel", history=[BLOB])


def write(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize("reader", [read_weights, read_solverstate])
def test_an_absent_snapshot(tmp_path: Path, reader: object) -> None:
    with pytest.raises(SnapshotError, match="absent: no such file"):
        reader(tmp_path / "absent")  # type: ignore[operator]


def test_weights_are_read(tmp_path: Path) -> None:
    assert read_weights(write(tmp_path / "w", WEIGHTS.SerializeToString())) == WEIGHTS


def test_v1_weights_are_upgraded(tmp_path: Path) -> None:
    old = NetParameter(
        input=["data"], layers=[V1LayerParameter(name="ip", type=V1LayerParameter.INNER_PRODUCT, blobs=[BLOB])]
    )
    result = read_weights(write(tmp_path / "w", old.SerializeToString()))
    assert result == NetParameter(layer=WEIGHTS.layer)


def test_a_solver_state_is_read(tmp_path: Path) -> None:
    assert read_solverstate(write(tmp_path / "s", STATE.SerializeToString())).message == STATE


def _hdf5(path: Path) -> bytes:
    with h5py.File(path, "w") as file:
        file["data"] = [1.0]
    return path.read_bytes()


def test_what_is_no_such_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, state = WEIGHTS.SerializeToString(), STATE.SerializeToString()
    for reader, content, message in (
        (read_weights, _hdf5(tmp_path / "h"), "f: is not a .caffemodel.h5 but another file"),
        (read_weights, state, "it is a .solverstate; resume from it with --snapshot"),
        (read_solverstate, weights, "not a .solverstate: it is a .caffemodel; load it with --weights"),
        *((read_weights, weights[:-cut], "truncated or of another format") for cut in (1, 5, 12)),
    ):
        with pytest.raises(SnapshotError, match=message):
            reader(write(tmp_path / "f", content))
    monkeypatch.setattr("caffepy.formats.binary.MAX_BYTES", 10)
    message = "bytes, more than the 10 that are read; protobuf can read no more; store larger snapshots as HDF5"
    with pytest.raises(SnapshotError, match=message):
        read_weights(write(tmp_path / "w", weights))


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
        read_solverstate(write(tmp_path / "s", SolverState(iter=1, history=[blob]).SerializeToString()))


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


def test_old_blobs_have_four_axes_and_a_blob_without_any_shape_has_none() -> None:
    assert blob_shape(BlobProto(num=1, channels=2, height=3, width=4)) == (1, 2, 3, 4)
    assert blob_shape(BlobProto(num=1, data=[1])) == (1, 0, 0, 0)
    assert blob_shape(BlobProto(data=[1])) == ()
    assert same_shape(BlobProto(data=[1]), ())
    assert not same_shape(BlobProto(data=[1]), (1,))
    assert same_shape(BlobProto(num=1, channels=1, height=1, width=1, data=[1]), ())

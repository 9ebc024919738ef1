"""Snapshots of caffepy's that a script changed: read with a warning where they are named, and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from snapshot_runs import FORMATS, NET, train
from training import build_net, weights_of

from caffepy.cli.main import main
from caffepy.errors import SnapshotError
from caffepy.formats.caffemodel import read_caffemodel, read_weights
from caffepy.formats.proto.caffe_pb2 import NetParameter, SolverState
from caffepy.formats.snapshot_files import newest_snapshot
from caffepy.formats.solverstate import read_solverstate

CHANGED = "changed after caffepy wrote it: its checksum is [0-9a-f]{8}, but [0-9a-f]{8} was written"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def edit(path: Path, kind: type[Any], change: Callable[[Any], None]) -> None:
    """Change a binary file as scripts do, through protobuf."""
    message = kind.FromString(path.read_bytes())
    change(message)
    path.write_bytes(message.SerializeToString())


def without_our_fields(path: Path, kind: type[NetParameter | SolverState]) -> None:
    """Write a file again as Caffe's own caffe_pb2 does: fields that it does not know follow all others."""
    message = kind.FromString(path.read_bytes())
    ours = kind(blob_count=message.blob_count, crc32c=message.crc32c).SerializeToString()
    message.ClearField("blob_count")
    message.ClearField("crc32c")
    path.write_bytes(message.SerializeToString() + ours)


def rename(net: NetParameter) -> None:
    next(layer for layer in net.layer if layer.name == "conv").name = "first"


def test_a_renamed_layer_is_read(caplog: pytest.LogCaptureFixture) -> None:
    trained = train(2)
    path = Path("x_iter_2.caffemodel")
    edit(path, NetParameter, rename)
    net = build_net(NET.replace('name: "conv"', 'name: "first"'))
    net.copy_trained_layers_from(read_caffemodel(path), str(path))
    np.testing.assert_array_equal(weights_of(net)["first_0"], trained["conv_0"])
    assert len(caplog.records) == 1
    caplog.clear()
    without_our_fields(path, NetParameter)
    assert "first" in [layer.name for layer in read_weights(path).layer]
    assert "x_iter_2.caffemodel: changed after caffepy wrote it" in caplog.text


def test_a_layer_without_its_blobs_is_read(caplog: pytest.LogCaptureFixture) -> None:
    """As programs do that merge BatchNorm into the convolution before it."""

    def merge(net: NetParameter) -> None:
        del next(layer for layer in net.layer if layer.name == "norm").blobs[:]

    train(2)
    edit(Path("x_iter_2.caffemodel"), NetParameter, merge)
    assert not next(layer for layer in read_weights("x_iter_2.caffemodel").layer if layer.name == "norm").blobs
    assert ", and it holds 4 blobs of 7" in caplog.text


def test_training_resumes_from_a_state_with_another_iteration(caplog: pytest.LogCaptureFixture) -> None:
    trained = train(2)
    edit(Path("x_iter_2.solverstate"), SolverState, lambda state: setattr(state, "iter", 0))
    resumed = train(0, resume="x_iter_2.solverstate")
    for name, values in trained.items():
        np.testing.assert_array_equal(resumed[name], values)
    assert "x_iter_2.solverstate: changed after caffepy wrote it" in caplog.text


def test_a_changed_array_in_hdf5_is_read(caplog: pytest.LogCaptureFixture) -> None:
    train(2, "snapshot_format: HDF5")
    with h5py.File("x_iter_2.caffemodel.h5", "a") as file:
        file["data/conv/1"][...] = 7
        del file["data/norm"]
    layers = {layer.name: layer for layer in read_weights("x_iter_2.caffemodel.h5").layer}
    assert list(layers["conv"].blobs[1].data) == [7, 7]
    assert "norm" not in layers
    assert ", and it holds 4 blobs of 7" in caplog.text


def change_file(path: Path) -> None:
    if path.suffix == ".h5":
        with h5py.File(path, "a") as file:
            array = file["data/conv/1"] if "data" in file else file["history/0"]
            array[...] += 1
        return
    kind = SolverState if "solverstate" in path.name else NetParameter
    edit(path, kind, lambda message: None if kind is SolverState else rename(message))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", ["caffemodel", "solverstate"])
def test_a_search_passes_over_it_and_verify_names_it(
    form: str, kind: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    train(4, f"snapshot: 2 {form}")
    end = ".h5" if form else ""
    path, older = Path(f"x_iter_4.{kind}{end}"), Path(f"x_iter_2.solverstate{end}")
    os.utime(older, (0, 0))
    change_file(path)
    assert newest_snapshot("x") == older
    assert f"{path}: changed after caffepy wrote it" in caplog.text
    read = read_solverstate if kind == "solverstate" else read_caffemodel
    with pytest.raises(SnapshotError, match=CHANGED):
        read(path, strict=True)
    capsys.readouterr()
    assert main(["snapshot", "verify", str(older), str(path)]) == 2
    whole, changed = capsys.readouterr().out.splitlines()
    assert ": whole: " in whole and f"{path}: changed after caffepy wrote it: " in changed


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", ["caffemodel", "solverstate"])
def test_without_the_checksum_it_is_a_file_of_caffes(
    form: str, kind: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    train(2, form)
    path = Path(f"x_iter_2.{kind}{'.h5' if form else ''}")
    if form:
        with h5py.File(path, "a") as file:
            del file.attrs["caffepy_crc32c"]
    else:
        message = SolverState if kind == "solverstate" else NetParameter
        edit(path, message, lambda content: content.ClearField("crc32c"))
    caplog.clear()
    capsys.readouterr()
    assert main(["snapshot", "verify", str(path)]) == 0
    assert "7 blobs; no checksum (a file of Caffe's)" in capsys.readouterr().out
    assert newest_snapshot("x") == Path(f"x_iter_2.solverstate{'.h5' if form else ''}")
    assert "changed" not in caplog.text and "incomplete" not in caplog.text


@pytest.mark.parametrize("kind", ["caffemodel", "solverstate"])
def test_a_changed_file_that_was_cut_off_is_refused(kind: str) -> None:
    train(2)
    path = Path(f"x_iter_2.{kind}")
    change_file(path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(SnapshotError, match=f"{path.name}: .*truncated"):
        (read_solverstate if kind == "solverstate" else read_caffemodel)(path)

"""Damaged and hostile binary snapshots: each is a SnapshotError, and whatever was changed in one of ours is noticed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fuzz.mutate import damage_in_place
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot_runs import FORMATS, NET, SOLVER, train
from training import build_net, build_solver, weights_of

from caffepy.cli.main import main
from caffepy.errors import SnapshotError
from caffepy.formats.binary import from_blob_proto, to_blob_proto
from caffepy.formats.caffemodel import read_caffemodel, read_layer_shapes, read_weights
from caffepy.formats.proto.caffe_pb2 import BlobProto, NetParameter, SolverState
from caffepy.formats.snapshot_files import describe_snapshot
from caffepy.formats.solverstate import read_solverstate
from caffepy.net.trained_layers import first_difference


def read_state(path: Path) -> SolverState:
    """The message alone; arrays of such small nets are in it."""
    return read_solverstate(path).message


def caffes(path: Path) -> SolverState:
    """A .solverstate as Caffe would have written it."""
    state = SolverState.FromString(path.read_bytes())
    kept = SolverState(iter=state.iter, current_step=state.current_step, learned_net=state.learned_net)
    kept.history.extend(state.history)
    return kept


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The four kinds of files that a solver writes."""
    folder, before = tmp_path_factory.mktemp("written"), Path.cwd()
    os.chdir(folder)
    try:
        for form in FORMATS:
            train(2, form)
    finally:
        os.chdir(before)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


KINDS = [f"x_iter_2.{kind}{end}" for kind in ("caffemodel", "solverstate") for end in ("", ".h5")]


@pytest.mark.parametrize("name", KINDS)
def test_what_is_whole_says_so(written: dict[str, bytes], name: str) -> None:
    path = Path(name)
    path.write_bytes(written[name])
    # BatchNorm has three blobs; the convolution and the InnerProduct two each
    what = "iteration 2" if "state" in name else f"{3 if name.endswith('.h5') else 6} layers"
    assert describe_snapshot(path).startswith(f"whole: {what}, 7 blobs, checksum ")


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=60)
@given(data=st.data())
def test_a_changed_byte_is_an_error_or_changes_nothing(
    written: dict[str, bytes], name: str, data: st.DataObject
) -> None:
    """HDF5 has bytes that mean nothing; a .solverstate or .caffemodel has none."""
    content = bytearray(written[name])
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path, whole = Path(f"changed_{name}"), Path(name)
    path.write_bytes(content)
    whole.write_bytes(written[name])

    def read(path: Path) -> NetParameter | SolverState:
        """As automatic resume does: an array of HDF5 may have been changed by a program."""
        strict = name.endswith(".h5")
        return (read_solverstate if "solverstate" in name else read_caffemodel)(path, strict).message

    try:
        found = read(path)
    except SnapshotError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:
        assert name.endswith(".h5")
        wanted = read(whole)
        for message in (found, wanted):  # an attribute that is lost makes it a file of Caffe's
            message.ClearField("crc32c")
            message.ClearField("blob_count")
        assert found == wanted


@pytest.mark.parametrize("name", KINDS)
def test_a_zeroed_block_is_an_error_or_changes_nothing(written: dict[str, bytes], name: str) -> None:
    path, content = Path(name), written[name]
    read = read_state if "solverstate" in name else read_weights
    for start in range(0, len(content), 512):
        path.write_bytes(content[:start] + bytes(min(512, len(content) - start)) + content[start + 512 :])
        try:
            read(path)
        except SnapshotError as error:
            assert name in str(error)
        else:
            assert name.endswith(".h5")


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=40)
@given(data=st.data())
def test_a_cut_file_is_an_error(written: dict[str, bytes], name: str, data: st.DataObject) -> None:
    path = Path(name)
    path.write_bytes(written[name][: data.draw(st.integers(0, len(written[name]) - 1))])
    with pytest.raises(SnapshotError, match=name):
        (read_state if "solverstate" in name else read_weights)(path)


@pytest.mark.parametrize("name", KINDS[:2])
@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_the_shapes_of_a_damaged_file_are_some_or_an_error(written: dict[str, bytes], name: str, seed: int) -> None:
    path = Path(name)
    path.write_bytes(damage_in_place(written[name], random.Random(seed)))
    net = build_net(NET)
    try:
        difference = first_difference(net.layers, read_layer_shapes(path).layer)
    except SnapshotError as error:
        assert name in str(error)
    else:
        assert isinstance(difference, str)


def test_a_state_cut_between_two_blobs(written: dict[str, bytes]) -> None:
    """Each blob is a field of its own, so that what is left is a message; Caffe's has no more to tell it by."""
    name = "x_iter_2.solverstate"
    content = written[name]
    last = SolverState(history=SolverState.FromString(content).history[-1:]).SerializeToString()
    Path(name).write_bytes(content[: content.rindex(last)])
    with pytest.raises(SnapshotError, match=f"{name}: holds 6 of 7 blobs, .* it is truncated or damaged"):
        read_state(Path(name))
    Path(name).write_bytes(content[:-6])
    with pytest.raises(SnapshotError, match=f"{name}: holds 7 of 7 blobs, or its end is missing"):
        read_state(Path(name))


def test_weights_cut_between_two_layers(written: dict[str, bytes]) -> None:
    """Each layer is a field of its own; `blob_count` is what tells that the last ones are missing."""
    name = "x_iter_2.caffemodel"
    content = written[name]
    whole = NetParameter.FromString(content)
    assert whole.blob_count == sum(len(layer.blobs) for layer in whole.layer) == 7
    place = content.rindex(NetParameter(layer=whole.layer[-2:-1]).SerializeToString())
    end = NetParameter(crc32c=whole.crc32c).SerializeToString()
    assert content.endswith(end)
    Path(name).write_bytes(content[:place] + end)
    with pytest.raises(SnapshotError, match=f"{name}: holds 5 of 7 blobs, .* it is truncated or damaged"):
        read_weights(Path(name))


def test_a_changed_weight_is_noticed(written: dict[str, bytes]) -> None:
    content = bytearray(written["x_iter_2.caffemodel"])
    weights = NetParameter.FromString(bytes(content))
    content[content.index(np.array(weights.layer[1].blobs[0].data[:4], "<f4").tobytes())] ^= 1
    Path("w").write_bytes(content)
    with pytest.raises(SnapshotError, match="w: its checksum is .*, but .* was written: the file is damaged"):
        read_weights(Path("w"))


def test_fields_that_nobody_knows_beside_a_blobs_values() -> None:
    """A fixed32, a fixed64 and a group among the fields: the values are found all the same."""
    values = np.arange(2000, dtype=np.float32)
    for unknown in (b"\xa5\x06\x01\x02\x03\x04", b"\xa1\x06" + bytes(8), b"\xa3\x06\x08\x01\xa4\x06"):
        blob = BlobProto.FromString(unknown + to_blob_proto(values).SerializeToString())
        np.testing.assert_array_equal(from_blob_proto(blob, "here"), values)


def damage_history(state: SolverState) -> None:
    state.history[-1].ClearField("data")


def shorten_history(state: SolverState) -> None:
    del state.history[-1]


@pytest.mark.parametrize("damage", [damage_history, shorten_history])
def test_a_state_that_does_not_fit_changes_nothing(damage: Callable[[SolverState], None]) -> None:
    train(2)
    path = Path("x_iter_2.solverstate")
    state = caffes(path)
    damage(state)
    path.write_bytes(state.SerializeToString())
    with build_solver(SOLVER, NET) as solver:
        before = weights_of(solver.net)
        with pytest.raises(SnapshotError, match="history"):
            solver.restore(path)
        assert solver.iteration == 0
        for name, values in weights_of(solver.net).items():
            np.testing.assert_array_equal(values, before[name])


def test_weights_that_do_not_fit_change_nothing() -> None:
    net = build_net(NET)
    weights = net.to_proto()
    for layer in weights.layer:
        for blob in layer.blobs:
            blob.data[:] = [7.0] * len(blob.data)
    weights.layer[-2].blobs[-1].ClearField("data")
    before = weights_of(net)
    with pytest.raises(SnapshotError, match="here: layer 'group/ip', parameter 1: holds 0 values for shape 2"):
        net.copy_trained_layers_from(weights, "here")
    for name, values in weights_of(net).items():
        np.testing.assert_array_equal(values, before[name])


def test_verify_says_it_of_each_file(written: dict[str, bytes], capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in written.items():
        Path(name).write_bytes(content)
    assert main(["snapshot", "verify", *KINDS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == KINDS
    assert all(": whole: " in line and "7 blobs, checksum " in line for line in lines)
    Path("caffes.solverstate").write_bytes(caffes(Path(KINDS[2])).SerializeToString())
    Path(KINDS[0]).write_bytes(written[KINDS[0]][:-1])
    assert main(["snapshot", "verify", KINDS[0], "caffes.solverstate", "absent", KINDS[3]]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert "truncated" in lines[0]
    assert lines[1].endswith("readable: iteration 2, 7 blobs; no checksum (a file of Caffe's)")
    assert "absent: no such file" in lines[2]
    assert "x_iter_2.solverstate.h5: whole: iteration 2, 7 blobs" in lines[3]

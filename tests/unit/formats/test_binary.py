"""The binary format: what the files hold, what survives a full disk."""

from __future__ import annotations

import errno
import io
import os
import resource
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from snapshot_runs import FORMATS, NET, SOLVER, train
from training import build_solver

from caffepy.errors import ConfigError, RunError
from caffepy.formats.binary import blob_parts, check_integrity, extend_checksum, to_blob_proto
from caffepy.formats.caffemodel import check_caffemodel_size, write_caffemodel
from caffepy.formats.messages import Part
from caffepy.formats.proto.caffe_pb2 import NetParameter, SolverState
from caffepy.formats.snapshot_files import newest_snapshot
from caffepy.formats.solverstate import write_solverstate
from caffepy.utils import files


def test_the_files_are_caffes(folder: Path) -> None:
    with build_solver(SOLVER + "max_iter: 4", NET.replace('name: "tiny"', 'name: "its own"')) as solver:
        solver.step(4)
        assert solver.snapshot() == Path("x_iter_4.solverstate")
        state = SolverState.FromString((folder / "x_iter_4.solverstate").read_bytes())
        weights = NetParameter.FromString((folder / "x_iter_4.caffemodel").read_bytes())
        assert weights.name == "its own"
        assert state.learned_net == "x_iter_4.caffemodel"
        assert (state.iter, state.current_step, state.solver_type) == (4, 1, "SGD")
        assert [tuple(h.shape.dim) for h in state.history] == [p.blob.shape for p in solver.net.parameters.parameters]
        assert [layer.name for layer in weights.layer] == ["data", "conv", "norm", "drop", "group/ip", "loss"]
        conv = np.array(weights.layer[1].blobs[0].data, np.float32).reshape(2, 3, 3, 3)
        np.testing.assert_array_equal(conv, solver.net.layers[1].blobs[0].host_data())
        assert not weights.layer[1].blobs[0].diff


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many more bytes the disk takes; empty: any number."""
    room: list[int] = []

    class FullFile(io.FileIO):
        def write(self, content: Any) -> int:
            if room:
                room[0] -= len(content)
                if room[0] < 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(content)

    monkeypatch.setattr(files, "_create", lambda path: FullFile(path, "x"))
    return room


@pytest.mark.parametrize("room", [0, 600, 1100])
def test_a_full_disk_leaves_the_older_snapshot(folder: Path, full_disk: list[int], room: int) -> None:
    with build_solver(SOLVER, NET) as solver:
        solver.step(2)
        solver.snapshot()
        older = {path.name: path.read_bytes() for path in folder.iterdir()}
        full_disk.append(room)
        with pytest.raises(RunError, match="x_iter_2.*cannot be written: No space left on device"):
            solver.snapshot()
        with pytest.raises(RunError, match="x_iter_3.*cannot be written: No space left on device"):
            full_disk[0] = room
            solver.step(1)
            solver.snapshot()
    for name, content in older.items():
        assert (folder / name).read_bytes() == content
    assert not [path for path in folder.iterdir() if path.name.endswith(".tmp")]
    assert newest_snapshot("x") == Path("x_iter_2.solverstate")


@pytest.mark.parametrize("form", FORMATS)
def test_the_systems_own_limit_on_files(folder: Path, form: str) -> None:
    """A real failure of the system's write, which HDF5 meets inside its library."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with build_solver(SOLVER + form, NET) as solver:
        solver.step(1)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
            with pytest.raises(RunError, match="x_iter_1.caffemodel.*: cannot be written: .*File too large"):
                solver.snapshot()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert list(folder.iterdir()) == []
        solver.snapshot()
    assert newest_snapshot("x") is not None


def test_a_binary_snapshot_too_large_for_protobuf_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with build_solver(SOLVER, NET) as solver:
        monkeypatch.setattr("caffepy.formats.binary.MAX_BYTES", 700)
        with pytest.raises(RunError, match="larger than the 700 bytes .* set snapshot_format: HDF5"):
            solver.snapshot()


WIDE = NET.replace("num_output: 2 weight_filler", "num_output: 3000 weight_filler")
"""Its weights take 230 kB, and so does a history of one value for each."""


@pytest.mark.parametrize("write_diff", [False, True])
def test_the_size_of_the_weights_is_known_to_the_byte(monkeypatch: pytest.MonkeyPatch, write_diff: bool) -> None:
    with build_solver(SOLVER, WIDE) as solver:
        write_caffemodel(Path("x.caffemodel"), solver.net.name, solver.net.layers, write_diff)
        size = Path("x.caffemodel").stat().st_size
        monkeypatch.setattr("caffepy.formats.binary.MAX_BYTES", size)
        check_caffemodel_size(Path("w"), solver.net.name, solver.net.layers, write_diff)
        monkeypatch.setattr("caffepy.formats.binary.MAX_BYTES", size - 1)
        with pytest.raises(ConfigError, match=rf"^w: would be larger than the {size - 1} bytes .*HDF5"):
            check_caffemodel_size(Path("w"), solver.net.name, solver.net.layers, write_diff)


@pytest.mark.parametrize("settings", ["snapshot: 5", "snapshot: 0"], ids=["while training", "at the end"])
def test_a_state_that_would_be_too_large_is_found_before_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: str
) -> None:
    """Adam has two values of history for each parameter."""
    monkeypatch.setattr("caffepy.formats.binary.MAX_BYTES", 400_000)
    adam = f'type: "Adam" momentum2: 0.999 {settings} '
    with pytest.raises(ConfigError, match=r"x_iter_1\.solverstate: would be larger than .*snapshot_format: HDF5"):
        train(1, adam, net=WIDE)
    assert list(folder.iterdir()) == []
    train(1, adam + "snapshot_format: HDF5 ", net=WIDE)
    train(1, settings, net=WIDE)
    assert newest_snapshot("x") is not None


@pytest.mark.parametrize("write_diff", [False, True])
def test_files_hold_what_to_proto_says(write_diff: bool) -> None:
    """Weights are written without messages of protobuf; the messages that are read are those of `Net.to_proto`."""
    with build_solver(SOLVER, NET) as solver:
        solver.step(1)
        write_caffemodel(Path("x.caffemodel"), solver.net.name, solver.net.layers, write_diff)
        expected = solver.net.to_proto(write_diff)
    written = NetParameter.FromString(Path("x.caffemodel").read_bytes())
    for field in ("blob_count", "crc32c"):
        written.ClearField(field)
    assert written == expected
    assert any(blob.diff for layer in written.layer for blob in layer.blobs) == write_diff


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 1, 3)])
def test_the_parts_of_a_blob(shape: tuple[int, ...]) -> None:
    """Arrays of any axes and order in memory; those that are float32 in C order are not copied."""
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    parts: list[Part] = blob_parts(values, values + 1)
    message = to_blob_proto(values.astype(np.float64, order="F"), values + 1)
    assert b"".join(parts) == message.SerializeToString()
    assert tuple(message.shape.dim) == shape
    assert (list(message.data), list(message.diff)) == (values.ravel().tolist(), (values + 1).ravel().tolist())
    shared = [part for part in parts if isinstance(part, memoryview) and np.shares_memory(np.asarray(part), values)]
    assert len(shared) == (values.size > 0)


@contextmanager
def allocating_at_most(size: int) -> Iterator[None]:
    """At no moment of the block is there more new memory of Python's and NumPy's than `size` bytes."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size, f"{peak} bytes were allocated"


def test_large_arrays_are_written_and_checked_in_steps(folder: Path) -> None:
    """Neither the file's content nor an array is there twice."""
    history = np.ones(1 << 25, np.float32)
    with allocating_at_most(history.nbytes // 2):
        write_solverstate(folder / "x.solverstate", SolverState(iter=3, blob_count=1), [history])
    content = (folder / "x.solverstate").read_bytes()
    state = SolverState.FromString(content)
    assert (state.iter, len(state.history[0].data)) == (3, history.size)
    with allocating_at_most(history.nbytes // 2):
        check_integrity(state, content, "x.solverstate")
    assert extend_checksum(extend_checksum(0, content[:5]), memoryview(content)[5:]) == extend_checksum(0, content)

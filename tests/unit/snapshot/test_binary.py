"""The binary format: what the files hold, what survives a full disk."""

from __future__ import annotations

import errno
import io
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from snapshot_runs import FORMATS, NET, SOLVER
from training import build_solver

from caffepy import files
from caffepy.errors import RunError
from caffepy.proto.caffe_pb2 import NetParameter, SolverState
from caffepy.snapshot.files import newest_snapshot


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
    monkeypatch.setattr("caffepy.config.load.MAX_BYTES", 700)
    with (
        build_solver(SOLVER, NET) as solver,
        pytest.raises(RunError, match="larger than the 700 bytes .* set snapshot_format: HDF5"),
    ):
        solver.snapshot()

"""Blobs without axes and shared parameters in both of BVLC Caffe's formats: trained, resumed, written and read again.

The net has a PReLU with channel_shared, a Scale and a Bias of num_axes 0, and two InnerProducts that share their
weights and own their biases.
"""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from training import compare_weights, open_solver, relative_error

from caffepy.formats.binary import blob_shape, from_blob_proto, is_stored
from caffepy.formats.caffemodel import read_weights
from caffepy.formats.proto.caffe_pb2 import BlobProto, NetParameter, SolverState
from caffepy.formats.solverstate import find_learned_net, read_solverstate

FOLDER = Path(__file__).parent / "formats"
FORMATS = {"binary": "", "hdf5": ".h5"}
ITERATIONS, SAVED = 8, 4


def check_blobs(found: list[BlobProto], wanted: list[BlobProto], what: str) -> None:
    """The same messages but for rounding: shapes are present or absent alike."""
    assert len(found) == len(wanted), what
    for index, (ours, caffes) in enumerate(zip(found, wanted, strict=True)):
        assert ours.HasField("shape") == caffes.HasField("shape"), f"{what} {index}"
        assert is_stored(ours) == is_stored(caffes), f"{what} {index}"
        assert blob_shape(ours) == blob_shape(caffes), f"{what} {index}"
        if is_stored(caffes):
            error = relative_error(from_blob_proto(ours, what), from_blob_proto(caffes, what))
            assert error < 1e-5, f"{what} {index}"


def datasets(path: Path) -> dict[str, np.ndarray | None]:
    """Everything in an HDF5 file by its path; None for a group."""
    found: dict[str, np.ndarray | None] = {}
    with h5py.File(path) as file:
        file.visititems(lambda name, item: found.update({name: item[()] if isinstance(item, h5py.Dataset) else None}))
    return found


@pytest.mark.parametrize("form", FORMATS)
def test_every_iteration_is_caffes(form: str) -> None:
    golden = np.load(FOLDER / f"{form}.npz")
    with open_solver(FOLDER / f"{form}_solver.prototxt") as solver:
        solver.load_weights([FOLDER / "init.caffemodel"])
        while solver.iteration < ITERATIONS:
            solver.step(1)
            assert compare_weights(solver, golden, "it") == 9


@pytest.mark.parametrize("form", FORMATS)
def test_resuming_from_caffes_own_snapshot(form: str) -> None:
    golden = np.load(FOLDER / f"{form}.npz")
    with open_solver(FOLDER / f"{form}_solver.prototxt") as solver:
        solver.restore(FOLDER / f"{form}_iter_{SAVED}.solverstate{FORMATS[form]}")
        assert solver.iteration == SAVED
        while solver.iteration < ITERATIONS:
            solver.step(1)
            assert compare_weights(solver, golden, "res") == 9


@pytest.fixture(params=FORMATS)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """The format, and our own snapshot at the iteration of Caffe's."""
    form = request.param
    with open_solver(FOLDER / f"{form}_solver.prototxt", snapshot_prefix=str(tmp_path / form)) as solver:
        solver.load_weights([FOLDER / "init.caffemodel"])
        solver.step(SAVED)
        return form, solver.snapshot()


def test_the_snapshot_is_caffes(written: tuple[str, Path]) -> None:
    form, path = written
    caffes = FOLDER / f"{form}_iter_{SAVED}.solverstate{FORMATS[form]}"
    ours, wanted = read_solverstate(path).message, read_solverstate(caffes).message
    assert (ours.iter, ours.current_step) == (wanted.iter, wanted.current_step)
    check_blobs(list(ours.history), list(wanted.history), "history")
    weights = read_weights(find_learned_net(ours, path))
    caffes_weights = read_weights(find_learned_net(wanted, caffes))
    assert [layer.name for layer in weights.layer] == [layer.name for layer in caffes_weights.layer]
    for mine, theirs in zip(weights.layer, caffes_weights.layer, strict=True):
        check_blobs(list(mine.blobs), list(theirs.blobs), f"layer {mine.name} blob")


def test_binary_blobs_are_written_as_caffe_writes_them() -> None:
    """Caffe's own weights and history, loaded and written again, give the very blobs."""
    caffes = FOLDER / f"binary_iter_{SAVED}.caffemodel"
    wanted = NetParameter.FromString(caffes.read_bytes())
    with open_solver(FOLDER / "binary_solver.prototxt") as solver:
        solver.restore(FOLDER / f"binary_iter_{SAVED}.solverstate")
        saved = solver.net.to_proto()
        history = [
            solver.backend.to_host(solver.history[0][p.start : p.stop]) for p in solver.net.parameters.parameters
        ]
    assert [list(layer.blobs) for layer in saved.layer] == [list(layer.blobs) for layer in wanted.layer]
    state = SolverState.FromString((FOLDER / f"binary_iter_{SAVED}.solverstate").read_bytes())
    for blob, values in zip(state.history, history, strict=True):
        np.testing.assert_array_equal(from_blob_proto(blob, "history").reshape(-1), values)


@pytest.mark.parametrize("kind", ["caffemodel", "solverstate"])
def test_hdf5_is_laid_out_as_caffes(kind: str, tmp_path: Path) -> None:
    prefix = str(tmp_path / "hdf5")
    with open_solver(FOLDER / "hdf5_solver.prototxt", snapshot_prefix=prefix) as solver:
        solver.restore(FOLDER / f"hdf5_iter_{SAVED}.solverstate.h5")
        solver.snapshot()
    name = f"hdf5_iter_{SAVED}.{kind}.h5"
    ours, wanted = datasets(tmp_path / name), datasets(FOLDER / name)
    assert ours.keys() - {"caffepy"} == wanted.keys()
    for path, values in wanted.items():
        if values is None or path == "learned_net":
            continue
        found = ours[path]
        assert found is not None, path
        assert (found.shape, found.dtype) == (values.shape, values.dtype), path
        np.testing.assert_array_equal(found, values, err_msg=path)


def test_the_name_of_the_weights_is_stored_as_caffe_stores_it(tmp_path: Path) -> None:
    types = []
    with open_solver(FOLDER / "hdf5_solver.prototxt", snapshot_prefix=str(tmp_path / "hdf5")) as solver:
        solver.restore(FOLDER / f"hdf5_iter_{SAVED}.solverstate.h5")
        path = solver.snapshot()
    for at in (path, FOLDER / path.name):
        with h5py.File(at) as file:
            stored = file["learned_net"].id
            kind, name = stored.get_type(), file["learned_net"][()]
            assert kind.get_size() == len(name) + 1, "the terminating NUL is part of the string"
            types.append(
                (kind.get_strpad(), kind.get_cset(), stored.get_space().get_simple_extent_type(), stored.shape)
            )
    assert types[0] == types[1]
    assert types[0][0] == h5py.h5t.STR_NULLTERM

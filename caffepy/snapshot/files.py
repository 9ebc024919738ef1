"""Snapshot files: `<prefix>_iter_<N>.caffemodel` and `.solverstate`, written, read and found, in either format.

A solver writes the .caffemodel first, so that a complete .solverstate always names complete weights.
"""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from caffepy.config import load
from caffepy.errors import ConfigError, SnapshotError
from caffepy.files import atomic_write
from caffepy.proto.caffe_pb2 import NetParameter, SolverState
from caffepy.snapshot.binary import write_state_binary, write_weights_binary

if TYPE_CHECKING:
    from caffepy.net import Net

log = logging.getLogger(__name__)


def snapshot_names(prefix: str, iteration: int, hdf5: bool = False) -> tuple[str, str]:
    """The names of .caffemodel and .solverstate."""
    stem, ending = f"{prefix}_iter_{iteration}", ".h5" if hdf5 else ""
    return f"{stem}.caffemodel{ending}", f"{stem}.solverstate{ending}"


def check_snapshot_folder(path: Path) -> None:
    """Fail before training, not at its first snapshot, if the folder of `path` cannot be written.

    Raises:
        ConfigError: its folder is not there or may not be written.
    """
    folder = path.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        state = "may not be written" if folder.is_dir() else "does not exist"
        raise ConfigError(
            f"snapshot_prefix: the folder {folder} {state}; make it, or set snapshot_prefix to another one"
        )


# -- writing -------------------------------------------------------------------------------------------


def write_weights(path: Path, net: Net, write_diff: bool = False) -> None:
    """Write a net's parameters; HDF5 if the name ends in .h5, else the binary format.

    Raises:
        RunError: the file cannot be written.
    """
    if path.suffix == ".h5":
        from caffepy.snapshot.hdf5 import write_weights_hdf5

        with atomic_write(path) as temporary:
            write_weights_hdf5(temporary, net, write_diff)
        return
    write_weights_binary(path, net, write_diff)


def write_state(path: Path, state: SolverState, history: Iterable[np.ndarray]) -> None:
    """Write a solver's state and its history; HDF5 if the name ends in .h5, else the binary format.

    Raises:
        RunError: the file cannot be written.
    """
    if path.suffix == ".h5":
        from caffepy.snapshot.hdf5 import write_state_hdf5

        with atomic_write(path) as temporary:
            write_state_hdf5(temporary, state, history)
        return
    write_state_binary(path, state, history)


# -- reading -------------------------------------------------------------------------------------------


def read_weights(path: Path) -> NetParameter:
    """The layers in a .caffemodel of either format.

    Raises:
        SnapshotError: it is absent, damaged or something else.
    """
    if is_hdf5(path):
        from caffepy.snapshot.hdf5 import read_weights_hdf5

        return read_weights_hdf5(path)
    return load.read_weights(path)


def read_state(path: Path) -> SolverState:
    """The state in a .solverstate of either format.

    Raises:
        SnapshotError: it is absent, damaged or something else.
    """
    if is_hdf5(path):
        from caffepy.snapshot.hdf5 import read_state_hdf5

        return read_state_hdf5(path)
    return load.read_solver_state(path)


def is_hdf5(path: Path) -> bool:
    """Whether a file is there and begins as HDF5 files do."""
    try:
        with open(path, "rb") as file:
            return file.read(len(load.HDF5_MAGIC)) == load.HDF5_MAGIC
    except OSError:
        return False


def find_learned_net(state: SolverState, path: Path) -> Path:
    """The .caffemodel that a state names: as written, else beside the .solverstate.

    Raises:
        SnapshotError: it is in neither place.
    """
    written = Path(state.learned_net)
    beside = path.parent / written.name
    for candidate in (written, beside):
        if candidate.is_file():
            return candidate
    raise SnapshotError(
        f"{path}: its weights {written} are not there, nor {beside}; put the .caffemodel beside the .solverstate"
    )


def newest_snapshot(prefix: Path | str) -> Path | None:
    """The .solverstate written last that can be read, and its weights too; None if there is none.

    The last written, not the highest iteration: an older training with the same prefix may have gone further.
    Files of the same second (a copied folder) count by iteration.
    """
    for path in _snapshots(str(prefix)):
        try:
            read_weights(find_learned_net(read_state(path), path))
        except SnapshotError as error:
            log.warning("skipping an incomplete snapshot: %s", error)
            continue
        return path
    return None


def _snapshots(prefix: str) -> list[Path]:
    """All .solverstates with a prefix, the newest first."""
    candidates = []
    pattern = re.compile(re.escape(os.path.basename(prefix)) + r"_iter_(\d+)\.solverstate(\.h5)?")
    for name in glob.glob(glob.escape(prefix) + "_iter_*.solverstate*"):
        match = pattern.fullmatch(os.path.basename(name))
        if match:
            candidates.append((int(os.path.getmtime(name)), int(match[1]), name))
    return [Path(name) for _, _, name in sorted(candidates, reverse=True)]

"""Snapshot files, `<prefix>_iter_<N>.caffemodel` and `.solverstate`: written, read, found, removed; two formats.

A solver writes the .caffemodel first, so that a complete .solverstate always names complete weights.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from caffepy.config import load
from caffepy.config.checksum import stored_blobs
from caffepy.config.lazy_blobs import StoredState, TrainedLayers
from caffepy.errors import ConfigError, RunError, SnapshotError
from caffepy.files import atomic_write, check_writable, open_regular, remove_leftovers
from caffepy.proto.caffe_pb2 import NetParameter, SolverState
from caffepy.snapshot.binary import OLDER_FILES, write_state_binary, write_weights_binary

if TYPE_CHECKING:
    from caffepy.net import Net

log = logging.getLogger(__name__)

_STATE = re.compile(r"\.solverstate(\.h5)?$")


def snapshot_names(prefix: str, iteration: int, hdf5: bool = False) -> tuple[str, str]:
    """The names of .caffemodel and .solverstate."""
    stem, ending = f"{prefix}_iter_{iteration}", ".h5" if hdf5 else ""
    return f"{stem}.caffemodel{ending}", f"{stem}.solverstate{ending}"


def check_snapshot(path: Path, net: Net) -> None:
    """Fail before training, not at its first snapshot, if `net` cannot be written to `path`.

    Raises:
        ConfigError: its folder is not there, or no file can be made there.
        RunError: the file is HDF5, and two layers that have parameters have one name.
    """
    if not path.parent.is_dir():
        raise ConfigError(
            f"snapshot_prefix: the folder {path.parent} does not exist; make it, or set snapshot_prefix to another one"
        )
    try:
        check_writable(path)
    except RunError as error:
        raise ConfigError(f"snapshot_prefix: {error}; or set snapshot_prefix to another one") from error
    if path.suffix == ".h5":
        from caffepy.snapshot.hdf5 import layer_paths

        layer_paths(net)


# -- writing -------------------------------------------------------------------------------------------


def write_weights(path: Path, net: Net, write_diff: bool = False) -> None:
    """Write a net's parameters; HDF5 if the name ends in .h5, else the binary format.

    Raises:
        RunError: the file cannot be written.
    """
    if path.suffix == ".h5":
        from caffepy.snapshot.hdf5 import write_weights_hdf5

        with atomic_write(path, OLDER_FILES) as file:
            write_weights_hdf5(file, net, write_diff)
        return
    write_weights_binary(path, net, write_diff)


def write_state(path: Path, state: SolverState, history: Iterable[np.ndarray]) -> None:
    """Write a solver's state and its history; HDF5 if the name ends in .h5, else the binary format.

    Args:
        path: the file.
        state: `blob_count` is the number of arrays in the history.
        history: made one array at a time.

    Raises:
        RunError: the file cannot be written.
    """
    if path.suffix == ".h5":
        from caffepy.snapshot.hdf5 import write_state_hdf5

        with atomic_write(path, OLDER_FILES) as file:
            write_state_hdf5(file, state, history)
        return
    write_state_binary(path, state, history)


# -- reading -------------------------------------------------------------------------------------------


def read_weights(path: Path | str) -> NetParameter:
    """The net in a .caffemodel of either format, of either Caffe and any age, upgraded to the current schema.

    A binary file holds the whole net with the layers' settings, an HDF5 file names and parameters of its layers.
    Files that caffepy wrote have `crc32c` and `blob_count`. Formats: Caffe's `net.cpp`, ToProto and ToHDF5.

    Raises:
        SnapshotError: it is absent, damaged or something else.
    """
    path = Path(path)
    if not is_hdf5(path):
        return load.read_weights(path)
    from caffepy.snapshot.hdf5 import read_weights_hdf5

    with load.refusing_damage(str(path)):
        param = read_weights_hdf5(path)
        load.check_weights(param, str(path))
    return param


def read_trained_layers(path: Path) -> TrainedLayers:
    """As `read_weights`, for those who copy them into a net: the large arrays of binary files are not in messages.

    Raises:
        SnapshotError: it is absent, damaged or something else.
    """
    return TrainedLayers(read_weights(path)) if is_hdf5(path) else load.read_trained_layers(path)


def read_layer_shapes(path: Path) -> NetParameter:
    """The layers in a .caffemodel of either format with names and shapes of blobs alone; arrays are not read.

    Raises:
        SnapshotError: it is absent, damaged or something else.
    """
    if not is_hdf5(path):
        return load.read_layer_shapes(path)
    from caffepy.snapshot.hdf5 import read_layer_shapes_hdf5

    with load.refusing_damage(str(path)):
        return read_layer_shapes_hdf5(path)


def read_state(path: Path) -> SolverState:
    """The state in a .solverstate of either format, with `crc32c` and `blob_count` if it is one of ours.

    Raises:
        SnapshotError: it is absent, damaged or something else.
    """
    if not is_hdf5(path):
        return load.read_solver_state(path)
    from caffepy.snapshot.hdf5 import read_state_hdf5

    with load.refusing_damage(str(path)):
        state = read_state_hdf5(path)
        load.check_state(state, str(path))
    return state


def read_stored_state(path: Path) -> StoredState:
    """As `read_state`, for those who copy the history: the large arrays of binary files are not in messages.

    Raises:
        SnapshotError: it is absent, damaged or something else.
    """
    return StoredState(read_state(path)) if is_hdf5(path) else load.read_stored_state(path)


def is_hdf5(path: Path) -> bool:
    """Whether a regular file is there and begins as HDF5 files do."""
    try:
        with open_regular(path) as file:
            return file.read(len(load.HDF5_MAGIC)) == load.HDF5_MAGIC
    except OSError:
        return False


def describe_snapshot(path: Path) -> str:
    """What a .caffemodel or .solverstate holds and how far that was checked; all of it is read.

    Raises:
        SnapshotError: it is absent, damaged or something else.
    """
    is_state = _STATE.search(path.name)
    message = read_stored_state(path).state if is_state else read_trained_layers(path).param
    count = len(stored_blobs(message))
    what = f"iteration {message.iter}" if isinstance(message, SolverState) else f"{len(message.layer)} layers"
    blobs = f"{what}, {count} blob{'s' * (count != 1)}"
    if message.HasField("crc32c"):
        return f"whole: {blobs}, checksum {message.crc32c:08x}"
    return f"readable: {blobs}; it has no checksum, as either Caffe writes it"


# -- finding -------------------------------------------------------------------------------------------


def find_learned_net(state: SolverState, path: Path) -> Path:
    """The .caffemodel that a state names: as written, else beside the .solverstate.

    Raises:
        SnapshotError: it is in neither place.
    """
    written = Path(state.learned_net)
    beside = path.parent / written.name
    for candidate in (written, beside):
        with suppress(OSError):  # a name that is too long, a folder that may not be read
            if candidate.is_file():
                return candidate
    raise SnapshotError(
        f"{path}: its weights {written} are not there, nor {beside}; put the .caffemodel beside the .solverstate"
    )


def newest_snapshot(prefix: Path | str) -> Path | None:
    """The .solverstate written last that can be read, and its weights too; None if there is none."""
    for path in snapshots(prefix):
        try:
            read_trained_layers(find_learned_net(read_stored_state(path).state, path))
        except SnapshotError as error:
            log.warning("skipping an incomplete snapshot: %s", error)
            continue
        return path
    return None


def snapshots(prefix: Path | str) -> list[Path]:
    """All .solverstates with a prefix, the newest first; they are not read.

    The last written comes first, not the highest iteration: an older training with the same prefix may have gone
    further. Files of the same second (a copied folder) count by iteration.
    """
    return _find(prefix, "solverstate")


def stored_weights(prefix: Path | str) -> list[Path]:
    """All .caffemodels with a prefix, the newest first; they are not read."""
    return _find(prefix, "caffemodel")


def _find(prefix: Path | str, kind: str) -> list[Path]:
    """All files of one kind with a prefix, the newest first."""
    candidates = []
    pattern = _pattern(str(prefix), kind)
    for name in glob.glob(glob.escape(str(prefix)) + f"_iter_*.{kind}*"):
        match = pattern.fullmatch(os.path.basename(name))
        with suppress(OSError):  # removed meanwhile
            if match and stat.S_ISREG(os.stat(name).st_mode):
                candidates.append((int(os.path.getmtime(name)), int(match[1]), name))
    return [Path(name) for _, _, name in sorted(candidates, reverse=True)]


def iteration_of(path: Path) -> int:
    """The iteration of a file, by its name, which `snapshots` or `stored_weights` has found."""
    return int(path.name.rpartition("_iter_")[2].partition(".")[0])


def weights_beside(path: Path) -> Path:
    """The name of the .caffemodel that a solver writes with a .solverstate."""
    return path.with_name(_STATE.sub(r".caffemodel\1", path.name))


def restore_first(paths: Sequence[Path], restore: Callable[[Path], None]) -> Path:
    """Restore the first of some snapshots that can be; returns which.

    Args:
        paths: the newest first.
        restore: changes nothing where it raises a SnapshotError.

    Raises:
        SnapshotError: none can be restored; it says why not the first.
    """
    first: SnapshotError | None = None
    for path in paths:
        try:
            restore(path)
        except SnapshotError as error:
            first = first or error
            log.warning("skipping a snapshot that cannot be restored: %s", error)
            continue
        return path
    raise SnapshotError(f"{first}; nor can an older one with this prefix be restored: move them away to start anew")


def _pattern(prefix: str, kind: str) -> re.Pattern[str]:
    """The file names of a prefix's snapshots; group 1 is the iteration, the last one .h5 or nothing."""
    return re.compile(re.escape(os.path.basename(prefix)) + rf"_iter_(\d{{1,10}})\.(?:{kind})(\.h5)?", re.ASCII)


# -- removing ------------------------------------------------------------------------------------------


def remove_snapshot(path: Path) -> None:
    """Remove a .solverstate and the .caffemodel that was written with it, by its name; links are left alone.

    The state goes first, so that what is left of an interrupted removal is no snapshot.

    Raises:
        OSError: one of them cannot be removed.
    """
    pair = [path, weights_beside(path)]
    modes = [os.lstat(one).st_mode for one in pair if os.path.lexists(one)]
    if all(stat.S_ISREG(mode) for mode in modes):
        for one in pair:
            one.unlink(missing_ok=True)


def remove_unfinished(prefix: Path) -> None:
    """Remove what killed processes have left of snapshots with a prefix that they were writing."""
    pattern = _pattern(str(prefix), "caffemodel|solverstate")
    for path in remove_leftovers(prefix.parent, lambda name: pattern.fullmatch(name) is not None):
        log.info("removed %s, which a process that was killed has left", path)

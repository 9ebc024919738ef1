"""Snapshot files, `<prefix>_iter_<N>.caffemodel` and `.solverstate`: named, checked, found, removed.

A solver writes the .caffemodel first, so that a complete .solverstate always names complete weights.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from caffepy.errors import ConfigError, RunError, SnapshotError
from caffepy.files import check_writable, remove_leftovers
from caffepy.layers.core.base import Layer
from caffepy.proto.caffe_pb2 import SolverState
from caffepy.snapshot.binary import stored_blobs
from caffepy.snapshot.caffemodel import read_caffemodel
from caffepy.snapshot.solverstate import find_learned_net, read_solverstate

log = logging.getLogger(__name__)

_STATE = re.compile(r"\.solverstate(\.h5)?$")


def snapshot_names(prefix: str, iteration: int, hdf5: bool = False) -> tuple[str, str]:
    """The names of .caffemodel and .solverstate."""
    stem, ending = f"{prefix}_iter_{iteration}", ".h5" if hdf5 else ""
    return f"{stem}.caffemodel{ending}", f"{stem}.solverstate{ending}"


def check_snapshot(path: Path, layers: Sequence[Layer]) -> None:
    """Fail before training, not at its first snapshot, if a net of these layers cannot be written to `path`.

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

        layer_paths(layers)


def describe_snapshot(path: Path) -> str:
    """What a .caffemodel or .solverstate holds and how far that was checked; all of it is read.

    Raises:
        SnapshotError: it is absent, damaged or something else.
    """
    is_state = _STATE.search(path.name)
    message = read_solverstate(path).message if is_state else read_caffemodel(path).message
    count = sum(1 for _ in stored_blobs(message))
    what = f"iteration {message.iter}" if isinstance(message, SolverState) else f"{len(message.layer)} layers"
    blobs = f"{what}, {count} blob{'s' * (count != 1)}"
    if message.HasField("crc32c"):
        return f"whole: {blobs}, checksum {message.crc32c:08x}"
    return f"readable: {blobs}; it has no checksum, as either Caffe writes it"


# -- finding -------------------------------------------------------------------------------------------


def newest_snapshot(prefix: Path | str) -> Path | None:
    """The .solverstate written last that can be read, and its weights too; None if there is none."""
    for path in snapshots(prefix):
        try:
            read_caffemodel(find_learned_net(read_solverstate(path).message, path))
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

"""Snapshot files `<prefix>_iter_<N>.caffemodel` and `.solverstate`: names, checks, search and removal.

The solver writes the .caffemodel first, so a complete .solverstate always refers to complete weights.
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
from caffepy.formats.binary import iter_blobs
from caffepy.formats.blobs import StoredLayer
from caffepy.formats.caffemodel import read_caffemodel
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto.caffe_pb2 import SolverParameter, SolverState
from caffepy.formats.safetensors import SUFFIX
from caffepy.formats.solverstate import find_learned_net, read_solverstate
from caffepy.utils.files import check_writable, remove_leftovers

log = logging.getLogger(__name__)

_STATE_EXTENSION = re.compile(r"\.solverstate(\.h5)?$")


def snapshot_names(prefix: str, iteration: int, hdf5: bool = False) -> tuple[str, str]:
    """Return the names of .caffemodel and .solverstate."""
    stem, ending = f"{prefix}_iter_{iteration}", ".h5" if hdf5 else ""
    return f"{stem}.caffemodel{ending}", f"{stem}.solverstate{ending}"


def snapshot_paths(param: SolverParameter, resolve: PathResolver, iteration: int) -> tuple[Path, Path]:
    """Return the files of an iteration's snapshot: .caffemodel and .solverstate, or their HDF5 forms."""
    hdf5 = param.snapshot_format == SolverParameter.HDF5
    weights, solver_state = snapshot_names(param.snapshot_prefix, iteration, hdf5)
    return resolve.output(weights), resolve.output(solver_state)


def check_snapshot(path: Path, layers: Sequence[StoredLayer]) -> None:
    """Check before training that a net of these layers can be written to `path`.

    Raises:
        ConfigError: the folder does not exist or is not writable.
        RunError: the format is HDF5 and two layers with parameters have the same name.
    """
    if not path.parent.is_dir():
        raise ConfigError(
            f"snapshot_prefix: the folder {path.parent} does not exist; create it or change snapshot_prefix"
        )
    try:
        check_writable(path)
    except RunError as error:
        raise ConfigError(f"snapshot_prefix: {error}; or change snapshot_prefix") from error
    if path.suffix == ".h5":
        from caffepy.formats.hdf5_snapshot import layer_paths

        layer_paths(layers)


def describe_snapshot(path: Path) -> str:
    """Read a .caffemodel or .solverstate completely and describe its content and checks.

    Raises:
        SnapshotError: the file is absent, damaged, of another kind, or was changed after caffepy wrote it.
    """
    is_state = _STATE_EXTENSION.search(path.name)
    message = (read_solverstate if is_state else read_caffemodel)(path, strict=True).message
    count = sum(1 for _ in iter_blobs(message))
    content = f"iteration {message.iter}" if isinstance(message, SolverState) else f"{len(message.layer)} layers"
    blobs = f"{content}, {count} blob{'s' * (count != 1)}"
    if message.HasField("crc32c"):
        return f"whole: {blobs}, checksum {message.crc32c:08x}"
    reason = "the format has none" if path.suffix == SUFFIX else "a file of Caffe's"
    return f"readable: {blobs}; no checksum ({reason})"


# -- finding -------------------------------------------------------------------------------------------


def newest_snapshot(prefix: Path | str) -> Path | None:
    """Return the newest .solverstate that can be read together with its weights, or None.

    Files that were changed after caffepy wrote them are passed over.
    """
    for path in snapshots(prefix):
        try:
            read_caffemodel(find_learned_net(read_solverstate(path, strict=True).message, path), strict=True)
        except SnapshotError as error:
            log.warning("skipping an incomplete snapshot: %s", error)
            continue
        return path
    return None


def snapshots(prefix: Path | str) -> list[Path]:
    """Return all .solverstates with a prefix, newest first, without reading them.

    They are sorted by modification time, not by iteration: an older run with the same prefix may have run longer. Files
    of
    the same second (a copied folder) are sorted by iteration.
    """
    return _find(prefix, "solverstate")


def stored_weights(prefix: Path | str) -> list[Path]:
    """Return all .caffemodels with a prefix, newest first, without reading them."""
    return _find(prefix, "caffemodel")


def _find(prefix: Path | str, kind: str) -> list[Path]:
    """Return all files of one kind with a prefix, newest first."""
    candidates = []
    pattern = _pattern(str(prefix), kind)
    for name in glob.glob(glob.escape(str(prefix)) + f"_iter_*.{kind}*"):
        match = pattern.fullmatch(os.path.basename(name))
        with suppress(OSError):  # removed concurrently
            if match and stat.S_ISREG(os.stat(name).st_mode):
                candidates.append((int(os.path.getmtime(name)), int(match[1]), name))
    return [Path(name) for _, _, name in sorted(candidates, reverse=True)]


def iteration_of(path: Path) -> int:
    """Return the iteration in the name of a file that `snapshots` or `stored_weights` returned."""
    return int(path.name.rpartition("_iter_")[2].partition(".")[0])


def weights_beside(path: Path) -> Path:
    """Return the path of the .caffemodel that belongs to a .solverstate."""
    return path.with_name(_STATE_EXTENSION.sub(r".caffemodel\1", path.name))


def averaged_weights_beside(path: Path) -> Path:
    """Return the path of the averaged weights (`--ema`) that belong to a .solverstate."""
    return path.with_name(_STATE_EXTENSION.sub(r".ema.caffemodel\1", path.name))


def restore_first(paths: Sequence[Path], restore: Callable[[Path], None]) -> Path:
    """Restore the first snapshot that can be restored; return its path.

    Args:
        paths: snapshots, newest first.
        restore: restores a snapshot; must change nothing if it raises a SnapshotError.

    Raises:
        SnapshotError: none can be restored; the message has the first one's error.
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
    raise SnapshotError(
        f"{first}; older snapshots with this prefix cannot be restored either: move them away to start from scratch"
    )


def _pattern(prefix: str, kind: str) -> re.Pattern[str]:
    """Return the pattern of a prefix's file names; group 1 is the iteration, group 2 ".h5" or nothing."""
    return re.compile(re.escape(os.path.basename(prefix)) + rf"_iter_(\d{{1,10}})\.(?:{kind})(\.h5)?", re.ASCII)


# -- removing ------------------------------------------------------------------------------------------


def remove_snapshot(path: Path) -> None:
    """Remove a .solverstate, its .caffemodel and its averaged weights; symbolic links are kept.

    The state is removed first, so an interrupted removal leaves no incomplete snapshot.

    Raises:
        OSError: a file cannot be removed.
    """
    files = [path, weights_beside(path), averaged_weights_beside(path)]
    modes = [os.lstat(file).st_mode for file in files if os.path.lexists(file)]
    if all(stat.S_ISREG(mode) for mode in modes):
        for file in files:
            file.unlink(missing_ok=True)


def remove_unfinished(prefix: Path) -> None:
    """Remove temporary files of killed processes for snapshots with a prefix."""
    pattern = _pattern(str(prefix), r"(?:ema\.)?caffemodel|solverstate")
    for path in remove_leftovers(prefix.parent, lambda name: pattern.fullmatch(name) is not None):
        log.info("removed %s, a temporary file of a killed process", path)

""".solverstate files: a solver's state and the history of its update rule.

The binary format is a SolverState message; `hdf5_snapshot.py` has the HDF5 format. The state names the .caffemodel with
the weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from caffepy.errors import SnapshotError
from caffepy.formats.binary import (
    StoredMessage,
    blob_parts,
    check_blob,
    check_size,
    convert_errors,
    from_blob_proto,
    is_hdf5,
    read_message,
    with_checksum,
    write_parts,
)
from caffepy.formats.messages import Part, encode_delimited
from caffepy.formats.proto.caffe_pb2 import SolverState

_MAX_COUNTER = 2**62
_LARGEST_SEED = 2**63 - 1
"""Of a solver's random_seed, an int64."""
"""Exclusive limit of a state's counters; their sums fit in 64 bits."""
_HEADER_BYTES = 1 << 16
"""Size estimate of a state without its history, for the check before training."""


# -- reading -------------------------------------------------------------------------------------------


def read_solverstate(path: Path, strict: bool = False) -> StoredMessage[SolverState]:
    """Read a .solverstate of either format; `crc32c` and `blob_count` are set if caffepy wrote it.

    Large arrays of a binary file are not in the message.

    Args:
        path: the file.
        strict: refuse a file that was changed after caffepy wrote it, instead of logging a warning.

    Raises:
        SnapshotError: the file is absent, truncated, too large or not a .solverstate, or a blob's number of values does
            not match its shape.
    """
    with convert_errors(str(path)):
        if is_hdf5(path):
            from caffepy.formats.hdf5_snapshot import read_solverstate_hdf5

            stored = read_solverstate_hdf5(path)
        else:
            stored = read_message(path, SolverState)
        _check_state(stored.message, str(path))
    stored.check_unchanged(str(path), strict)
    return stored


def history_arrays(stored: StoredMessage[SolverState], path: Path) -> Iterator[np.ndarray]:
    """Yield the arrays of a history, float32; for a binary file they are views of its bytes.

    Raises:
        SnapshotError: the number of values does not match an array's shape.
    """
    for index, blob in enumerate(stored.message.history):
        yield from_blob_proto(blob, f"{path}: history blob {index}", stored.content)


def _check_state(state: SolverState, origin: str) -> None:
    """Check counters, loss scale and history blobs."""
    counts = {"iter": state.iter, "current_step": state.current_step, "pass_number": state.pass_number}
    counts |= {"data_position": max((position.position for position in state.data_position), default=0)}
    counts |= {"test_pass_number": max(state.test_pass_number, default=0)}
    for field, count in counts.items():
        if not 0 <= count < _MAX_COUNTER:
            raise SnapshotError(f"{origin}: {field} is {count}, which is out of range; the file is damaged")
    if state.seed > _LARGEST_SEED:
        raise SnapshotError(f"{origin}: seed is {state.seed}, which is out of range; the file is damaged")
    if not 0 <= state.loss_scale < math.inf:
        raise SnapshotError(f"{origin}: loss_scale is {state.loss_scale}; the file is damaged")
    for index, blob in enumerate(state.history):
        check_blob(blob, f"{origin}: history {index}")


def find_learned_net(state: SolverState, path: Path) -> Path:
    """Return the .caffemodel that a state names: at the stored path, else beside the .solverstate.

    Raises:
        SnapshotError: neither file exists.
    """
    written = Path(state.learned_net)
    beside = path.parent / written.name
    for candidate in (written, beside):
        with suppress(OSError):  # the name is too long, or a folder is not readable
            if candidate.is_file():
                return candidate
    raise SnapshotError(
        f"{path}: its weights {written} do not exist, nor does {beside}; put the .caffemodel beside the .solverstate"
    )


# -- writing -------------------------------------------------------------------------------------------


def write_solverstate(path: Path, state: SolverState, history: Iterable[np.ndarray]) -> None:
    """Write a solver's state and history: HDF5 if the path ends in .h5, else binary.

    Args:
        path: the file.
        state: the state; `blob_count` is the number of history arrays.
        history: the arrays, consumed one at a time.

    Raises:
        RunError: the file cannot be written.
    """
    if path.suffix == ".h5":
        from caffepy.formats.hdf5_snapshot import write_solverstate_hdf5

        write_solverstate_hdf5(path, state, history)
        return
    header = SolverState()
    header.CopyFrom(state)
    header.ClearField("blob_count")
    blobs = itertools.chain.from_iterable(map(_history_parts, history))
    parts = itertools.chain([header.SerializeToString()], blobs)
    write_parts(path, with_checksum(SolverState, state.blob_count, parts))


def check_solverstate_size(path: Path, shapes: Iterable[tuple[int, ...]]) -> None:
    """Check that a binary .solverstate with a history of these shapes does not exceed protobuf's limit.

    Raises:
        ConfigError: the file would be too large.
    """
    zeros = (np.zeros(shape, np.float32) for shape in shapes)  # never touched, so no memory is used
    check_size(path, _HEADER_BYTES + sum(len(part) for values in zeros for part in _history_parts(values)))


def _history_parts(values: np.ndarray) -> list[Part]:
    """Return the parts of a SolverState with one history array."""
    return encode_delimited(SolverState.HISTORY_FIELD_NUMBER, blob_parts(values))

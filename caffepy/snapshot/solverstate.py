""".solverstate: a solver's state with the history of its update rule, read and written.

The binary format is a SolverState message; the HDF5 form is in `hdf5.py`. The weights are in the .caffemodel that the
state names.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from caffepy.config.messages import Part, encode_delimited
from caffepy.errors import SnapshotError
from caffepy.proto.caffe_pb2 import SolverState
from caffepy.snapshot.binary import (
    Stored,
    blob_parts,
    check_blob,
    check_size,
    checksummed,
    from_blob_proto,
    is_hdf5,
    read_message,
    refusing_damage,
    write_parts,
)

_MAX_COUNTED = 2**62
"""Exclusive limit of a state's counts; sums of them fit in 64 bits."""
_HEAD_BYTES = 1 << 16
"""Room for all of a state but its history, most of which is not known before training."""


# -- reading -------------------------------------------------------------------------------------------


def read_solverstate(path: Path) -> Stored[SolverState]:
    """The state in a .solverstate of either format, with `crc32c` and `blob_count` if caffepy wrote it.

    The large arrays of a binary file are not in the message.

    Raises:
        SnapshotError: the file is absent, truncated, too large, or not a .solverstate; the message
            says what it looks like. Also when a blob does not hold as many values as its shape says.
    """
    with refusing_damage(str(path)):
        if is_hdf5(path):
            from caffepy.snapshot.hdf5 import read_solverstate_hdf5

            stored = Stored(read_solverstate_hdf5(path))
        else:
            stored = read_message(path, SolverState)
        _check_state(stored.message, str(path))
    return stored


def history_arrays(stored: Stored[SolverState], path: Path) -> Iterator[np.ndarray]:
    """The arrays of a history, float32; those of a binary file are views of its bytes.

    Raises:
        SnapshotError: an array has not as many values as its shape says.
    """
    for index, blob in enumerate(stored.message.history):
        yield from_blob_proto(blob, f"{path}: history blob {index}", stored.content)


def _check_state(state: SolverState, origin: str) -> None:
    """Check numbers and blobs.

    Raises:
        SnapshotError: one of them makes no sense.
    """
    counts = {"iter": state.iter, "current_step": state.current_step, "pass_number": state.pass_number}
    counts |= {"data_position": max((position.position for position in state.data_position), default=0)}
    counts |= {"test_pass_number": max(state.test_pass_number, default=0)}
    for field, count in counts.items():
        if not 0 <= count < _MAX_COUNTED:
            raise SnapshotError(f"{origin}: {field} is {count}, which no training comes to; the file is damaged")
    if not 0 <= state.loss_scale < math.inf:
        raise SnapshotError(f"{origin}: loss_scale is {state.loss_scale}; the file is damaged")
    for index, blob in enumerate(state.history):
        check_blob(blob, f"{origin}: history {index}")


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


# -- writing -------------------------------------------------------------------------------------------


def write_solverstate(path: Path, state: SolverState, history: Iterable[np.ndarray]) -> None:
    """Write a solver's state and its history; HDF5 if the name ends in .h5, else the binary format.

    Args:
        path: the file.
        state: `blob_count` is the number of arrays in the history.
        history: made one array at a time.

    Raises:
        RunError: the file cannot be written.
    """
    if path.suffix == ".h5":
        from caffepy.snapshot.hdf5 import write_solverstate_hdf5

        write_solverstate_hdf5(path, state, history)
        return
    head = SolverState()
    head.CopyFrom(state)
    head.ClearField("blob_count")
    blobs = itertools.chain.from_iterable(map(_history_parts, history))
    parts = itertools.chain([head.SerializeToString()], blobs)
    write_parts(path, checksummed(SolverState, state.blob_count, parts))


def check_solverstate_size(path: Path, shapes: Iterable[tuple[int, ...]]) -> None:
    """Refuse a history of these shapes if protobuf could not read its binary .solverstate.

    Raises:
        ConfigError: it would be too large.
    """
    zeros = (np.zeros(shape, np.float32) for shape in shapes)  # without memory, as they are not read
    check_size(path, _HEAD_BYTES + sum(len(part) for values in zeros for part in _history_parts(values)))


def _history_parts(values: np.ndarray) -> list[Part]:
    """A SolverState of one array of its history."""
    return encode_delimited(SolverState.HISTORY_FIELD_NUMBER, blob_parts(values))

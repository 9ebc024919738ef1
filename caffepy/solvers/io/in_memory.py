"""A solver's whole state in host memory: what a snapshot's two files hold, without files."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from caffepy.proto.caffe_pb2 import SolverState
from caffepy.solvers.io.state import adopt_state, save_state
from caffepy.solvers.train_state import TrainState


@dataclass(frozen=True)
class SavedSolver:
    """A solver's state.

    Args:
        message: everything but weights and history.
        arrays: the flat parameters, then the history, as the device has them.
    """

    message: SolverState
    arrays: list[np.ndarray]


def save_in_memory(state: TrainState) -> SavedSolver:
    """The state of a solver whose device is idle; every device must call it."""
    flat = (state.net.parameters.data, *state.history)
    return SavedSolver(save_state(state), [np.array(state.backend.to_host(array)) for array in flat])


def restore_from_memory(state: TrainState, saved: SavedSolver) -> None:
    """Take over the state of a solver of the same prototxt."""
    for array, values in zip((state.net.parameters.data, *state.history), saved.arrays, strict=True):
        state.backend.from_host(values, array)
    state.net.parameters.written()
    adopt_state(state, saved.message)
    state.net.parameters.refresh(state.net.parameters.copies)

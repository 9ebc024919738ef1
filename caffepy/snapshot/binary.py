"""The binary format of snapshots: serialised NetParameter and SolverState messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from caffepy.config import load
from caffepy.config.checksum import checksummed
from caffepy.config.messages import Part, delimited
from caffepy.errors import ConfigError, RunError
from caffepy.files import atomic_write
from caffepy.net.trained_layers import trained_layer_parts
from caffepy.net.weights import blob_parts
from caffepy.proto.caffe_pb2 import NetParameter, SolverState

if TYPE_CHECKING:
    from caffepy.net import Net

OLDER_FILES = "the files of older snapshots are as they were"
"""What a failed write leaves, for its message."""


_HEAD_BYTES = 1 << 16
"""Room for all of a state but its history, most of which is not known before training."""


def check_sizes_binary(weights: Path, state: Path, net: Net, histories: int, write_diff: bool) -> None:
    """Refuse a net whose snapshots protobuf could not read, before they are written.

    Args:
        weights: the name of the .caffemodel.
        state: the name of the .solverstate.
        net: the train net.
        histories: values of history that the solver keeps for each parameter.
        write_diff: the .caffemodel has gradients as well.

    Raises:
        ConfigError: one of the two would be too large.
    """
    ends = checksummed(NetParameter, _blob_count(net), [])
    size = sum(map(len, chain(ends, _weights_parts(net, write_diff, with_values=False))))
    zeros = (np.zeros(parameter.blob.shape, np.float32) for parameter in net.parameters.parameters)
    history = sum(len(part) for values in zeros for part in _history_parts(values)) * histories
    for path, total in ((weights, size), (state, history + _HEAD_BYTES)):
        if total > load.MAX_BYTES:
            raise ConfigError(_too_large(path))


def write_weights_binary(path: Path, net: Net, write_diff: bool) -> None:
    """Write a net's parameters; a shared parameter is stored with every layer that uses it."""
    _write_parts(path, checksummed(NetParameter, _blob_count(net), _weights_parts(net, write_diff)))


def _blob_count(net: Net) -> int:
    return sum(len(layer.blobs) for layer in net.layers)


def _weights_parts(net: Net, write_diff: bool, with_values: bool = True) -> Iterator[Part]:
    """A NetParameter of a net's name and layers."""
    head = NetParameter(name=net.name).SerializeToString()
    return chain([head], trained_layer_parts(net.layers, write_diff, with_values))


def write_state_binary(path: Path, state: SolverState, history: Iterable[np.ndarray]) -> None:
    """Write a solver's state with its history, of `state.blob_count` arrays."""
    head = SolverState()
    head.CopyFrom(state)
    head.ClearField("blob_count")
    blobs = chain.from_iterable(map(_history_parts, history))
    _write_parts(path, checksummed(SolverState, state.blob_count, chain([head.SerializeToString()], blobs)))


def _history_parts(values: np.ndarray) -> list[Part]:
    """A SolverState of one array of its history."""
    return delimited(SolverState.HISTORY_FIELD_NUMBER, blob_parts(values))


def _write_parts(path: Path, parts: Iterable[Part]) -> None:
    """Write one message in parts, which protobuf reads as if they were merged; holds one layer in memory at a time."""
    size = 0
    with atomic_write(path, OLDER_FILES) as file:
        for part in parts:
            size += len(part)
            if size > load.MAX_BYTES:
                raise RunError(_too_large(path))
            file.write(part)


def _too_large(path: Path) -> str:
    return (
        f"{path}: would be larger than the {load.MAX_BYTES} bytes that protobuf can read; set snapshot_format: HDF5 in "
        "the solver"
    )

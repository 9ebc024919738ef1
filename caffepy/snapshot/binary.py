"""The binary format of snapshots: serialised NetParameter and SolverState messages."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from caffepy.config import load
from caffepy.config.checksum import checksummed
from caffepy.config.messages import Part, delimited
from caffepy.errors import RunError
from caffepy.files import atomic_write
from caffepy.net.trained_layers import trained_layer_parts
from caffepy.net.weights import blob_parts
from caffepy.proto.caffe_pb2 import NetParameter, SolverState

if TYPE_CHECKING:
    from caffepy.net import Net

OLDER_FILES = "the files of older snapshots are as they were"
"""What a failed write leaves, for its message."""


def write_weights_binary(path: Path, net: Net, write_diff: bool) -> None:
    """Write a net's parameters; a shared parameter is stored with every layer that uses it."""
    head = NetParameter(name=net.name).SerializeToString()
    layers = trained_layer_parts(net.layers, write_diff)
    count = sum(len(layer.blobs) for layer in net.layers)
    _write_parts(path, checksummed(NetParameter, count, chain([head], layers)))


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
                raise RunError(
                    f"{path}: would be larger than the {load.MAX_BYTES} bytes that protobuf can read; "
                    "set snapshot_format: HDF5"
                )
            file.write(part)

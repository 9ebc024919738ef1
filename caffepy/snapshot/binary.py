"""The binary format of snapshots: serialised NetParameter and SolverState messages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from caffepy.config import load
from caffepy.errors import RunError
from caffepy.files import atomic_write
from caffepy.net.weights import to_blob_proto
from caffepy.proto.caffe_pb2 import NetParameter, SolverState

if TYPE_CHECKING:
    from caffepy.net import Net


def write_weights_binary(path: Path, net: Net, write_diff: bool) -> None:
    """Write a net's parameters; a shared parameter is stored with every layer that uses it."""
    head = NetParameter(name=net.name).SerializeToString()
    layers = (NetParameter(layer=[layer]).SerializeToString() for layer in net.layer_protos(write_diff))
    _write_chunks(path, head, layers)


def write_state_binary(path: Path, state: SolverState, history: Iterable[np.ndarray]) -> None:
    """Write a solver's state with its history."""
    blobs = (SolverState(history=[to_blob_proto(values)]).SerializeToString() for values in history)
    _write_chunks(path, state.SerializeToString(), blobs)


def _write_chunks(path: Path, head: bytes, chunks: Iterable[bytes]) -> None:
    """Write one message in parts, which protobuf reads as if they were merged; holds one part in memory at a time."""
    size = len(head)
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        file.write(head)
        for chunk in chunks:
            size += len(chunk)
            if size > load.MAX_BYTES:
                raise RunError(
                    f"{path}: would be larger than the {load.MAX_BYTES} bytes that protobuf can read; "
                    "set snapshot_format: HDF5"
                )
            file.write(chunk)

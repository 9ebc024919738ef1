"""Atomic writing of Datum databases, with the keys of Caffe's converters."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from caffepy.data.sources.record_write import open_writer
from caffepy.proto import caffe_pb2


def record_key(number: int, name: str = "") -> bytes:
    """Return a record's key as Caffe's converters write it: ``00000012``, or ``00000012_cat/1.jpg``."""
    return os.fsencode(f"{number:08d}_{name}" if name else f"{number:08d}")


def write_datums(
    path: Path, datums: Iterable[tuple[bytes, caffe_pb2.Datum]], force: bool = False, backend: str = "lmdb"
) -> int:
    """Write a database of keys and Datums atomically.

    Args:
        path: the database's folder.
        datums: pairs of key and Datum, in ascending key order.
        force: replace an existing database.
        backend: lmdb or leveldb.

    Returns:
        The number of records.

    Raises:
        DataError: `path` already exists.
        RunError: writing failed, for example because the disk is full; temporary files are removed.
    """
    with open_writer(path, backend, force) as writer:
        for key, datum in datums:
            writer.put(key, datum.SerializeToString())
    return writer.count

"""Writing LMDBs of Datums, as Caffe's converters do, but whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from caffepy.data.sources.record_write import open_writer
from caffepy.proto import caffe_pb2


def record_key(number: int, name: str = "") -> bytes:
    """The key of a record as Caffe's converters write it: ``00000012``, with a file's name ``00000012_cat/1.jpg``."""
    return os.fsencode(f"{number:08d}_{name}" if name else f"{number:08d}")


def write_datums(
    path: Path, datums: Iterable[tuple[bytes, caffe_pb2.Datum]], force: bool = False, backend: str = "lmdb"
) -> int:
    """Make a database of keys and Datums; it appears under its name only when it is complete.

    Args:
        path: the database's folder.
        datums: keys, each greater than the one before, and Datums.
        force: replace what is there.
        backend: lmdb or leveldb.

    Returns:
        The number of records.

    Raises:
        DataError: there is something at `path` already.
        RunError: it cannot be written, e.g. the disk is full; nothing is left behind.

    What processes have left that were killed while they wrote it is removed, at the latest when it is complete.
    """
    with open_writer(path, backend, force) as writer:
        for key, datum in datums:
            writer.put(key, datum.SerializeToString())
    return writer.count

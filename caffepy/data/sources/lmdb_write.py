"""Writing LMDBs of Datums, as Caffe's converters do, but whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.errors import DataError, RunError
from caffepy.files import locked_folder, remove_leftover_folders, temporary_beside
from caffepy.proto import caffe_pb2

if TYPE_CHECKING:
    import lmdb

_COMMIT_EVERY = 1000
"""Records a transaction, as in Caffe's converters."""
_FIRST_MAP = 1 << 24


def record_key(number: int, name: str = "") -> bytes:
    """The key of a record as Caffe's converters write it: ``00000012``, with a file's name ``00000012_cat/1.jpg``."""
    return (f"{number:08d}_{name}" if name else f"{number:08d}").encode()


def write_datums(path: Path, datums: Iterable[tuple[bytes, caffe_pb2.Datum]], force: bool = False) -> int:
    """Make an LMDB of keys and Datums; it appears under its name only when it is complete.

    Args:
        path: the LMDB's folder.
        datums: keys, each greater than the one before, and Datums.
        force: replace what is there.

    Returns:
        The number of records.

    Raises:
        DataError: there is something at `path` already.
        RunError: it cannot be written, e.g. the disk is full; nothing is left behind.

    What processes have left that were killed while they wrote it is removed, at the latest when it is complete.
    """
    import lmdb

    check_free(path, force)
    temporary = temporary_beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():  # else what a process has left that was killed may be the only one: this one may fail too
            remove_leftover_folders(path)
        with locked_folder(temporary):  # fails where somebody has laid a link
            with lmdb.open(str(temporary), map_size=_FIRST_MAP, lock=False) as environment:
                count = _write_all(environment, datums)
                environment.sync(True)
            _put_in_place(temporary, path)
        remove_leftover_folders(path)
    except (lmdb.Error, OSError) as error:
        raise RunError(f"cannot write LMDB '{path}': {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return count


def check_free(path: Path, force: bool) -> None:
    """Refuse to replace what is there without `force`.

    Raises:
        DataError: there is something, or it is not even a folder.
    """
    if os.path.lexists(path) and not force:
        raise DataError(f"'{path}' is there already; remove it, or give --force to replace it")
    if os.path.lexists(path) and not (path.is_dir() and _is_lmdb_or_empty(path)):
        raise DataError(f"'{path}' is not an LMDB and will not be replaced, --force or not; choose another place")


def _is_lmdb_or_empty(path: Path) -> bool:
    return {entry.name for entry in path.iterdir()} <= {"data.mdb", "lock.mdb"}


def _write_all(environment: lmdb.Environment, datums: Iterable[tuple[bytes, caffe_pb2.Datum]]) -> int:
    count = 0
    pending: list[tuple[bytes, bytes]] = []
    for key, datum in datums:
        pending.append((key, datum.SerializeToString()))
        count += 1
        if len(pending) == _COMMIT_EVERY:
            _commit(environment, pending)
            pending.clear()
    _commit(environment, pending)
    return count


def _commit(environment: lmdb.Environment, records: list[tuple[bytes, bytes]]) -> None:
    """Write records in one transaction; a map that is too small is doubled."""
    import lmdb

    while True:
        try:
            with environment.begin(write=True) as transaction:
                for key, value in records:
                    transaction.put(key, value, append=True)
            return
        except lmdb.MapFullError:
            environment.set_mapsize(2 * environment.info()["map_size"])


def _put_in_place(temporary: Path, path: Path) -> None:
    old = temporary_beside(path)
    if path.exists():
        path.rename(old)
    temporary.rename(path)
    shutil.rmtree(old, ignore_errors=True)

"""Atomic writing of LMDB and LevelDB databases."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from caffepy.errors import DataError, RunError
from caffepy.formats.proto import caffe_pb2
from caffepy.utils.files import locked_folder, remove_leftover_folders, temporary_beside
from caffepy.utils.installation import MissingExtraError

BACKENDS = ("lmdb", "leveldb")
_COMMIT_EVERY = 1000
"""Records per transaction, as in Caffe's converters."""
_COMMIT_BYTES = 1 << 20
"""Maximum bytes per transaction: records and LMDB's dirty pages stay in memory until the commit. Larger transactions
cost more in page faults than they save (benchmarks/convert_imageset.py)."""
_FIRST_MAP = 1 << 24
_MAX_KEY_BYTES = 511
"""LMDB's compiled-in limit."""
_MIN_FREE = 1 << 16
"""Free bytes below which a disk counts as full: LMDB reports a full disk as an I/O error."""
_LMDB_FILES = frozenset({"data.mdb", "lock.mdb"})
_LEVELDB_ENDINGS = (".ldb", ".sst", ".log")
_LEVELDB_NAMES = ("CURRENT", "LOCK", "LOG", "LOG.old")


class RecordWriter(ABC):
    """Writes records in key order, in transactions of up to 1000."""

    def __init__(self) -> None:
        self.count = 0
        """Number of records put."""
        self._pending: list[tuple[bytes, bytes | memoryview]] = []
        self._bytes = 0

    def put(self, key: bytes, record: bytes | memoryview) -> None:
        """Add a record. Keys must ascend.

        Raises:
            DataError: the key exceeds the database's limit.
        """
        self._pending.append((key, record))
        self._bytes += len(key) + len(record)
        self.count += 1
        if self.count % _COMMIT_EVERY == 0 or self._bytes >= _COMMIT_BYTES:
            self.commit()

    def commit(self) -> None:
        """Write the pending records."""
        self.write(self._pending)
        self._pending.clear()
        self._bytes = 0

    @abstractmethod
    def write(self, records: list[tuple[bytes, bytes | memoryview]]) -> None:
        """Write records in one transaction."""

    @abstractmethod
    def sync(self) -> None:
        """Flush committed records to the disk."""

    @abstractmethod
    def close(self) -> None:
        """Close the database."""


class LmdbWriter(RecordWriter):
    """Writes an LMDB. The map grows with the data."""

    def __init__(self, folder: Path) -> None:
        import lmdb

        super().__init__()
        # Other processes do not see the folder before it is complete: one sync at the end suffices.
        self._environment = lmdb.open(os.fspath(folder), map_size=_FIRST_MAP, lock=False, sync=False)

    def put(self, key: bytes, record: bytes | memoryview) -> None:
        if len(key) > _MAX_KEY_BYTES:
            raise DataError(
                f"the key '{os.fsdecode(key[:40])}...' has {len(key)} bytes; LMDB's limit is {_MAX_KEY_BYTES}; use "
                "shorter paths in the list, or --backend leveldb"
            )
        super().put(key, record)

    def write(self, records: list[tuple[bytes, bytes | memoryview]]) -> None:
        """Write records in one transaction; double the map size while it is too small."""
        import lmdb

        while True:
            try:
                with self._environment.begin(write=True) as transaction:
                    for key, value in records:
                        transaction.put(key, value, append=True)
                return
            except lmdb.MapFullError:
                self._environment.set_mapsize(2 * self._environment.info()["map_size"])

    def sync(self) -> None:
        self._environment.sync(True)

    def close(self) -> None:
        self._environment.close()


class LevelDbWriter(RecordWriter):
    """Writes a LevelDB with Caffe's block and buffer sizes (`db_leveldb.cpp`)."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        try:
            import plyvel
        except ImportError as error:
            raise MissingExtraError("plyvel", "leveldb", "to write a LevelDB") from error
        self._database: Any = plyvel.DB(
            os.fspath(folder), create_if_missing=True, block_size=1 << 16, write_buffer_size=1 << 28, max_open_files=100
        )

    def write(self, records: list[tuple[bytes, bytes | memoryview]]) -> None:
        with self._database.write_batch() as batch:
            for key, record in records:
                batch.put(key, record)

    def sync(self) -> None:
        self._database.write_batch(sync=True).write()  # also syncs the preceding log entries

    def close(self) -> None:
        self._database.close()


_WRITERS: dict[str, Callable[[Path], RecordWriter]] = {"lmdb": LmdbWriter, "leveldb": LevelDbWriter}


@contextmanager
def open_writer(path: Path, backend: str = "lmdb", force: bool = False) -> Iterator[RecordWriter]:
    """Yield a writer whose database appears at `path` when the block ends without an error.

    Args:
        path: the database's folder.
        backend: one of `BACKENDS`.
        force: replace an existing database.

    Raises:
        DataError: `path` already exists.
        MissingExtraError: the backend is leveldb and plyvel is not installed.
        RunError: writing failed, for example because the disk is full; temporary files are removed.

    Temporary folders of killed processes are removed too, at the latest when the database is complete.
    """
    check_overwrite(path, force)
    temporary = temporary_beside(path)
    try:
        with _translate_errors(path, backend):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():  # otherwise a leftover may be the only copy, and this run may fail too
                remove_leftover_folders(path, _is_database_or_empty)
            with locked_folder(temporary):  # fails if the path is a symbolic link
                writer = _WRITERS[backend](temporary)
                try:
                    yield writer
                    writer.commit()
                    writer.sync()
                finally:
                    writer.close()
                _replace(temporary, path)
            remove_leftover_folders(path, _is_database_or_empty)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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


@contextmanager
def _translate_errors(path: Path, backend: str) -> Iterator[None]:
    """Convert errors of the file system and the database library to RunError with the database's name."""
    errors = _library_errors(backend)
    try:
        yield
    except errors as error:
        message = " ".join(_message(error).split())
        if _is_full(path.parent):
            message += "; the disk is full: free space there"
        raise RunError(f"cannot write {'LMDB' if backend == 'lmdb' else 'LevelDB'} '{path}': {message}") from error


def _library_errors(backend: str) -> tuple[type[Exception], ...]:
    if backend == "lmdb":
        import lmdb

        return (OSError, lmdb.Error)
    try:
        import plyvel
    except ImportError:  # `LevelDbWriter` reports it
        return (OSError,)
    return (OSError, plyvel.Error)


def check_overwrite(path: Path, force: bool) -> None:
    """Check that a database may be created at `path`.

    Raises:
        DataError: `path` exists and `force` is false, `path` is not a database, or a parent is not a folder.
    """
    parent = next((folder for folder in path.parents if os.path.lexists(folder)), None)
    if parent is not None and not parent.is_dir():
        raise DataError(f"'{path}' cannot be created: '{parent}' is not a folder; choose another path")
    if os.path.lexists(path) and not force:
        raise DataError(f"'{path}' already exists; remove it, or give --overwrite to replace it")
    if os.path.lexists(path) and not (path.is_dir() and _is_database_or_empty(set(os.listdir(path)))):
        raise DataError(
            f"'{path}' is not an LMDB or LevelDB and is not replaced, even with --overwrite; choose another path"
        )


def _is_database_or_empty(names: set[str]) -> bool:
    return names <= _LMDB_FILES or ("CURRENT" in names and all(map(_is_leveldb_file, names)))


def _is_leveldb_file(name: str) -> bool:
    return name in _LEVELDB_NAMES or name.startswith("MANIFEST-") or name.endswith(_LEVELDB_ENDINGS)


def _replace(temporary: Path, path: Path) -> None:
    old = temporary_beside(path)
    if path.exists():
        path.rename(old)
    temporary.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _message(error: Exception) -> str:
    """Return an error's message; plyvel's messages are bytes."""
    message = error.args[0] if error.args else ""
    return message.decode(errors="backslashreplace") if isinstance(message, bytes) else str(error)


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _MIN_FREE
    except OSError:
        return False

"""Writing databases of records, LMDB or LevelDB, as Caffe's converters do, but whole or not at all."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caffepy.errors import DataError, MissingExtraError, RunError
from caffepy.files import locked_folder, remove_leftover_folders, temporary_beside

if TYPE_CHECKING:
    import lmdb

BACKENDS = ("lmdb", "leveldb")
_COMMIT_EVERY = 1000
"""Records a transaction, as in Caffe's converters."""
_COMMIT_BYTES = 1 << 20
"""A transaction ends early when it has so many bytes: records and LMDB's dirty pages stay in memory until then. Many
megabytes of these cost more in page faults than smaller transactions cost (benchmarks/convert_imageset.py)."""
_FIRST_MAP = 1 << 24
_MAX_KEY_BYTES = 511
"""LMDB is built with this limit."""
_MIN_FREE = 1 << 16
"""Bytes; LMDB says of a disk with less than it needs that input or output failed."""
_LMDB_FILES = frozenset({"data.mdb", "lock.mdb"})
_LEVELDB_ENDINGS = (".ldb", ".sst", ".log")
_LEVELDB_NAMES = ("CURRENT", "LOCK", "LOG", "LOG.old")


class RecordWriter(ABC):
    """Takes records in the order of their keys and commits them a thousand at a time."""

    def __init__(self) -> None:
        self.count = 0
        """Records so far."""
        self._pending: list[tuple[bytes, bytes | memoryview]] = []
        self._bytes = 0

    def put(self, key: bytes, record: bytes | memoryview) -> None:
        """Add a record; its key is greater than the one before.

        Raises:
            DataError: the key is longer than the database allows.
        """
        self._pending.append((key, record))
        self._bytes += len(key) + len(record)
        self.count += 1
        if self.count % _COMMIT_EVERY == 0 or self._bytes >= _COMMIT_BYTES:
            self.commit()

    def commit(self) -> None:
        """Write what was put since the last commit."""
        self.write(self._pending)
        self._pending.clear()
        self._bytes = 0

    @abstractmethod
    def write(self, records: list[tuple[bytes, bytes | memoryview]]) -> None:
        """Write records in one transaction."""

    @abstractmethod
    def sync(self) -> None:
        """Bring what was committed to the disk."""

    @abstractmethod
    def close(self) -> None:
        """Close the database."""


class LmdbWriter(RecordWriter):
    """Writes an LMDB into a folder; its map grows with the data."""

    def __init__(self, folder: Path) -> None:
        import lmdb

        super().__init__()
        # Nobody sees the folder before it is complete, so one sync at the end does.
        self._environment = lmdb.open(os.fspath(folder), map_size=_FIRST_MAP, lock=False, sync=False)

    def put(self, key: bytes, record: bytes | memoryview) -> None:
        if len(key) > _MAX_KEY_BYTES:
            raise DataError(
                f"the key '{os.fsdecode(key[:40])}...' has {len(key)} bytes, and LMDB takes {_MAX_KEY_BYTES}; use "
                "shorter paths in the list, or --backend leveldb"
            )
        super().put(key, record)

    def write(self, records: list[tuple[bytes, bytes | memoryview]]) -> None:
        """A map that is too small is doubled."""
        _commit(self._environment, records)

    def sync(self) -> None:
        self._environment.sync(True)

    def close(self) -> None:
        self._environment.close()


class LevelDbWriter(RecordWriter):
    """Writes a LevelDB into a folder, in blocks and with buffers of Caffe's sizes (`db_leveldb.cpp`)."""

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
        self._database.write_batch(sync=True).write()  # what precedes it in the log is synced with it

    def close(self) -> None:
        self._database.close()


_WRITERS: dict[str, Callable[[Path], RecordWriter]] = {"lmdb": LmdbWriter, "leveldb": LevelDbWriter}


@contextmanager
def open_writer(path: Path, backend: str = "lmdb", force: bool = False) -> Iterator[RecordWriter]:
    """A writer of the database at `path`, which appears there when the block has ended without an error.

    Args:
        path: the database's folder.
        backend: one of `BACKENDS`.
        force: replace what is there.

    Raises:
        DataError: there is something at `path` already.
        MissingExtraError: a LevelDB is wanted and plyvel is not installed.
        RunError: it cannot be written, e.g. the disk is full; nothing is left behind.

    What processes have left that were killed while they wrote it is removed, at the latest when it is complete.
    """
    check_free(path, force)
    temporary = temporary_beside(path)
    try:
        with _naming(path, backend):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():  # else what a process has left that was killed may be the only one: this one may fail too
                remove_leftover_folders(path, _is_database_or_empty)
            with locked_folder(temporary):  # fails where somebody has laid a link
                writer = _WRITERS[backend](temporary)
                try:
                    yield writer
                    writer.commit()
                    writer.sync()
                finally:
                    writer.close()
                _put_in_place(temporary, path)
            remove_leftover_folders(path, _is_database_or_empty)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _naming(path: Path, backend: str) -> Iterator[None]:
    """Errors of the file system and of the database's library as ours, with the database's name."""
    errors = _library_errors(backend)
    try:
        yield
    except errors as error:
        said = " ".join(_as_text(error).split())
        if _is_full(path.parent):
            said += "; the disk is full: free space there"
        raise RunError(f"cannot write {'LMDB' if backend == 'lmdb' else 'LevelDB'} '{path}': {said}") from error


def _library_errors(backend: str) -> tuple[type[Exception], ...]:
    if backend == "lmdb":
        import lmdb

        return (OSError, lmdb.Error)
    try:
        import plyvel
    except ImportError:  # which `LevelDbWriter` says
        return (OSError,)
    return (OSError, plyvel.Error)


def check_free(path: Path, force: bool) -> None:
    """Refuse to replace what is there without `force`, and a database in what is no folder.

    Raises:
        DataError: there is something, or it is not even a database, or a file is named as its folder.
    """
    above = next((folder for folder in path.parents if os.path.lexists(folder)), None)
    if above is not None and not above.is_dir():
        raise DataError(f"'{path}' cannot be made: '{above}' is not a folder; name another one")
    if os.path.lexists(path) and not force:
        raise DataError(f"'{path}' is there already; remove it, or give --force to replace it")
    if os.path.lexists(path) and not (path.is_dir() and _is_database_or_empty(set(os.listdir(path)))):
        raise DataError(
            f"'{path}' is not an LMDB or LevelDB and will not be replaced, --force or not; choose another place"
        )


def _is_database_or_empty(names: set[str]) -> bool:
    return names <= _LMDB_FILES or ("CURRENT" in names and all(map(_is_of_leveldb, names)))


def _is_of_leveldb(name: str) -> bool:
    return name in _LEVELDB_NAMES or name.startswith("MANIFEST-") or name.endswith(_LEVELDB_ENDINGS)


def _commit(environment: lmdb.Environment, records: list[tuple[bytes, bytes | memoryview]]) -> None:
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


def _as_text(error: Exception) -> str:
    """What an error says; LevelDB's says it in bytes."""
    said = error.args[0] if error.args else ""
    return said.decode(errors="backslashreplace") if isinstance(said, bytes) else str(error)


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _MIN_FREE
    except OSError:
        return False

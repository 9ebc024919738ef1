"""Databases of records, LMDB and LevelDB: the protocol of record sources, reading, and atomic writing.

Records are numbered; image lists (`image_list.py`) have the same protocol. All LMDB sources of a process share one
index per data file. LevelDB is read and written by plyvel.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from caffepy.data.sources.lmdb_index import LmdbIndex, open_index
from caffepy.errors import DataError, RunError
from caffepy.formats.proto import caffe_pb2
from caffepy.utils.files import locked_folder, remove_leftover_folders, temporary_beside, working_folder
from caffepy.utils.installation import MissingExtraError
from caffepy.utils.process_fork import free_after_fork

if TYPE_CHECKING:
    from caffepy.data.sources.lmdb_index import LmdbIndex


# -- the protocol --------------------------------------------------------------------------------------


def hash_of(*parts: bytes | memoryview) -> str:
    """Return a short hash of bytes, for fingerprints."""
    digest = hashlib.blake2b(digest_size=6)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


class RecordSource(Protocol):
    """Records numbered from 0. One thread at a time may read, unless `allows_concurrent_reads`.

    Sequential reading is cheap; random access costs at most one search.
    """

    description: str
    """Name of the source in messages: ``LMDB 'examples/mnist/mnist_train_lmdb'``."""

    @property
    def index(self) -> LmdbIndex | None:
        """Offsets of the records in one file; None if records must be read individually."""

    def __len__(self) -> int:
        """Return the number of records, at least 1."""

    def read(self, number: int) -> bytes | memoryview:
        """Return the bytes of record `number`, valid until `close`.

        Raises:
            DataError: the record cannot be read.
        """

    def allows_concurrent_reads(self, count: int) -> bool:
        """Return whether several threads may read the first `count` records; the index, if any, has located them."""

    def record_name(self, number: int) -> str:
        """Return the record's name for messages: ``record 12 (key '00000012')``."""

    def fingerprint(self) -> dict[str, str]:
        """Return values, by their name in messages, that differ between sources. Cheap; does not use paths.

        Raises:
            DataError: a record cannot be read.
        """

    def close(self) -> None:
        """Release resources. Idempotent."""


# -- LMDB ----------------------------------------------------------------------------------------------


class LmdbSource:
    """The records of an LMDB in key order; a `RecordSource`. Thread-safe.

    Args:
        path: folder or data file of the LMDB.

    Raises:
        DataError: the database is absent, truncated, empty or not an LMDB.
    """

    def __init__(self, path: Path) -> None:
        self.description = f"LMDB '{path}'"
        _check_folder(path)
        try:
            self.index: LmdbIndex = open_index(path / "data.mdb" if os.path.isdir(path) else path)
        except OSError as error:
            raise DataError(f"{self.description} cannot be opened: {error.strerror or error}") from error
        self._length = self.index.entries
        if self._length == 0:
            raise DataError(f"{self.description} holds no records")
        with self._prefix_errors():
            self.index.record(0)

    def __len__(self) -> int:
        return self._length

    def read(self, number: int) -> bytes:
        with self._prefix_errors():
            return self.index.record(number)

    def allows_concurrent_reads(self, count: int) -> bool:
        with self._prefix_errors():
            self.index.check()
        return self.index.find(count)

    def record_name(self, number: int) -> str:
        """Return the record's name for messages. Thread-safe."""
        try:
            return f"record {number} (key '{_text(self.index.key(number))}')"
        except DataError:
            return f"record {number}"

    def fingerprint(self) -> dict[str, str]:
        with self._prefix_errors():
            first = self.index.key(0), self.index.record(0)
            result = {"the number of records": str(self._length)}
            for which, (key, record) in (("first", first), ("last", self.index.last())):
                result[f"the {which} key"] = f"'{_text(key)}'"
                result[f"the hash of the {which} record"] = hash_of(record)
        return result

    def close(self) -> None:
        """Do nothing: the index closes the file when it has no more users."""

    @contextmanager
    def _prefix_errors(self) -> Iterator[None]:
        """Prefix errors of the index with the LMDB's name."""
        try:
            yield
        except DataError as error:
            raise DataError(f"{self.description} {error}") from error


def _text(key: bytes) -> str:
    return key.decode(errors="backslashreplace")


def _check_folder(path: Path) -> None:
    if not os.path.lexists(path):
        raise DataError(
            f"LMDB '{path}' does not exist (looked from {working_folder()}); `caffepy data mnist` and "
            "`caffepy convert_imageset` create LMDBs"
        )
    if os.path.isdir(path) and not os.path.lexists(path / "data.mdb"):
        if os.path.exists(path / "CURRENT"):
            raise DataError(
                f"'{path}' is a LevelDB, not an LMDB; set backend: LEVELDB, or create an LMDB with `caffepy "
                "convert_imageset`"
            )
        raise DataError(f"'{path}' is not an LMDB: it has no data.mdb")


# -- LevelDB -------------------------------------------------------------------------------------------

_COPIED_FILES = ("CURRENT", "MANIFEST-", "LOG")
"""Files that LevelDB rewrites, which must be copied. Tables (.ldb, .sst) are immutable and can be linked."""


def is_leveldb(path: Path) -> bool:
    """Return whether a folder holds a LevelDB."""
    return os.path.exists(path / "CURRENT")


class LevelDbSource:
    """The records of a LevelDB in key order; a `RecordSource`. Thread-safe.

    LevelDB allows one process at a time to open a folder, and writes to it. Therefore the source opens a temporary
    folder with links to the tables and copies of the small files: several processes can read one database, which stays
    unchanged.

    Args:
        path: the LevelDB's folder.

    Raises:
        DataError: the database is absent, damaged, empty or not a LevelDB.
        MissingExtraError: plyvel is not installed.
    """

    index = None

    def __init__(self, path: Path) -> None:
        self.description = f"LevelDB '{path}'"
        self._lock = free_after_fork(Lock())
        self._folder: Path | None = None
        self._process = os.getpid()
        if not is_leveldb(path):
            raise DataError(f"'{path}' is neither a LevelDB nor an LMDB: it has no CURRENT and no data.mdb")
        self._plyvel = _plyvel()
        try:
            self._folder = _private_view(path)
            self._db: Any = self._plyvel.DB(os.fspath(self._folder), create_if_missing=False)
            self._keys: list[bytes] = list(self._db.iterator(include_value=False))
        except (OSError, self._plyvel.Error) as error:
            self.close()
            raise DataError(f"{self.description} cannot be opened: {_strerror(error)}") from error
        if not self._keys:
            self.close()
            raise DataError(f"{self.description} holds no records")

    def __len__(self) -> int:
        return len(self._keys)

    def read(self, number: int) -> bytes:
        try:
            record: bytes | None = self._db.get(self._keys[number])
        except (OSError, RuntimeError, self._plyvel.Error) as error:
            raise DataError(f"cannot be read: {_strerror(error)}") from error
        if record is None:
            raise DataError("is missing; the database is damaged")
        return record

    def allows_concurrent_reads(self, count: int) -> bool:
        return True

    def record_name(self, number: int) -> str:
        return f"record {number} (key '{_text(self._keys[number])}')"

    def fingerprint(self) -> dict[str, str]:
        result = {"the number of records": str(len(self))}
        for which, number in (("first", 0), ("last", len(self) - 1)):
            result[f"the {which} key"] = f"'{_text(self._keys[number])}'"
            try:
                result[f"the hash of the {which} record"] = hash_of(self.read(number))
            except DataError as error:
                raise DataError(f"{self.description}: {self.record_name(number)} {error}") from error
        return result

    def close(self) -> None:
        with self._lock:
            database, self._db = getattr(self, "_db", None), None
            folder, self._folder = self._folder, None
        if database is not None:
            database.close()
        if folder is not None and os.getpid() == self._process:  # a forked child must not remove it
            shutil.rmtree(folder, ignore_errors=True)


def _plyvel() -> Any:
    try:
        import plyvel
    except ImportError as error:
        raise MissingExtraError("plyvel", "leveldb", "to read a LevelDB") from error
    return plyvel


def _private_view(path: Path) -> Path:
    """Return a temporary folder that LevelDB may open and write to instead of `path`."""
    folder = Path(tempfile.mkdtemp(prefix="caffepy-leveldb-"))
    try:
        for file in path.iterdir():
            if file.suffix in (".ldb", ".sst"):
                (folder / file.name).symlink_to(file.resolve())
            elif file.suffix == ".log" or file.name.startswith(_COPIED_FILES):
                shutil.copyfile(file, folder / file.name)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _strerror(error: Exception) -> str:
    return getattr(error, "strerror", None) or _message(error)


# -- writing -------------------------------------------------------------------------------------------

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
        message = _message(error)
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
    """Return an error's message on one line; plyvel's messages are bytes."""
    message = error.args[0] if error.args else ""
    text = message.decode(errors="backslashreplace") if isinstance(message, bytes) else str(error)
    return " ".join(text.split())


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _MIN_FREE
    except OSError:
        return False

"""LMDB record sources: one shared environment a path and process, one cursor a reader.

Owns the translation of LMDB's errors into sentences.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import os
import threading
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caffepy.data.sources.lmdb_file import check_file
from caffepy.data.sources.source import hash_of
from caffepy.errors import DataError

if TYPE_CHECKING:
    import lmdb

    from caffepy.data.sources.lmdb_index import LmdbIndex

logger = logging.getLogger(__name__)

_STEP_LIMIT = 64
"""Records that are stepped over rather than searched for."""
_MARK_EVERY = 1024
"""Distance of the marks by which records without numbered keys are found."""


@dataclass
class _Opened:
    """An open environment, how many use it, and its index once that was asked for."""

    environment: lmdb.Environment
    users: int = 0
    looked: bool = False
    index: LmdbIndex | None = None


def _data_file(path: Path) -> Path:
    return path / "data.mdb" if path.is_dir() else path


class _Environments:
    """The process's open environments: py-lmdb allows one a path, and several solver threads read the same."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, _Opened] = {}

    def acquire(self, path: Path) -> lmdb.Environment:
        import lmdb

        key = os.path.realpath(path)
        with self._lock:
            if key not in self._open:
                check_file(_data_file(path))
                # lock=False as Caffe's MDB_NOLOCK: read-only media and network drives have no place for a lock file.
                environment = lmdb.open(key, subdir=path.is_dir(), readonly=True, lock=False, max_readers=1024)
                self._open[key] = _Opened(environment)
            self._open[key].users += 1
            return self._open[key].environment

    def index(self, path: Path, entries: int) -> LmdbIndex | None:
        """The index that all readers of an open environment share."""
        from caffepy.data.sources.lmdb_index import open_index

        with self._lock:
            opened = self._open[os.path.realpath(path)]
            if not opened.looked:
                opened.looked = True
                opened.index = open_index(_data_file(path), entries)
            return opened.index

    def release(self, path: Path) -> None:
        key = os.path.realpath(path)
        with self._lock:
            opened = self._open[key]
            opened.users -= 1
            if opened.users == 0:
                del self._open[key]
                opened.environment.close()


_environments = _Environments()


class LmdbSource:
    """The records of an LMDB in the order of their keys; a `RecordSource`.

    Args:
        path: the LMDB's folder, or its data file.

    Raises:
        DataError: absent, truncated, not LMDB, or empty.
    """

    def __init__(self, path: Path) -> None:
        import lmdb

        self.description = f"LMDB '{path}'"
        self._path = path
        self._marks: list[bytes] = []
        self._closed = False
        self._failure = lmdb.Error
        _check_folder(path)
        try:
            self._environment = _environments.acquire(path)
        except (lmdb.Error, OSError) as error:
            raise DataError(f"{self.description} cannot be opened: {error}") from error
        try:
            self._file = _data_file(path).open("rb")
            self._size = os.fstat(self._file.fileno()).st_size
            self._length = int(self._environment.stat()["entries"])
            if self._length == 0:
                raise DataError(f"{self.description} holds no records")
            self._open_cursor()
        except lmdb.Error as error:
            self.close()
            raise DataError(f"{self.description} is damaged: {error}; build it again") from error
        except BaseException:
            self.close()
            raise

    def _open_cursor(self) -> None:
        self._transaction = self._environment.begin(buffers=True)
        self._cursor = self._transaction.cursor()
        if not (self._cursor.last() and self._cursor.first()):
            raise DataError(f"{self.description} is damaged: there is no first or last record; build it again")
        self._at = 0
        self._numbered = self._looks_numbered()

    def _looks_numbered(self) -> bool:
        """Whether keys begin with eight-digit record numbers without gaps, as all of Caffe's converters write them."""
        cursor = self._transaction.cursor()
        cursor.first()
        starts_at_zero = _number_of(cursor.key()) == 0
        cursor.last()
        return starts_at_zero and _number_of(cursor.key()) == self._length - 1

    def __len__(self) -> int:
        return self._length

    @cached_property
    def index(self) -> LmdbIndex | None:
        """Where the records lie in the file; None if that cannot be told without LMDB."""
        return _environments.index(self._path, self._length)

    def read(self, number: int) -> memoryview:
        self._check_size()
        index: LmdbIndex | None = self.__dict__.get("index")
        found = None if index is None else index.record(number)
        if found is not None:
            return found
        try:
            self._seek(number)
            return self._cursor.value()
        except self._failure as error:
            raise DataError(f"{self.description} is damaged near record {number}: {error}; build it again") from error

    def concurrent(self, count: int) -> bool:
        self._check_size()
        return self.index is not None and self.index.find(count)

    def record_name(self, number: int) -> str:
        """As the protocol says; any thread may ask, as it uses a cursor of its own."""
        import lmdb

        try:
            with contextlib.closing(LmdbSource(self._path)) as other:
                other._seek(number)
                return f"record {number} (key '{bytes(other._cursor.key()).decode(errors='backslashreplace')}')"
        except (lmdb.Error, DataError):
            return f"record {number}"

    def fingerprint(self) -> dict[str, str]:
        found = {"the number of records": str(self._length)}
        self._check_size()
        try:
            cursor = self._transaction.cursor()
            for which, move in (("first", cursor.first), ("last", cursor.last)):
                move()
                found[f"the {which} key"] = f"'{bytes(cursor.key()).decode(errors='backslashreplace')}'"
                found[f"the hash of the {which} record"] = hash_of(cursor.value())
        except self._failure as error:
            raise DataError(f"{self.description} is damaged: {error}; build it again") from error
        return found

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            transaction = getattr(self, "_transaction", None)
            if transaction is not None:
                transaction.abort()
            if hasattr(self, "_file"):
                self._file.close()
            _environments.release(self._path)

    def _check_size(self) -> None:
        """Touching what a file has lost would end the process with SIGBUS; nobody could say why."""
        size = os.fstat(self._file.fileno()).st_size
        if size < self._size:
            raise DataError(
                f"{self.description} was cut off while it was read: it has {size} of {self._size} bytes; build it again"
            )

    # -- finding records -----------------------------------------------------------------------------

    def _seek(self, number: int) -> None:
        """Put the cursor on record `number`: a step when it is near, else a search by its number or from a mark."""
        distance = number - self._at
        if distance == 1:
            found = self._cursor.next()
        elif 0 <= distance <= _STEP_LIMIT:
            found = self._step(distance)
        else:
            found = self._jump(number)
        if not found:
            self._cursor.first()
            self._at = 0
            raise DataError(
                f"{self.description} is damaged: record {number} of {self._length} is not there; build it again"
            )
        self._at = number

    def _step(self, distance: int) -> bool:
        return all(self._cursor.next() for _ in range(distance))

    def _jump(self, number: int) -> bool:
        if self._numbered:
            if self._cursor.set_range(b"%08d" % number) and _number_of(self._cursor.key()) == number:
                return True
            self._numbered = False
        if not self._marks:
            self._marks = self._make_marks()
        mark, rest = divmod(number, _MARK_EVERY)
        return mark < len(self._marks) and self._cursor.set_key(self._marks[mark]) and self._step(rest)

    def _make_marks(self) -> list[bytes]:
        """The keys of records 0, 1024, 2048, …; one walk over the keys alone."""
        logger.info("%s: keys are not record numbers; indexing %d keys once", self.description, self._length)
        marks = []
        self._cursor.first()
        keys: Any = self._cursor.iternext(keys=True, values=False)
        while (key := next(keys, None)) is not None:
            marks.append(bytes(key))
            collections.deque(itertools.islice(keys, _MARK_EVERY - 1), maxlen=0)
        return marks


def _number_of(key: memoryview) -> int | None:
    """The record number that a key of Caffe's converters begins with: ``00000012`` or ``00000012_cat/1.jpg``."""
    digits = bytes(key[:9])
    exact = digits[:8].isdigit() and len(digits) >= 8 and not digits[8:].isdigit()
    return int(digits[:8]) if exact else None


def _check_folder(path: Path) -> None:
    if not path.exists():
        raise DataError(
            f"LMDB '{path}' does not exist (looked from {Path.cwd()}); `caffepy data mnist` and "
            "Caffe's convert_imageset make LMDBs"
        )
    if path.is_dir() and not (path / "data.mdb").exists():
        if (path / "CURRENT").exists():
            raise DataError(
                f"'{path}' is a LevelDB, which is not supported; convert it to LMDB (convert_imageset --backend=lmdb)"
            )
        raise DataError(f"'{path}' is not an LMDB: there is no data.mdb in it")

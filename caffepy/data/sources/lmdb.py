"""LMDB record source; all sources of a process share one index per data file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from caffepy.data.sources.lmdb_index import LmdbIndex, open_index
from caffepy.data.sources.source import hash_of
from caffepy.errors import DataError
from caffepy.utils.files import working_folder


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

"""LMDB record sources: the records of a data file that all sources of the process share an index of."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from caffepy.data.sources.lmdb_index import LmdbIndex, open_index
from caffepy.data.sources.source import hash_of
from caffepy.errors import DataError
from caffepy.files import working_folder


class LmdbSource:
    """The records of an LMDB in the order of their keys; a `RecordSource`. Any thread may read it.

    Args:
        path: the LMDB's folder, or its data file.

    Raises:
        DataError: absent, truncated, not LMDB, or empty.
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
        with self._named():
            self.index.record(0)

    def __len__(self) -> int:
        return self._length

    def read(self, number: int) -> bytes:
        with self._named():
            return self.index.record(number)

    def concurrent(self, count: int) -> bool:
        with self._named():
            self.index.check()
        return self.index.find(count)

    def record_name(self, number: int) -> str:
        """As the protocol says; any thread may ask."""
        try:
            return f"record {number} (key '{_text(self.index.key(number))}')"
        except DataError:
            return f"record {number}"

    def fingerprint(self) -> dict[str, str]:
        with self._named():
            first = self.index.key(0), self.index.record(0)
            found = {"the number of records": str(self._length)}
            for which, (key, record) in (("first", first), ("last", self.index.last())):
                found[f"the {which} key"] = f"'{_text(key)}'"
                found[f"the hash of the {which} record"] = hash_of(record)
        return found

    def close(self) -> None:
        """The index closes the file when no source and no reader has it any more."""

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Begin the messages of the index with the LMDB's name."""
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
            "`caffepy convert_imageset` make LMDBs"
        )
    if os.path.isdir(path) and not os.path.lexists(path / "data.mdb"):
        if os.path.exists(path / "CURRENT"):
            raise DataError(
                f"'{path}' is a LevelDB where an LMDB is expected; say backend: LEVELDB, or make an LMDB with `caffepy "
                "convert_imageset`"
            )
        raise DataError(f"'{path}' is not an LMDB: there is no data.mdb in it")

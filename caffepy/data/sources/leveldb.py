"""LevelDB record sources, by plyvel."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from threading import Lock
from typing import Any

from caffepy.data.sources.source import hash_of
from caffepy.errors import DataError, MissingExtraError
from caffepy.forks import free_after_fork

_COPIED = ("CURRENT", "MANIFEST-", "LOG")
"""Files that LevelDB rewrites or that name others; its tables (.ldb, .sst) are never changed once they are written."""


def is_leveldb(path: Path) -> bool:
    """Whether a folder holds a LevelDB."""
    return os.path.exists(path / "CURRENT")


class LevelDbSource:
    """The records of a LevelDB in the order of their keys; a `RecordSource`. Any thread may read it.

    LevelDB lets one process at a time open a folder, and writes to it even then. So what is opened is a temporary
    folder with links to the tables and copies of the small files: any number of processes may read one database, and
    nothing in it is changed.

    Args:
        path: the LevelDB's folder.

    Raises:
        DataError: absent, damaged, no LevelDB, or empty.
        MissingExtraError: plyvel is not installed.
    """

    index = None

    def __init__(self, path: Path) -> None:
        self.description = f"LevelDB '{path}'"
        self._lock = free_after_fork(Lock())
        self._folder: Path | None = None
        self._process = os.getpid()
        if not is_leveldb(path):
            raise DataError(f"'{path}' is neither a LevelDB nor an LMDB: there is no CURRENT and no data.mdb in it")
        self._plyvel = _plyvel()
        try:
            self._folder = _private_view(path)
            self._db: Any = self._plyvel.DB(os.fspath(self._folder), create_if_missing=False)
            self._keys: list[bytes] = list(self._db.iterator(include_value=False))
        except (OSError, self._plyvel.Error) as error:
            self.close()
            raise DataError(f"{self.description} cannot be opened: {_said(error)}") from error
        if not self._keys:
            self.close()
            raise DataError(f"{self.description} holds no records")

    def __len__(self) -> int:
        return len(self._keys)

    def read(self, number: int) -> bytes:
        try:
            record: bytes | None = self._db.get(self._keys[number])
        except (OSError, RuntimeError, self._plyvel.Error) as error:
            raise DataError(f"cannot be read: {_said(error)}") from error
        if record is None:
            raise DataError("is gone; is the database damaged?")
        return record

    def concurrent(self, count: int) -> bool:
        return True

    def record_name(self, number: int) -> str:
        return f"record {number} (key '{_text(self._keys[number])}')"

    def fingerprint(self) -> dict[str, str]:
        found = {"the number of records": str(len(self))}
        for which, number in (("first", 0), ("last", len(self) - 1)):
            found[f"the {which} key"] = f"'{_text(self._keys[number])}'"
            try:
                found[f"the hash of the {which} record"] = hash_of(self.read(number))
            except DataError as error:
                raise DataError(f"{self.description}: {self.record_name(number)} {error}") from error
        return found

    def close(self) -> None:
        with self._lock:
            database, self._db = getattr(self, "_db", None), None
            folder, self._folder = self._folder, None
        if database is not None:
            database.close()
        if folder is not None and os.getpid() == self._process:  # not of the parent of a forked process
            shutil.rmtree(folder, ignore_errors=True)


def _plyvel() -> Any:
    try:
        import plyvel
    except ImportError as error:
        raise MissingExtraError("plyvel", "leveldb", "to read a LevelDB") from error
    return plyvel


def _private_view(path: Path) -> Path:
    """A temporary folder that LevelDB may open and write in as if it were `path`."""
    folder = Path(tempfile.mkdtemp(prefix="caffepy-leveldb-"))
    try:
        for file in path.iterdir():
            if file.suffix in (".ldb", ".sst"):
                (folder / file.name).symlink_to(file.resolve())
            elif file.suffix == ".log" or file.name.startswith(_COPIED):
                shutil.copyfile(file, folder / file.name)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _said(error: Exception) -> str:
    return " ".join((getattr(error, "strerror", None) or str(error)).split())


def _text(key: bytes) -> str:
    return key.decode(errors="backslashreplace")

"""LevelDB record source (plyvel)."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from threading import Lock
from typing import Any

from caffepy.data.sources.source import hash_of
from caffepy.errors import DataError
from caffepy.utils.installation import MissingExtraError
from caffepy.utils.process_fork import free_after_fork

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
            raise DataError(f"{self.description} cannot be opened: {_message(error)}") from error
        if not self._keys:
            self.close()
            raise DataError(f"{self.description} holds no records")

    def __len__(self) -> int:
        return len(self._keys)

    def read(self, number: int) -> bytes:
        try:
            record: bytes | None = self._db.get(self._keys[number])
        except (OSError, RuntimeError, self._plyvel.Error) as error:
            raise DataError(f"cannot be read: {_message(error)}") from error
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


def _message(error: Exception) -> str:
    return " ".join((getattr(error, "strerror", None) or str(error)).split())


def _text(key: bytes) -> str:
    return key.decode(errors="backslashreplace")

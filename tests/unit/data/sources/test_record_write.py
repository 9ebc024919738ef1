from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from databases import BACKENDS

from caffepy.data.sources.databases import LevelDbSource, LmdbSource, open_writer
from caffepy.errors import DataError, RunError
from caffepy.utils.installation import MissingExtraError

SOURCES = {"lmdb": LmdbSource, "leveldb": LevelDbSource}


def contents(path: Path, backend: str) -> list[bytes]:
    source = SOURCES[backend](path)
    try:
        return [bytes(source.read(number)) for number in range(len(source))]
    finally:
        source.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("count", "size"), [(2500, 10), (40, 300_000)])
def test_what_is_put_is_there(tmp_path: Path, backend: str, count: int, size: int):
    with open_writer(tmp_path / "db", backend) as writer:
        for number in range(count):
            writer.put(f"{number:08d}".encode(), bytes([number % 256]) * size)
        assert not (tmp_path / "db").exists()
    assert writer.count == count
    assert contents(tmp_path / "db", backend) == [bytes([number % 256]) * size for number in range(count)]
    assert [entry.name for entry in tmp_path.iterdir()] == ["db"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_there_stays_unless_forced(tmp_path: Path, backend: str):
    for value in (b"old", b"new"):
        with open_writer(tmp_path / "db", backend, force=value == b"new") as writer:
            writer.put(b"1", value)
    with pytest.raises(ValueError, match="in the middle"), open_writer(tmp_path / "db", backend, force=True) as writer:
        writer.put(b"1", b"newer")
        raise ValueError("in the middle")
    with pytest.raises(DataError, match="already exists"), open_writer(tmp_path / "db", backend):
        raise AssertionError("the block must not run")
    assert contents(tmp_path / "db", backend) == [b"new"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["db"]


def test_a_folder_that_only_looks_like_a_leveldb_is_spared(tmp_path: Path):
    (tmp_path / "db").mkdir()
    for name in ("CURRENT", "000005.ldb", "thesis.tex"):
        (tmp_path / "db" / name).touch()
    with pytest.raises(DataError, match="is not an LMDB or LevelDB"), open_writer(tmp_path / "db", "leveldb", True):
        raise AssertionError("the block must not run")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_place_that_cannot_be_written(tmp_path: Path, backend: str):
    path = tmp_path / ("n" * 300) / "db"
    with pytest.raises(RunError, match="cannot write L.* '.*nnn/db': .*[Nn]ame too long"), open_writer(path, backend):
        raise AssertionError("the block must not run")


def test_without_plyvel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "plyvel", None)
    needed = pytest.raises(MissingExtraError, match=r"plyvel is not installed and is needed to write a LevelDB")
    with needed, open_writer(tmp_path / "db", "leveldb"):
        raise AssertionError("the block must not run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("said", ["mdb_txn_commit: Input/output error", b"mdb_txn_commit: Input/output error"])
def test_a_full_disk_is_named(tmp_path: Path, said: str | bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=100))
    message = "cannot write LMDB '.*db': mdb_txn_commit: Input/output error; the disk is full: free space there$"
    with pytest.raises(RunError, match=message), open_writer(tmp_path / "db", "lmdb") as writer:
        writer.put(b"1", b"x")
        raise OSError(said)

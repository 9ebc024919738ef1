"""Databases as they are written; LevelDB, which they are also read from."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import lmdb
import pytest
from databases import BACKENDS, NO_PLYVEL

from caffepy.data.sources.databases import LevelDbSource, LmdbSource, open_writer, record_key, write_datums
from caffepy.errors import DataError, RunError
from caffepy.formats.proto.caffe_pb2 import Datum
from caffepy.utils.installation import MissingExtraError


def datums(count, size=10):
    for n in range(count):
        yield record_key(n), Datum(channels=1, height=1, width=size, data=bytes([n % 256]) * size, label=n)


def labels(path):
    source = LmdbSource(path)
    found = [Datum.FromString(source.read(n)).label for n in range(len(source))]
    source.close()
    return found


def test_records_are_there_in_order_and_nothing_else(tmp_path):
    assert write_datums(tmp_path / "new" / "db", datums(2500)) == 2500
    assert labels(tmp_path / "new" / "db") == list(range(2500))
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == ["db"]


def test_the_map_grows_with_the_data(tmp_path):
    write_datums(tmp_path / "db", datums(1200, 30000))
    assert labels(tmp_path / "db") == list(range(1200))


def test_what_is_there_stays_unless_forced(tmp_path):
    write_datums(tmp_path / "db", datums(3))
    with pytest.raises(DataError, match=r"db' already exists; remove it, or give --overwrite to replace it"):
        write_datums(tmp_path / "db", datums(5))
    assert labels(tmp_path / "db") == [0, 1, 2]
    write_datums(tmp_path / "db", datums(5), force=True)
    assert labels(tmp_path / "db") == [0, 1, 2, 3, 4]
    assert [entry.name for entry in tmp_path.iterdir()] == ["db"]


def test_force_spares_what_is_no_lmdb(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_text("dear to me")
    with pytest.raises(DataError, match="photos' is not an LMDB or LevelDB and is not replaced"):
        write_datums(tmp_path / "photos", datums(3), force=True)
    assert (tmp_path / "photos" / "a.jpg").exists()


def test_a_failure_leaves_the_old_and_nothing_new(tmp_path):
    write_datums(tmp_path / "db", datums(3))

    def broken():
        yield from datums(1500)
        raise DataError("the images end here")

    with pytest.raises(DataError, match="the images end here"):
        write_datums(tmp_path / "db", broken(), force=True)
    assert labels(tmp_path / "db") == [0, 1, 2]
    assert [entry.name for entry in tmp_path.iterdir()] == ["db"]


def test_a_full_disk_is_a_failure_while_running(tmp_path, monkeypatch):
    def full(*_, **__):
        raise lmdb.DiskError("No space left on device")

    monkeypatch.setattr("caffepy.data.sources.databases.LmdbWriter.write", full)
    with pytest.raises(RunError, match="cannot write LMDB '.*db': No space left on device"):
        write_datums(tmp_path / "db", datums(3))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("below", ["db", "deeper/db"])
def test_a_file_where_a_folder_is_wanted_is_named(tmp_path, below):
    (tmp_path / "file").write_bytes(b"kept")
    with pytest.raises(DataError, match=f"file/{below}' cannot be created: '.*/file' is not a folder"):
        write_datums(tmp_path / "file" / below, datums(3))
    assert (tmp_path / "file").read_bytes() == b"kept"


def test_a_link_at_a_temporary_name_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    for ending in ("tmp", "old"):
        (tmp_path / f".db.{os.getpid()}.{ending}").symlink_to(tmp_path / "elsewhere")
    write_datums(tmp_path / "db", datums(3))
    write_datums(tmp_path / "db", datums(4), force=True)
    assert labels(tmp_path / "db") == [0, 1, 2, 3]
    assert not (tmp_path / "db").is_symlink() and not list((tmp_path / "elsewhere").iterdir())


def test_keys_are_those_of_caffes_converters():
    assert record_key(12) == b"00000012"
    assert record_key(12, "cat/1.jpg") == b"00000012_cat/1.jpg"


def leave_folder(folder, name, content="data.mdb"):
    """What a writer of `name` leaves that was killed an hour ago."""
    left = folder / f".{name}.0123456789abcdef.tmp"
    left.mkdir()
    (left / content).write_bytes(b"half")
    hour = 3600
    os.utime(left, (left.stat().st_atime - hour, left.stat().st_mtime - hour))
    return left


@pytest.mark.parametrize("force", [False, True])
def test_what_a_killed_writer_has_left_is_removed_by_the_next(tmp_path, force):
    if force:
        write_datums(tmp_path / "db", datums(3))
    left, other = leave_folder(tmp_path, "db"), leave_folder(tmp_path, "other")
    write_datums(tmp_path / "db", datums(5), force=force)
    assert not left.exists() and other.exists()
    assert labels(tmp_path / "db") == list(range(5))


def test_what_another_process_still_writes_or_what_is_no_lmdb_stays(tmp_path):
    left = leave_folder(tmp_path, "db")
    descriptor = os.open(left, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    write_datums(tmp_path / "db", datums(5))
    assert left.exists()
    os.close(descriptor)
    (left / "precious").write_bytes(b"")
    os.utime(left, (1, 1))
    write_datums(tmp_path / "db", datums(5), force=True)
    assert left.exists()


def test_a_writer_locks_its_folder(tmp_path):
    def watching():
        yield from datums(1)
        (writing,) = tmp_path.glob(".db.*.tmp")
        descriptor = os.open(writing, os.O_RDONLY)
        with pytest.raises(BlockingIOError, match="temporarily unavailable"):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)

    write_datums(tmp_path / "db", watching())


# -- records ---------------------------------------------------------------------------------------------


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
def test_records_that_are_there_stay_unless_forced(tmp_path: Path, backend: str):
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


# -- LevelDB ---------------------------------------------------------------------------------------------


@pytest.fixture
def database(tmp_path):
    plyvel = pytest.importorskip("plyvel", reason=NO_PLYVEL)
    path = tmp_path / "db"
    with plyvel.DB(str(path), create_if_missing=True) as file, file.write_batch() as batch:
        for number in reversed(range(200)):
            batch.put(b"%05d" % number, b"record %d" % number * 400)
    return path


def test_records_in_the_order_of_their_keys(database):
    before = sorted((file.name, file.read_bytes()) for file in database.iterdir())
    first, second = LevelDbSource(database), LevelDbSource(database)  # LevelDB itself allows one
    try:
        assert len(first) == 200
        assert [second.read(n) for n in (0, 199, 7)] == [b"record %d" % n * 400 for n in (0, 199, 7)]
        assert first.record_name(3) == "record 3 (key '00003')"
        assert first.fingerprint() == second.fingerprint()
    finally:
        first.close()
        second.close()
        second.close()
    assert sorted((file.name, file.read_bytes()) for file in database.iterdir()) == before


def test_what_is_none(database, tmp_path):
    with pytest.raises(DataError, match="is neither a LevelDB nor an LMDB"):
        LevelDbSource(tmp_path)
    (database / "CURRENT").write_text("nonsense\n")
    with pytest.raises(DataError, match="LevelDB '.*db' cannot be opened: "):
        LevelDbSource(database)


def test_an_empty_one(tmp_path):
    plyvel = pytest.importorskip("plyvel", reason=NO_PLYVEL)
    plyvel.DB(str(tmp_path / "db"), create_if_missing=True).close()
    with pytest.raises(DataError, match="LevelDB '.*db' holds no records"):
        LevelDbSource(tmp_path / "db")


def test_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "CURRENT").write_text("MANIFEST-000001\n")
    monkeypatch.setitem(sys.modules, "plyvel", None)
    with pytest.raises(MissingExtraError, match=r"plyvel is not installed .*: .*install .*\[leveldb\]'"):
        LevelDbSource(tmp_path)

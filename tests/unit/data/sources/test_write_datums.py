import fcntl
import os

import lmdb
import pytest

from caffepy.data.sources.databases import LmdbSource, record_key, write_datums
from caffepy.errors import DataError, RunError
from caffepy.formats.proto.caffe_pb2 import Datum


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

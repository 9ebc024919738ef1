import sys

import pytest
from databases import NO_PLYVEL

from caffepy.data.sources.databases import LevelDbSource
from caffepy.errors import DataError
from caffepy.utils.installation import MissingExtraError


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

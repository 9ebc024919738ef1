import os
import random
import threading

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.data.sources.databases import LmdbSource
from caffepy.errors import DataError


def make(path, records, size=1 << 24):
    with lmdb.open(str(path), map_size=size) as environment, environment.begin(write=True) as transaction:
        for key, value in records:
            transaction.put(key, value)
    return path


def numbered(count, name=""):
    return [(b"%08d%s" % (i, name.encode()), b"value %d" % i) for i in range(count)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lmdb")
    rng = random.Random(1)
    named = sorted({b"%x" % rng.getrandbits(60) for _ in range(3000)})
    jump = [(b"%08d" % k, b"value %d" % i) for i, k in enumerate([*range(2000), *range(2500, 3500)])]
    return {
        "numbered": make(folder / "numbered", numbered(3000)),
        "with names": make(folder / "with_names", numbered(3000, "_cat/1.jpg")),
        "not numbered": make(folder / "not_numbered", [(key, b"value %d" % i) for i, key in enumerate(named)]),
        "gaps": make(folder / "gaps", jump),
    }


@pytest.mark.parametrize("kind", ["numbered", "with names", "not numbered", "gaps"])
def test_any_record_can_be_read_after_any_other(folders, kind):
    source = LmdbSource(folders[kind])
    assert len(source) == 3000
    rng = random.Random(2)
    for n in [0, 1, 2, 2, 2999, 0, 1500, 1499, 1530, 2998, 2999, *(rng.randrange(3000) for _ in range(200))]:
        assert bytes(source.read(n)) == b"value %d" % n
    source.close()


def test_a_fingerprint_tells_sets_apart_and_not_their_places(tmp_path):
    def fingerprint(name, records):
        source = LmdbSource(make(tmp_path / name, records))
        found = source.fingerprint()
        assert bytes(source.read(1)) == b"value 1"
        source.close()
        return found

    records = numbered(5)
    first = fingerprint("first", records)
    assert first == fingerprint("second", records)
    assert first["the number of records"] == "5"
    assert (first["the first key"], first["the last key"]) == ("'00000000'", "'00000004'")
    assert fingerprint("names", numbered(5, "_x"))["the last key"] == "'00000004_x'"
    changed = {
        name: fingerprint(f"changed {place}", [*records[:place], (records[place][0], b"?"), *records[place + 1 :]])
        for name, place in (("the hash of the first record", 0), ("the hash of the last record", 4))
    }
    for name, found in changed.items():
        assert {key for key in first if first[key] != found[key]} == {name}


def test_a_false_last_number_is_noticed(tmp_path):
    """First and last key look right, but numbers in between do not count records."""
    keys = [b"%08d" % k for k in (*range(100), *range(150, 249), 399)]
    keys += [b"%08d_x" % k for k in range(200)]
    path = make(tmp_path / "db", [(key, key) for key in keys])
    source = LmdbSource(path)
    assert [bytes(source.read(n)) for n in (398, 99, 350, 0)] == [sorted(keys)[n] for n in (398, 99, 350, 0)]
    source.close()


def test_records_are_named_by_their_keys(folders):
    source = LmdbSource(folders["with names"])
    source.read(5)
    assert source.record_name(12) == "record 12 (key '00000012_cat/1.jpg')"
    assert bytes(source.read(6)) == b"value 6"
    source.close()


def test_several_threads_share_one_index(folders):
    sources = [LmdbSource(folders["numbered"]) for _ in range(4)]
    assert sources[0].index is sources[3].index
    found = [[] for _ in sources]

    def read(k):
        found[k] = [bytes(sources[k].read(n)) for n in range(k * 700, k * 700 + 700)]

    threads = [threading.Thread(target=read, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert sum(found, []) == [b"value %d" % n for n in range(2800)]
    sources[0].close()
    sources[0].close()
    assert bytes(sources[1].read(0)) == b"value 0"
    for source in sources:
        source.close()


def test_a_data_file_may_be_named_itself(folders):
    source = LmdbSource(folders["numbered"] / "data.mdb")
    assert bytes(source.read(2999)) == b"value 2999"
    source.close()


# -- what is wrong with files ----------------------------------------------------------------------------


def test_absent(tmp_path):
    with pytest.raises(DataError, match=r"LMDB '.*nowhere' does not exist \(looked from /.*\); `caffepy data mnist`"):
        LmdbSource(tmp_path / "nowhere")


def test_a_folder_without_data(tmp_path):
    with pytest.raises(DataError, match=r"is not an LMDB: it has no data\.mdb"):
        LmdbSource(tmp_path)


def test_leveldb_is_recognised(tmp_path):
    (tmp_path / "CURRENT").write_text("MANIFEST-000001\n")
    with pytest.raises(DataError, match="is a LevelDB, not an LMDB; set backend: LEVELDB"):
        LmdbSource(tmp_path)


def test_empty(tmp_path):
    with pytest.raises(DataError, match="holds no records"):
        LmdbSource(make(tmp_path / "db", []))


@pytest.mark.parametrize("content", [b"", b"no", b"\0" * 4096, b"x" * 100_000])
def test_not_lmdb(tmp_path, content):
    (tmp_path / "data.mdb").write_bytes(content)
    with pytest.raises(DataError, match=r"data\.mdb' is not an LMDB data file .*copied completely\?"):
        LmdbSource(tmp_path)


def test_cut_in_half(tmp_path):
    path = make(tmp_path / "db", numbered(5000))
    size = (path / "data.mdb").stat().st_size
    os.truncate(path / "data.mdb", size // 2)
    with pytest.raises(DataError, match=rf"is truncated: it has {size // 2} bytes, but its header requires {size}; "):
        LmdbSource(path)


def test_cut_while_it_is_read(tmp_path):
    path = make(tmp_path / "db", numbered(5000))
    source = LmdbSource(path)
    size = (path / "data.mdb").stat().st_size
    assert source.allows_concurrent_reads(10) and bytes(source.read(4999)) == b"value 4999"
    os.truncate(path / "data.mdb", size // 2)
    for read in (lambda: source.read(4999), lambda: source.allows_concurrent_reads(5000)):
        with pytest.raises(DataError, match=rf"truncated during reading: it has {size // 2} of {size} bytes; build"):
            read()
    source.close()


@settings(max_examples=30)
@given(cut=st.floats(0, 0.9999))
def test_cut_anywhere(tmp_path_factory, cut):
    path = make(tmp_path_factory.mktemp("cut") / "db", numbered(500))
    os.truncate(path / "data.mdb", int((path / "data.mdb").stat().st_size * cut))
    with pytest.raises(DataError, match="is truncated|is not an LMDB data file"):
        LmdbSource(path)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_whole_files_are_never_called_truncated(tmp_path_factory, seed):
    """However it was written: records put, replaced and deleted in several transactions."""
    rng = random.Random(seed)
    path = tmp_path_factory.mktemp("whole")
    with lmdb.open(str(path), map_size=1 << 25) as environment:
        for _ in range(rng.randint(1, 6)):
            with environment.begin(write=True) as transaction:
                for _ in range(rng.randint(1, 60)):
                    key = b"%d" % rng.randrange(50)
                    if rng.random() < 0.7:
                        transaction.put(key, bytes(rng.choice([10, 500, 3000, 9000, 50000])))
                    else:
                        transaction.delete(key)
        with environment.begin() as transaction:
            expected = [bytes(value) for _, value in transaction.cursor()]
    if expected:
        source = LmdbSource(path)
        assert source.allows_concurrent_reads(len(expected))
        assert [source.read(n) for n in range(len(source))] == expected


def test_damaged_pages_give_an_error(tmp_path):
    path = make(tmp_path / "db", numbered(20000))
    with (path / "data.mdb").open("r+b") as file:
        file.seek(2 * 4096)
        file.write(b"\0" * (os.path.getsize(path / "data.mdb") - 2 * 4096))
    with pytest.raises(
        DataError,
        match=r"LMDB '.*db' is damaged at record 0: page \d+ has an unexpected page number or type",
    ):
        LmdbSource(path)

import os
import random
import re
import struct
import time

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.data.sources import lmdb_index
from caffepy.data.sources.databases import LmdbSource
from caffepy.data.sources.lmdb_index import LmdbIndex
from caffepy.errors import DataError


@pytest.fixture(scope="module", autouse=True, params=[True, False], ids=["compiled", "interpreted"])
def compiled(request):
    """Whether the walk is done by machine code, or by Python as in a start with an empty cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lmdb_index._walk, "should_compile", lambda items, compiling, loading: request.param)
        yield


def make(path, records, size=1 << 26, **settings):
    with lmdb.open(str(path), map_size=size) as environment, environment.begin(write=True) as transaction:
        for key, value in records:
            transaction.put(key, value)
    return path / "data.mdb"


def values_of(path):
    with lmdb.open(str(path.parent), readonly=True, lock=False) as environment, environment.begin() as transaction:
        return [bytes(value) for _, value in transaction.cursor()]


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_records_are_found_in_the_order_of_their_keys(tmp_path_factory, seed):
    """However they were written, small and large, in any steps."""
    rng = random.Random(seed)
    path = tmp_path_factory.mktemp("index") / "db"
    with lmdb.open(str(path), map_size=1 << 26) as environment:
        for _ in range(rng.randint(1, 4)):
            with environment.begin(write=True) as transaction:
                for _ in range(rng.randint(1, 300)):
                    key = b"%d" % rng.randrange(400)
                    if rng.random() < 0.8:
                        transaction.put(key, rng.randbytes(rng.choice([0, 10, 500, 3000, 9000])))
                    else:
                        transaction.delete(key)
    expected = values_of(path / "data.mdb")
    if not expected:
        return
    index = LmdbIndex(path / "data.mdb")
    found = 0
    while found < len(expected):
        step = min(found + rng.randint(1, 200), len(expected))
        assert index.find(step)
        assert [bytes(index.record(n)) for n in range(found, step)] == expected[found:step]
        found = step
    assert not index.find(len(expected) + 1) and index.damage == ""
    assert index.last()[1] == expected[-1]


def test_deep_trees(tmp_path):
    file = make(tmp_path / "db", [(b"%0400d" % n, b"%d" % n) for n in range(3000)])
    index = LmdbIndex(file)
    assert index.find(3000)
    assert [bytes(index.record(n)) for n in (0, 1499, 2999)] == [b"0", b"1499", b"2999"]


def change_headers(file, offset, fmt, change):
    """Apply `change` to a field of the main database's record in both headers."""
    content = bytearray(file.read_bytes())
    for page in (0, 4096):
        at = page + 16 + 24 + 48 + offset
        struct.pack_into(fmt, content, at, change(struct.unpack_from(fmt, content, at)[0]))
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("entries", "message"),
    [(1, "it has more records than its header says"), (3, "it has fewer records than its header says")],
)
def test_other_numbers_of_entries_are_refused(tmp_path, entries, message):
    file = make(tmp_path / "db", [(b"a", b"1"), (b"b", b"2")])
    change_headers(file, 32, "<Q", lambda count: entries if count else 0)
    index = LmdbIndex(file)
    assert not index.find(entries) and index.damage == message
    with pytest.raises(DataError, match=f"^is damaged at record {min(entries - 1, 2)}: {message}; build it again"):
        index.record(entries - 1)


@pytest.mark.parametrize(
    ("offset", "fmt", "value", "message"),
    [
        (4, "<H", 4, r"several values per key \(MDB_DUPSORT\)"),
        (6, "<H", 0, "has 2 records but no tree"),
        (6, "<H", 33, "has 2 records but no tree"),
        (40, "<Q", 2**64 - 1, "has 2 records but no tree"),
        (32, "<Q", 2**61, "announces 2305843009213693952 records in"),
    ],
)
def test_headers_that_cannot_be_are_refused(tmp_path, offset, fmt, value, message):
    file = make(tmp_path / "db", [(b"a", b"1"), (b"b", b"2")])
    change_headers(file, offset, fmt, lambda _: value)
    with pytest.raises(DataError, match=message):
        LmdbIndex(file)


def test_a_version_of_the_format_that_is_not_known_is_named(tmp_path):
    file = make(tmp_path / "db", [(b"a", b"1")])
    content = bytearray(file.read_bytes())
    content[20] = content[4096 + 20] = 2
    file.write_bytes(content)
    with pytest.raises(DataError, match="has LMDB format 2; only format 1"):
        LmdbIndex(file)


def test_headers_of_other_transactions_are_refused(tmp_path):
    file = make(tmp_path / "db", [(b"a", b"1")])
    content = bytearray(file.read_bytes())
    content[16 + 24 + 96 + 8] = 77
    file.write_bytes(content)
    with pytest.raises(DataError, match="its two headers contradict each other"):
        LmdbIndex(file)


def test_a_database_within_the_lmdb_is_no_record(tmp_path):
    with lmdb.open(str(tmp_path / "db"), max_dbs=1) as environment:
        inner = environment.open_db(b"inner")
        with environment.begin(write=True, db=inner) as transaction:
            transaction.put(b"a", b"1")
    index = LmdbIndex(tmp_path / "db" / "data.mdb")
    with pytest.raises(
        DataError, match=r"is damaged at record 0: page \d+ holds a subdatabase or several values per key"
    ):
        index.record(0)


@pytest.mark.parametrize("compact", [False, True])
def test_copies_that_liblmdb_makes_are_read(tmp_path, compact):
    path = tmp_path / "db"
    with lmdb.open(str(path), map_size=1 << 24) as environment:
        for part in range(3):
            with environment.begin(write=True) as transaction:
                for n in range(part, 500, 3):
                    transaction.put(b"%03d" % n, b"x" * n * 9)
        (tmp_path / "copy").mkdir()
        environment.copy(str(tmp_path / "copy"), compact=compact)
    index = LmdbIndex(tmp_path / "copy" / "data.mdb")
    assert [len(index.record(n)) for n in range(500)] == [n * 9 for n in range(500)]


@pytest.mark.parametrize(("flags", "ordered"), [(0, True), (2, False), (8, False)])
def test_keys_are_in_the_order_that_the_database_asks_for(tmp_path, flags, ordered):
    """Keys that are reversed or are numbers of the machine are not in the order of their bytes."""
    file = make(tmp_path / "db", [(b"first", b"1"), (b"other", b"2")])
    file.write_bytes(file.read_bytes().replace(b"first", b"apple"))
    assert LmdbIndex(file).find(2)
    file.write_bytes(file.read_bytes().replace(b"apple", b"zzzzz"))
    change_headers(file, 4, "<H", lambda _: flags)
    index = LmdbIndex(file)
    assert index.find(2) != ordered
    assert not ordered or re.fullmatch(r"the keys in page \d+ are not in order", index.damage)


def test_absent_and_foreign_files_have_no_index(tmp_path):
    (tmp_path / "x").write_bytes(b"no database" * 1000)
    with pytest.raises(DataError, match="is not an LMDB data file"):
        LmdbIndex(tmp_path / "x")
    with pytest.raises(FileNotFoundError, match="No such file"):
        LmdbIndex(tmp_path / "y")


@pytest.mark.parametrize("change", ["cut", "written", "grown"])
def test_files_that_change_while_they_are_read_are_noticed(tmp_path, change):
    file = make(tmp_path / "db", [(b"%08d" % n, b"x" * 700) for n in range(3000)])
    index = LmdbIndex(file)
    assert index.find(3000)
    time.sleep(0.02)  # the clock of files ticks a few hundred times a second
    if change == "cut":
        os.truncate(file, 5 * 4096)
    else:
        with file.open("r+b") as opened:
            opened.seek(0, 2 if change == "grown" else 0)
            opened.write(b"?")
    with pytest.raises(DataError, match="was truncated during reading" if change == "cut" else "was modified during"):
        index.record(2000)


def test_a_large_record_whose_pages_are_another_ones_is_refused(tmp_path):
    file = make(tmp_path / "db", [(b"%d" % n, bytes([n]) * 9000) for n in range(3)])
    content = bytearray(file.read_bytes())
    offset = _offset(file, 1)
    content[offset - 16] += 1
    file.write_bytes(content)
    index = LmdbIndex(file)
    assert len(index.record(0)) == 9000
    with pytest.raises(DataError, match="is damaged at record 1: its overflow page has a wrong header"):
        index.record(1)


def _offset(file, number):
    index = LmdbIndex(file)
    index.find(number + 1)
    return int(index.offsets[number])


@settings(max_examples=200)
@given(data=st.data())
def test_damaged_trees_end_the_walk_within_the_file(tmp_path_factory, data):
    """Any bytes of the tree may be wrong: the walk ends, and what it calls found lies within the file."""
    path = tmp_path_factory.getbasetemp() / "damaged" / "db"
    if not path.exists():
        path.parent.mkdir()
        make(path, [(b"%05d" % n, bytes([n % 251]) * (30 if n % 60 else 6000)) for n in range(300)])
    content = bytearray((path / "data.mdb").read_bytes())
    heads = range(2 * 4096, len(content) - 4096, 4096)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.sampled_from(heads)) + data.draw(st.integers(0, 80))
        content[at : at + 2] = data.draw(st.binary(min_size=2, max_size=2))
    file = tmp_path_factory.getbasetemp() / "damaged" / "copy.mdb"
    file.write_bytes(content)
    index = LmdbIndex(file)
    complete = index.find(300)
    found = int(index._walk.state[1])
    assert complete == (found == 300)
    assert (index.offsets[:found] >= 2 * 4096).all()
    assert (index.offsets[:found] + index.sizes[:found] <= len(content)).all()
    assert index.find(found)
    assert complete or not index.find(300)


def test_sources_share_an_index(tmp_path):
    make(tmp_path / "db", [(b"%08d" % n, b"value %d" % n) for n in range(2000)])
    source, other = LmdbSource(tmp_path / "db"), LmdbSource(tmp_path / "db")
    assert source.index is other.index
    assert source.allows_concurrent_reads(1000)
    assert [bytes(source.read(n)) for n in (0, 999, 1500, 3)] == [b"value 0", b"value 999", b"value 1500", b"value 3"]
    assert not source.allows_concurrent_reads(2001)
    kept = source.read(5)
    source.close()
    other.close()
    assert bytes(kept) == b"value 5"


@pytest.mark.parametrize("count", [1, 2, 60])
def test_few_records(tmp_path, count):
    file = make(tmp_path / "db", [(b"%03d" % n, b"x" * n) for n in range(1, count + 1)])
    index = LmdbIndex(file)
    assert index.find(count)
    assert [len(index.record(n)) for n in range(count)] == list(range(1, count + 1))

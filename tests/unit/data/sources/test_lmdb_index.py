import random
import struct

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.data.sources.lmdb import LmdbSource
from caffepy.data.sources.lmdb_index import open_index


def make(path, records, size=1 << 26, **settings):
    with lmdb.open(str(path), map_size=size) as environment, environment.begin(write=True) as transaction:
        for key, value in records:
            transaction.put(key, value)
    return path / "data.mdb"


def values_of(path):
    with lmdb.open(str(path.parent), readonly=True, lock=False) as environment, environment.begin() as transaction:
        return [bytes(value) for _, value in transaction.cursor()]


@settings(deadline=None, max_examples=25)
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
    index = open_index(path / "data.mdb", len(expected))
    found = 0
    while found < len(expected):
        assert index.record(found) is None
        step = min(found + rng.randint(1, 200), len(expected))
        assert index.find(step)
        assert [bytes(index.record(n)) for n in range(found, step)] == expected[found:step]
        found = step
    assert not index.find(len(expected) + 1)


def test_deep_trees(tmp_path):
    file = make(tmp_path / "db", [(b"%0400d" % n, b"%d" % n) for n in range(3000)])
    index = open_index(file, 3000)
    assert index.find(3000)
    assert [bytes(index.record(n)) for n in (0, 1499, 2999)] == [b"0", b"1499", b"2999"]


def test_other_numbers_of_entries_are_refused(tmp_path):
    file = make(tmp_path / "db", [(b"a", b"1"), (b"b", b"2")])
    assert open_index(file, 2) is not None
    assert open_index(file, 3) is None


def test_sets_of_several_values_a_key_are_refused(tmp_path):
    with lmdb.open(str(tmp_path / "db"), max_dbs=1) as environment:
        main = environment.open_db(None)
        with environment.begin(write=True, db=main) as transaction:
            transaction.put(b"a", b"1")
    file = tmp_path / "db" / "data.mdb"
    content = bytearray(file.read_bytes())
    for page in (0, 4096):
        flags = page + 16 + 24 + 48 + 4
        struct.pack_into("<H", content, flags, struct.unpack_from("<H", content, flags)[0] | 4)
    file.write_bytes(content)
    assert open_index(file, 1) is None


def test_absent_and_foreign_files_have_no_index(tmp_path):
    (tmp_path / "x").write_bytes(b"no database" * 1000)
    assert open_index(tmp_path / "x", 1) is None
    assert open_index(tmp_path / "y", 1) is None


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_damaged_trees_end_the_walk_within_the_file(tmp_path_factory, data):
    """Any bytes of the tree may be wrong: the walk ends, and what it calls found lies within the file."""
    path = tmp_path_factory.getbasetemp() / "damaged" / "db"
    if not path.exists():
        path.parent.mkdir()
        make(path, [(b"%05d" % n, bytes([n % 251]) * (30 if n % 9 else 6000)) for n in range(900)])
    content = bytearray((path / "data.mdb").read_bytes())
    heads = range(2 * 4096, len(content) - 4096, 4096)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.sampled_from(heads)) + data.draw(st.integers(0, 80))
        content[at : at + 2] = data.draw(st.binary(min_size=2, max_size=2))
    file = tmp_path_factory.getbasetemp() / "damaged" / "copy.mdb"
    file.write_bytes(content)
    index = open_index(file, 900)
    complete = index.find(900)
    found = sum(index.record(n) is not None for n in range(900))
    assert complete == (found == 900)
    assert (index.offsets[:found] >= 2 * 4096).all()
    assert (index.offsets[:found] + index.sizes[:found] <= len(content)).all()
    assert index.find(found)
    assert complete or not index.find(900)


def test_sources_read_through_the_index_once_it_knows(tmp_path):
    make(tmp_path / "db", [(b"%08d" % n, b"value %d" % n) for n in range(2000)])
    source, other = LmdbSource(tmp_path / "db"), LmdbSource(tmp_path / "db")
    assert source.index is other.index
    assert source.concurrent(1000)
    assert [bytes(source.read(n)) for n in (0, 999, 1500, 3)] == [b"value 0", b"value 999", b"value 1500", b"value 3"]
    assert not source.concurrent(2001)
    kept = source.read(5)
    source.close()
    other.close()
    assert bytes(kept) == b"value 5"


@pytest.mark.parametrize("count", [1, 2, 60])
def test_few_records(tmp_path, count):
    file = make(tmp_path / "db", [(b"%03d" % n, b"x" * n) for n in range(1, count + 1)])
    index = open_index(file, count)
    assert index.find(count)
    assert [len(index.record(n)) for n in range(count)] == list(range(1, count + 1))

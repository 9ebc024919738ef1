"""convert_mnist_data, convert_cifar_data and create_label_map."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import lmdb
import numpy as np
import pytest

from caffepy.data.conversion.annotation_sets import create_label_map, read_label_map
from caffepy.data.conversion.image_sets import Database
from caffepy.data.conversion.mnist_cifar import convert_cifar, convert_digits
from caffepy.data.mean import read_mean
from caffepy.errors import ConfigError, DataError
from caffepy.formats.proto.caffe_pb2 import Datum

RNG = np.random.default_rng(11)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def records(path: Path) -> list[tuple[bytes, Datum]]:
    with lmdb.open(str(path), readonly=True, lock=False) as environment, environment.begin() as transaction:
        return [(key, Datum.FromString(record)) for key, record in transaction.cursor()]


# -- idx files -------------------------------------------------------------------------------------------


def test_idx_files_become_a_database():
    images = RNG.integers(0, 256, (3, 4, 5), np.uint8)
    Path("images").write_bytes(struct.pack(">4I", 2051, 3, 4, 5) + images.tobytes())
    Path("labels.gz").write_bytes(gzip.compress(struct.pack(">2I", 2049, 3) + bytes([7, 0, 46])))
    assert convert_digits(Path("images"), Path("labels.gz"), Database(Path("db"))) == 3
    assert records(Path("db")) == [
        (f"{n:08d}".encode(), Datum(channels=1, height=4, width=5, data=images[n].tobytes(), label=label))
        for n, label in enumerate((7, 0, 46))
    ]
    Path("labels").write_bytes(struct.pack(">2I", 2049, 2) + bytes(2))
    with pytest.raises(DataError, match="images has 3 images and labels 2 labels"):
        convert_digits(Path("images"), Path("labels"), Database(Path("other")))
    with pytest.raises(DataError, match="labels: has 10 bytes, too few for an idx file of images"):
        convert_digits(Path("labels"), Path("images"), Database(Path("other")))


# -- CIFAR-10 --------------------------------------------------------------------------------------------


def write_cifar(folder: Path) -> np.ndarray:
    """Seven images in six files; the last is the test's."""
    folder.mkdir()
    data = RNG.integers(0, 256, (7, 3073), np.uint8)
    data[:, 0] = np.arange(7)
    parts = [data[:2], data[2:3], data[3:4], data[4:5], data[5:6]]
    for number, part in enumerate(parts, 1):
        (folder / f"data_batch_{number}.bin").write_bytes(part.tobytes())
    (folder / "test_batch.bin").write_bytes(data[6:].tobytes())
    return data


def test_cifar_becomes_two_databases_and_a_mean():
    data = write_cifar(Path("in"))
    assert list(convert_cifar(Path("in"), Path("out")).values()) == [6, 1]
    assert records(Path("out/cifar10_train_lmdb")) == [
        (f"{n:05d}".encode(), Datum(channels=3, height=32, width=32, data=data[n, 1:].tobytes(), label=n))
        for n in range(6)
    ]
    assert [key for key, _ in records(Path("out/cifar10_test_lmdb"))] == [b"00000"]
    mean = data[:6, 1:].mean(0).reshape(3, 32, 32).astype(np.float32)
    np.testing.assert_array_equal(read_mean(Path("out/mean.binaryproto")), mean)
    with pytest.raises(DataError, match="'out/cifar10_train_lmdb' already exists"):
        convert_cifar(Path("in"), Path("out"))


def test_files_that_are_not_cifars():
    with pytest.raises(
        DataError, match="'in/data_batch_1.bin' cannot be read: No such file .*CIFAR-10's binary version"
    ):
        convert_cifar(Path("in"), Path("out"))
    write_cifar(Path("in"))
    Path("in/test_batch.bin").write_bytes(bytes(3074))
    with pytest.raises(DataError, match="'in/test_batch.bin' has 3074 bytes, not a multiple of CIFAR-10's record size"):
        convert_cifar(Path("in"), Path("out"))
    assert not Path("out").exists()


# -- label maps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "delimiters", "background", "items"),
    [
        ("cat\ndog\n", " ", False, [("cat", 0, "cat"), ("dog", 1, "dog")]),
        ("cat\ndog\n", " ", True, [("none_of_the_above", 0, "background"), ("cat", 1, "cat"), ("dog", 2, "dog")]),
        ("cat:5\n", " :", False, [("cat", 5, "cat")]),
        ("1,1,a person\n\n2,2,a bicycle", ",", False, [("1", 1, "a person"), ("2", 2, "a bicycle")]),
    ],
)
def test_label_maps(text: str, delimiters: str, background: bool, items: list[tuple[str, int, str]]):
    Path("map.txt").write_text(text)
    assert create_label_map(Path("map.txt"), Path("map.prototxt"), delimiters, background) == len(items)
    lines = [f'item {{\n  name: "{n}"\n  label: {label}\n  display_name: "{shown}"\n}}\n' for n, label, shown in items]
    assert Path("map.prototxt").read_text() == "".join(lines)
    assert read_label_map(Path("map.prototxt")) == {name: label for name, label, _ in items}


@pytest.mark.parametrize(
    ("text", "delimiters", "error", "message"),
    [
        ("cat 1\ndog\n", " ", DataError, "map.txt:2: has 1 fields, but the first line has 2"),
        ("a b c d\n", " ", DataError, "map.txt:1: has 4 fields"),
        ("cat one\n", " ", DataError, "map.txt:1: 'one' is not a label"),
        ("cat\n", "", ConfigError, "--delimiter is empty"),
    ],
)
def test_lists_of_classes_that_are_none(text: str, delimiters: str, error: type[Exception], message: str):
    Path("map.txt").write_text(text)
    with pytest.raises(error, match=message):
        create_label_map(Path("map.txt"), Path("map.prototxt"), delimiters)
    assert not Path("map.prototxt").exists()


def test_an_empty_label_map():
    Path("map.prototxt").write_text("# nothing\n")
    with pytest.raises(DataError, match="map.prototxt: has no names; `caffepy create_label_map` writes label maps"):
        read_label_map(Path("map.prototxt"))

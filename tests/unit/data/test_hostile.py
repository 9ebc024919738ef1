"""Data files that strangers made: a sentence that names the file, and no memory taken for what they only promise."""

from __future__ import annotations

import os
import resource
import struct
import time
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest

from caffepy.data.conversion.mnist_cifar import FILES, folder_reader
from caffepy.data.images import decode_image, resize_image
from caffepy.data.mean import read_mean
from caffepy.data.prefetch import Prefetcher
from caffepy.data.sources.databases import LmdbSource
from caffepy.data.sources.image_list import ImageListSource
from caffepy.data.workers import Workers
from caffepy.errors import DataError, RunError
from caffepy.formats.proto.caffe_pb2 import FLOAT, BlobProto, BlobShape
from caffepy.layers.input.hdf5 import Hdf5Source


def png(height: int, width: int) -> bytes:
    """The begin of a grey PNG."""
    head = b"IHDR" + struct.pack(">2I5B", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes(1 << 20))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head)) + rows


JPEG = b"\xff\xd8\xff\xe0\x00\x04ab\xff\xff\xc2\x00\x0b\x08" + struct.pack(">2H", 60000, 50000) + b"\x01\x01\x11\x00"


@pytest.mark.parametrize(
    "data, size", [(png(30000, 32000), "30000 x 32000"), (png(2**31, 1), "2147483648 x 1"), (JPEG, "60000 x 50000")]
)
def test_an_image_that_unpacks_to_gigabytes_is_not_unpacked(data: bytes, size: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=f"is an image of {size} pixels; the limit is 67108864"):
        decode_image(data)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 17


def test_a_size_that_cannot_be_made_is_named() -> None:
    with pytest.raises(DataError, match=r"cannot be transformed: OpenCV.s resize says [^\n]*$"):
        resize_image(np.zeros((3, 2, 2), np.uint8), 2**31 - 1, 2**31 - 1)


@pytest.mark.parametrize(
    "line, message",
    [
        (b"a\0.png 1", r"':2: the line has a NUL character"),
        (b"a.png 2147483648", r"':2: '2147483648' is not a label"),
        (b"a.png " + b"9" * 5000, rf"':2: '{'9' * 40}' is not a label"),
        ("a.png \u0663".encode(), "is not a label; a line is a path, a space"),
    ],
)
def test_a_line_that_no_list_has_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "list").write_bytes(b"good.png -1\n" + line)
    with pytest.raises(DataError, match=message):
        ImageListSource(tmp_path / "list")


def test_lists_and_images_that_are_no_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(DataError, match="cannot be read: it is a FIFO, not a regular file"):
        ImageListSource(tmp_path / "fifo")
    (tmp_path / "list").write_text(f"fifo 1\n/dev/zero 2\n{'x' * 5000} 3\n")
    source = ImageListSource(tmp_path / "list", f"{tmp_path}/")
    for number, message in enumerate(["it is a FIFO", "No such file", "File name too long"]):
        with pytest.raises(DataError, match=f"cannot be read: {message}"):
            source.read(number)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000])
def test_paths_that_are_none(name: str) -> None:
    for read in (LmdbSource, ImageListSource, read_mean, lambda path: Hdf5Source(path, ["x"])):
        with pytest.raises(DataError, match="does not exist|cannot be read|cannot be opened"):
            read(Path(name))


def test_a_mean_of_odd_length(tmp_path: Path) -> None:
    blob = BlobProto(shape=BlobShape(dim=[1, 1, 1]), raw_data=b"abcde", raw_data_type=FLOAT)
    (tmp_path / "mean").write_bytes(blob.SerializeToString())
    with pytest.raises(DataError, match="mean_file '.*/mean' has 5 bytes of raw_data, not a multiple of 4"):
        read_mean(tmp_path / "mean")


def test_a_mean_that_is_a_device() -> None:
    with pytest.raises(DataError, match="mean_file '/dev/zero' cannot be read: it is a device"):
        read_mean(Path("/dev/zero"))


def test_a_fifo_among_the_idx_files(tmp_path: Path) -> None:
    file = FILES["test"][0]
    os.mkfifo(tmp_path / file.name)
    with pytest.raises(DataError, match=f"has no {file.name}"):
        folder_reader(tmp_path)(file)


@pytest.mark.parametrize("kind", ["external storage", "external link", "would take 8589934588 bytes"])
def test_hdf5_that_reads_other_files_or_only_promises(tmp_path: Path, kind: str) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        if kind == "external link":
            file["x"] = h5py.ExternalLink("/etc/passwd", "x")
        elif kind == "external storage":
            file.create_dataset("x", (3,), "u1", external=[("/etc/passwd", 0, 3)])
        else:
            file.create_dataset("x", (2**31 - 1,), "f4", chunks=(1 << 20,), compression="gzip")
    (tmp_path / "list").write_text(str(tmp_path / "a.h5"))
    with pytest.raises(DataError, match=f"HDF5 file '.*/a.h5' cannot be read: .*{kind}"):
        Hdf5Source(tmp_path / "list", ["x"])


# -- readers that die --------------------------------------------------------------------------------------


class Mute:
    """A loader that fails and cannot say what it reads."""

    @property
    def reading(self) -> str:
        raise MemoryError

    def load(self, *arguments: object) -> None:
        raise KeyboardInterrupt

    def close(self) -> None:
        """Nothing is open."""


def test_a_reader_that_cannot_say_what_it_read_is_noticed_at_once() -> None:
    subject = Prefetcher([Mute()], lambda number: number, 1, 1, where="layer 'd'", timeout=300)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="layer 'd': reading failed: KeyboardInterrupt"):
        subject.get(0)


def test_a_reader_that_ends_without_a_word_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prefetcher, "_fail", lambda *_: None)
    subject = Prefetcher([Mute()], lambda number: number, 1, 1, where="layer 'd'", timeout=300)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="layer 'd': the prefetch thread has ended"):
        subject.get(0)


def test_workers_go_on_without_a_helper_that_was_killed() -> None:
    workers, done = Workers(3), list[int]()
    workers.run(done.append, range(50))
    workers._jobs.put(None)  # one of the helpers ends
    while all(thread.is_alive() for thread in workers._started):
        time.sleep(0.01)
    workers.run(done.append, range(50))
    assert sorted(done) == sorted([*range(50)] * 2)
    workers.close()

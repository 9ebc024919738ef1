"""MNIST: its idx files, where they come from, and the LMDBs that nets read.

Owns the format: big-endian words (magic number, sizes), then bytes. See http://yann.lecun.com/exdb/mnist/.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
import os
import struct
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images.datum import datum_shape, parse_datum
from caffepy.data.sources.lmdb import LmdbSource
from caffepy.data.sources.lmdb_write import record_key, write_datums
from caffepy.data.sources.record_write import check_free
from caffepy.errors import DataError, RunError
from caffepy.files import open_regular
from caffepy.proto import caffe_pb2

logger = logging.getLogger(__name__)

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
SUBSET = Path(__file__).parents[1] / "mnist_subset"
"""The digits that come with caffepy."""

_IMAGES_MAGIC, _LABELS_MAGIC = 2051, 2049
CLASSES = 10
"""Of digits."""
_MAX_BYTES = 600_000_000
"""An idx file is not read further than this: EMNIST's, the largest of the kind, has 547 MB."""


@dataclass(frozen=True)
class IdxFile:
    """One of the four files.

    Args:
        name: without .gz.
        size: of the original file, unpacked.
        sha256: of the original file, unpacked, so that it does not depend on who packed it.
    """

    name: str
    size: int
    sha256: str


FILES = {
    "train": (
        IdxFile(
            "train-images-idx3-ubyte", 47040016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
        ),
        IdxFile("train-labels-idx1-ubyte", 60008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    ),
    "test": (
        IdxFile("t10k-images-idx3-ubyte", 7840016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        IdxFile("t10k-labels-idx1-ubyte", 10008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    ),
}
"""Images and labels of each part."""

Opener = Callable[[IdxFile], bytes]
"""Gets a file's bytes, unpacked."""


def lmdb_paths(target: Path) -> dict[str, Path]:
    """Where the LMDB of each part lies in a folder."""
    return {part: target / f"mnist_{part}_lmdb" for part in FILES}


def build_lmdbs(target: Path, read: Opener, force: bool = False) -> dict[Path, int]:
    """Make `mnist_train_lmdb` and `mnist_test_lmdb` in a folder; one that holds the same digits already is left alone.

    Args:
        target: the folder.
        read: `fetch_file`, or what `folder_reader` gives.
        force: replace LMDBs that are there.

    Returns:
        The records in each of the two.

    Raises:
        DataError: files are missing or are not idx files, or an LMDB of other records is there already.
        RunError: fetching or writing failed.
    """
    paths = lmdb_paths(target)
    counts = {path: None if force else _count_of_same(path, FILES[part], read) for part, path in paths.items()}
    for path in (path for path, count in counts.items() if count is None):
        check_free(path, force)
    return {path: counts[path] or _build(path, FILES[part], read, force) for part, path in paths.items()}


def _build(path: Path, files: tuple[IdxFile, IdxFile], read: Opener, force: bool) -> int:
    images_file, labels_file = files
    images = parse_images(read(images_file), images_file.name)
    labels = parse_labels(read(labels_file), labels_file.name)
    if len(images) != len(labels):
        raise DataError(f"{images_file.name} has {len(images)} digits and {labels_file.name} {len(labels)} labels")
    return write_datums(path, digit_datums(images, labels), force)


def _count_of_same(path: Path, files: tuple[IdxFile, IdxFile], read: Opener) -> int | None:
    """How many digits an LMDB holds, None unless they are those of the two files; what would be fetched is not."""
    if not path.is_dir():
        return None
    try:
        count, contents = _as_idx(path)
    except DataError:
        return None
    for file, content in zip(files, contents, strict=True):
        wanted = file.sha256 if read is fetch_file else hashlib.sha256(read(file)).hexdigest()
        if hashlib.sha256(content).hexdigest() != wanted:
            return None
    return count


def _as_idx(path: Path) -> tuple[int, tuple[bytes, bytes]]:
    """The records of an LMDB and the two idx files that they came from.

    Raises:
        DataError: it cannot be read, or its images are not of one size.
    """
    source = LmdbSource(path)
    images, labels, shapes = bytearray(), bytearray(), set()
    for number in range(len(source)):
        datum, data = parse_datum(source.read(number))
        shapes.add(datum_shape(datum, len(data), "bytes"))
        images += data
        labels.append(min(max(datum.label, 0), 255))
        if len(shapes) > 1 or len(images) > _MAX_BYTES:
            raise DataError(f"LMDB '{path}' holds other images than digits")
    [(_, height, width)] = shapes
    images_header = struct.pack(">4I", _IMAGES_MAGIC, len(source), height, width)
    labels_header = struct.pack(">2I", _LABELS_MAGIC, len(source))
    return len(source), (images_header + bytes(images), labels_header + bytes(labels))


def digit_datums(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Iterator[tuple[bytes, caffe_pb2.Datum]]:
    """Keys and records as Caffe's `convert_mnist_data` makes them."""
    _, height, width = images.shape
    for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        datum = caffe_pb2.Datum(channels=1, height=height, width=width, data=image.tobytes(), label=label)
        yield record_key(number), datum


# -- idx -------------------------------------------------------------------------------------------------


def parse_images(content: bytes, where: str) -> NDArray[np.uint8]:
    """The images of an idx3 file: (N, H, W).

    Raises:
        DataError: it is none, or has another length than its header says.
    """
    count, height, width = _header(content, where, _IMAGES_MAGIC, ">3I", "images")
    pixels = _body(content, where, 16, count * height * width)
    return pixels.reshape(count, height, width)


def parse_labels(content: bytes, where: str, classes: int = CLASSES) -> NDArray[np.uint8]:
    """The labels of an idx1 file: (N,), all of them below `classes`.

    Raises:
        DataError: it is none, has another length than its header says, or a label that is too large.
    """
    (count,) = _header(content, where, _LABELS_MAGIC, ">I", "labels")
    labels = _body(content, where, 8, count)
    if labels.max() >= classes:
        raise DataError(f"{where}: label {int(labels.argmax())} is {labels.max()}; digits end at {classes - 1}")
    return labels


def _header(content: bytes, where: str, magic: int, sizes: str, what: str) -> tuple[int, ...]:
    if len(content) < 4 + struct.calcsize(sizes):
        raise DataError(f"{where}: has {len(content)} bytes, too few for an idx file of {what}")
    found = struct.unpack_from(">I", content)[0]
    if found != magic:
        raise DataError(f"{where}: is not an idx file of {what} (it begins with {found}, not {magic})")
    shape = struct.unpack_from(sizes, content, 4)
    if min(shape) == 0:
        raise DataError(f"{where}: holds no {what}")
    return shape


def _body(content: bytes, where: str, start: int, count: int) -> NDArray[np.uint8]:
    if len(content) - start != count:
        raise DataError(f"{where}: its header promises {count} bytes, {len(content) - start} are there; get it again")
    return np.frombuffer(content, np.uint8, count, start)


# -- where files come from -------------------------------------------------------------------------------


def folder_reader(folder: Path) -> Opener:
    """An opener of the files in a folder, packed by gzip or not."""

    def read(file: IdxFile) -> bytes:
        stem, _, kind = file.name.rpartition("-idx")
        names = [file.name, file.name + ".gz", f"{stem}.idx{kind}", f"{stem}.idx{kind}.gz"]
        path = next((folder / name for name in names if os.path.isfile(folder / name)), None)
        if path is None:
            raise DataError(f"'{folder}' has no {file.name} or {file.name}.gz")
        return read_idx(path)

    return read


def read_idx(path: Path) -> bytes:
    """The contents of an idx file, unpacked if its name ends in .gz.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with open_regular(path) as raw:
            return gzip.GzipFile(fileobj=raw).read(_MAX_BYTES) if path.suffix == ".gz" else raw.read(_MAX_BYTES)
    except (OSError, EOFError, zlib.error, MemoryError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"'{path}' cannot be read: {why}") from error


def fetch_file(file: IdxFile, mirrors: tuple[str, ...] = MIRRORS, timeout: float = 30.0) -> bytes:
    """One of MNIST's own files from the first mirror that gives it unharmed.

    Raises:
        RunError: no mirror did; the message says why for each.
    """
    failures = []
    for mirror in mirrors:
        address = f"{mirror}{file.name}.gz"
        try:
            logger.info("fetching %s", address)
            with urllib.request.urlopen(address, timeout=timeout) as answer:
                return _verified(answer.read(file.size), file)
        except (OSError, HTTPException, zlib.error, DataError) as error:
            failures.append(f"{address}: {error}")
    raise RunError(
        f"cannot fetch {file.name} ({'; '.join(failures)}); get the four files otherwise and give --from DIR, "
        "or take the digits that come with caffepy with --subset"
    )


def _verified(packed: bytes, file: IdxFile) -> bytes:
    unpacker = zlib.decompressobj(wbits=31)
    content = unpacker.decompress(packed, file.size + 1)
    digest = hashlib.sha256(content).hexdigest()
    if digest != file.sha256:
        raise DataError(f"SHA-256 of the unpacked file is {digest}, should be {file.sha256}")
    return content

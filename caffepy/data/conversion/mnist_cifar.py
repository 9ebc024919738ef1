"""MNIST and CIFAR-10 as databases (Caffe's `convert_mnist_data.cpp`, `convert_cifar_data.cpp`), and MNIST's download.

MNIST's files are in the idx format: big-endian words (magic number, sizes), then bytes. See
http://yann.lecun.com/exdb/mnist/.
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
from urllib.error import HTTPError

import numpy as np
from numpy.typing import NDArray

from caffepy.data.conversion.image_sets import Database
from caffepy.data.datum import datum_shape, parse_datum
from caffepy.data.mean import compute_mean, write_mean
from caffepy.data.sources.databases import LmdbSource, check_overwrite, record_key, write_datums
from caffepy.errors import DataError, RunError
from caffepy.formats.proto import caffe_pb2
from caffepy.utils.files import check_output, open_regular, read_data

logger = logging.getLogger(__name__)

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
SUBSET = Path(__file__).parents[1] / "mnist_subset"
"""The subset of MNIST in the package."""

_IMAGES_MAGIC, _LABELS_MAGIC = 2051, 2049
CLASSES = 10
"""Number of digit classes."""
_MAX_IDX_BYTES = 600_000_000
"""Read limit of an idx file; EMNIST's, the largest of the kind, has 547 MB."""


@dataclass(frozen=True)
class IdxFile:
    """One of MNIST's four files.

    Args:
        name: file name without .gz.
        size: unpacked size of the original file.
        sha256: hash of the original file, unpacked (independent of the compressor).
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
"""Image and label file of each split."""

IdxReader = Callable[[IdxFile], bytes]
"""Returns the unpacked content of a file."""


def lmdb_paths(target: Path) -> dict[str, Path]:
    """Return the LMDB path of each split."""
    return {split: target / f"mnist_{split}_lmdb" for split in FILES}


def build_lmdbs(target: Path, read: IdxReader, force: bool = False) -> dict[Path, int]:
    """Create `mnist_train_lmdb` and `mnist_test_lmdb`; an LMDB that already holds the same digits stays.

    Args:
        target: the folder of the LMDBs.
        read: `fetch_file`, or the result of `folder_reader`.
        force: replace existing LMDBs.

    Returns:
        The number of records of each LMDB.

    Raises:
        DataError: a file is missing or not an idx file, or an LMDB with other records exists.
        RunError: a download or writing failed.
    """
    paths = lmdb_paths(target)
    counts = {path: None if force else _count_of_same(path, FILES[split], read) for split, path in paths.items()}
    for path in (path for path, count in counts.items() if count is None):
        check_overwrite(path, force)
    return {path: counts[path] or _build(path, FILES[split], read, force) for split, path in paths.items()}


def _build(path: Path, files: tuple[IdxFile, IdxFile], read: IdxReader, force: bool) -> int:
    images_file, labels_file = files
    images = parse_images(read(images_file), images_file.name)
    labels = parse_labels(read(labels_file), labels_file.name)
    if len(images) != len(labels):
        raise DataError(f"{images_file.name} has {len(images)} digits and {labels_file.name} {len(labels)} labels")
    return write_datums(path, digit_datums(images, labels), force)


def _count_of_same(path: Path, files: tuple[IdxFile, IdxFile], read: IdxReader) -> int | None:
    """Return an LMDB's number of digits if they equal those of the two files, else None. Does not download."""
    if not path.is_dir():
        return None
    try:
        count, contents = _as_idx(path)
    except DataError:
        return None
    for file, content in zip(files, contents, strict=True):
        expected = file.sha256 if read is fetch_file else hashlib.sha256(read(file)).hexdigest()
        if hashlib.sha256(content).hexdigest() != expected:
            return None
    return count


def _as_idx(path: Path) -> tuple[int, tuple[bytes, bytes]]:
    """Return an LMDB's number of records and its idx files (images, labels)."""
    source = LmdbSource(path)
    images, labels, shapes = bytearray(), bytearray(), set()
    for number in range(len(source)):
        datum, data = parse_datum(source.read(number))
        shapes.add(datum_shape(datum, len(data), "bytes"))
        images += data
        labels.append(min(max(datum.label, 0), 255))
        if len(shapes) > 1 or len(images) > _MAX_IDX_BYTES:
            raise DataError(f"LMDB '{path}' does not hold MNIST's digits")
    [(_, height, width)] = shapes
    images_header = struct.pack(">4I", _IMAGES_MAGIC, len(source), height, width)
    labels_header = struct.pack(">2I", _LABELS_MAGIC, len(source))
    return len(source), (images_header + bytes(images), labels_header + bytes(labels))


def digit_datums(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Iterator[tuple[bytes, caffe_pb2.Datum]]:
    """Yield keys and Datums as Caffe's `convert_mnist_data` writes them."""
    _, height, width = images.shape
    for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        datum = caffe_pb2.Datum(channels=1, height=height, width=width, data=image.tobytes(), label=label)
        yield record_key(number), datum


# -- idx -------------------------------------------------------------------------------------------------


def parse_images(content: bytes, where: str) -> NDArray[np.uint8]:
    """Return the images of an idx3 file: (N, H, W).

    Raises:
        DataError: the content is not an idx3 file, or its length contradicts its header.
    """
    count, height, width = _header(content, where, _IMAGES_MAGIC, ">3I", "images")
    pixels = _body(content, where, 16, count * height * width)
    return pixels.reshape(count, height, width)


def parse_labels(content: bytes, where: str, classes: int = CLASSES) -> NDArray[np.uint8]:
    """Return the labels of an idx1 file: (N,).

    Raises:
        DataError: the content is not an idx1 file, its length contradicts its header, or a label is not below
            `classes`.
    """
    (count,) = _header(content, where, _LABELS_MAGIC, ">I", "labels")
    labels = _body(content, where, 8, count)
    if labels.max() >= classes:
        raise DataError(f"{where}: label {int(labels.argmax())} is {labels.max()}; digits end at {classes - 1}")
    return labels


def _header(content: bytes, where: str, magic: int, sizes: str, what: str) -> tuple[int, ...]:
    if len(content) < 4 + struct.calcsize(sizes):
        raise DataError(f"{where}: has {len(content)} bytes, too few for an idx file of {what}")
    actual = struct.unpack_from(">I", content)[0]
    if actual != magic:
        raise DataError(f"{where}: is not an idx file of {what} (it begins with {actual}, not {magic})")
    shape = struct.unpack_from(sizes, content, 4)
    if min(shape) == 0:
        raise DataError(f"{where}: holds no {what}")
    return shape


def _body(content: bytes, where: str, start: int, count: int) -> NDArray[np.uint8]:
    if len(content) - start != count:
        raise DataError(
            f"{where}: its header announces {count} bytes, but it has {len(content) - start}; download it again"
        )
    return np.frombuffer(content, np.uint8, count, start)


# -- where files come from -------------------------------------------------------------------------------


def folder_reader(folder: Path) -> IdxReader:
    """Return a function that reads idx files from a folder, gzipped or not."""

    def read(file: IdxFile) -> bytes:
        stem, _, kind = file.name.rpartition("-idx")
        names = [file.name, file.name + ".gz", f"{stem}.idx{kind}", f"{stem}.idx{kind}.gz"]
        path = next((folder / name for name in names if os.path.isfile(folder / name)), None)
        if path is None:
            raise DataError(f"'{folder}' has no {file.name} or {file.name}.gz")
        return read_idx(path)

    return read


def read_idx(path: Path) -> bytes:
    """Read an idx file; decompress it if its name ends in .gz.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with open_regular(path) as raw:
            return gzip.GzipFile(fileobj=raw).read(_MAX_IDX_BYTES) if path.suffix == ".gz" else raw.read(_MAX_IDX_BYTES)
    except (OSError, EOFError, zlib.error, MemoryError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"'{path}' cannot be read: {reason}") from error


def fetch_file(file: IdxFile, mirrors: tuple[str, ...] = MIRRORS, timeout: float = 30.0) -> bytes:
    """Download a MNIST file from the first mirror that returns it with the right hash.

    Raises:
        RunError: all mirrors failed; the message has each mirror's error.
    """
    failures = []
    for mirror in mirrors:
        url = f"{mirror}{file.name}.gz"
        try:
            logger.info("fetching %s", url)
            with urllib.request.urlopen(url, timeout=timeout) as response:
                return _unpack_verified(response.read(file.size), file)
        except (OSError, HTTPException, zlib.error, DataError) as error:
            failures.append(f"{url}: {error}")
            if isinstance(error, HTTPError):
                error.close()  # it holds the connection; else Python 3.14 warns
    raise RunError(
        f"cannot fetch {file.name} ({'; '.join(failures)}); download the four files yourself and pass --from DIR, "
        "or use the subset in the package with --subset"
    )


def _unpack_verified(packed: bytes, file: IdxFile) -> bytes:
    unpacker = zlib.decompressobj(wbits=31)
    content = unpacker.decompress(packed, file.size + 1)
    digest = hashlib.sha256(content).hexdigest()
    if digest != file.sha256:
        raise DataError(f"SHA-256 of the unpacked file is {digest}, should be {file.sha256}")
    return content


# -- MNIST ---------------------------------------------------------------------------------------------


_MAX_CLASSES = 128
"""Caffe's converter stores labels as C char."""


def convert_digits(images_file: Path, labels_file: Path, target: Database, pairs_seed: int | None = None) -> int:
    """Create a database from an idx file of images and one of labels, gzipped or not.

    With `pairs_seed` of as many random pairs as there are images, as Caffe's `convert_mnist_siamese_data.cpp`: a Datum
    has both images as its channels, and the label 1 if their labels are equal, else 0.

    Returns:
        The number of records.

    Raises:
        DataError: a file is not an idx file, the numbers of images and labels differ, or the database exists.
        RunError: writing failed.
    """
    check_overwrite(target.path, target.force)
    images, labels = _read_digits(images_file, labels_file)
    datums = digit_datums(images, labels)
    if pairs_seed is not None:
        pairs = np.random.default_rng(pairs_seed).integers(len(images), size=(len(images), 2))
        datums = _pair_datums(images, labels, pairs)
    return write_datums(target.path, datums, target.force, target.backend)


def _pair_datums(
    images: NDArray[np.uint8], labels: NDArray[np.uint8], pairs: NDArray[np.int64]
) -> Iterator[tuple[bytes, caffe_pb2.Datum]]:
    _, height, width = images.shape
    for number, pair in enumerate(pairs):
        first, second = labels[pair]
        data = images[pair].tobytes()
        datum = caffe_pb2.Datum(channels=2, height=height, width=width, data=data, label=int(first == second))
        yield record_key(number), datum


def _read_digits(images_file: Path, labels_file: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the images and labels of two idx files: (N, H, W) and (N,)."""
    images = parse_images(read_idx(images_file), str(images_file))
    labels = parse_labels(read_idx(labels_file), str(labels_file), _MAX_CLASSES)
    if len(images) != len(labels):
        raise DataError(f"{images_file} has {len(images)} images and {labels_file} {len(labels)} labels")
    return images, labels


# -- CIFAR-10 ------------------------------------------------------------------------------------------


_SIDE = 32
_RECORD_BYTES = 1 + 3 * _SIDE * _SIDE
"""Bytes of a record: a label and three planes."""
_MAX_CIFAR_BYTES = 1 << 30
_SPLITS = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]}


def convert_cifar(source: Path, target: Path, backend: str = "lmdb", force: bool = False) -> dict[Path, int]:
    """Create ``cifar10_train_lmdb``, ``cifar10_test_lmdb`` and the training set's ``mean.binaryproto`` in a folder.

    Args:
        source: folder of CIFAR-10's binary version.
        target: folder of the databases.
        backend: lmdb or leveldb; also the suffix of the databases' names.
        force: replace existing databases and an existing mean.

    Returns:
        The number of records of each database.

    Raises:
        ConfigError: the mean exists.
        DataError: a file is missing or not from CIFAR-10, or a database exists.
        RunError: writing failed.
    """
    paths = {split: target / f"cifar10_{split}_{backend}" for split in _SPLITS}
    for path in paths.values():
        check_overwrite(path, force)
    mean = target / "mean.binaryproto"
    if os.path.lexists(mean):
        check_output(mean, force)
    images = {split: [_read(source / name) for name in names] for split, names in _SPLITS.items()}
    counts = {path: write_datums(path, _datums(images[split]), force, backend) for split, path in paths.items()}
    write_mean(mean, compute_mean(paths["train"], backend))
    return counts


def _read(path: Path) -> NDArray[np.uint8]:
    """Read the records of a file: (N, 1 + 3072)."""
    advice = "; pass the folder of CIFAR-10's binary version"
    content = read_data(path, _MAX_CIFAR_BYTES, f"'{path}'", advice)
    if not content or len(content) % _RECORD_BYTES:
        raise DataError(
            f"'{path}' has {len(content)} bytes, not a multiple of CIFAR-10's record size {_RECORD_BYTES}; "
            "download it again"
        )
    return np.frombuffer(content, np.uint8).reshape(-1, _RECORD_BYTES)


def _datums(files: list[NDArray[np.uint8]]) -> Iterator[tuple[bytes, caffe_pb2.Datum]]:
    """Yield keys and Datums as Caffe writes them, with keys of five digits."""
    number = 0
    for records in files:
        for record in records:
            data, label = record[1:].tobytes(), int(record[0])
            datum = caffe_pb2.Datum(channels=3, height=_SIDE, width=_SIDE, data=data, label=label)
            yield f"{number:05d}".encode(), datum
            number += 1

"""Everything in an HDF5 snapshot, read once and in one order, with a checksum over it. Files from strangers are refused
where they read other files, hold one group in another twice, or unpack to far more than their own size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from caffepy.config.checksum import extend_checksum
from caffepy.hdf5 import Dataset, Group, check_dataset, find_object

_MAX_LEVELS = 100
"""Groups within each other."""
_SMALL = 1 << 26
_MAX_PACKED = 64
"""A file may unpack to `_SMALL` bytes and this many times its own: Caffe does not pack, and weights hardly can be."""
_FLOATS, _INTEGERS = ("f2", "f4", "f8"), ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")


@dataclass(frozen=True)
class Content:
    """A dataset's values.

    Args:
        path: the names from the root on.
        array: the values, in the dataset's own type.
        attributes: names of its group's attributes.
    """

    path: tuple[str, ...]
    array: np.ndarray
    attributes: frozenset[str]

    def floats(self) -> np.ndarray:
        """The values of a blob.

        Raises:
            TypeError: they are of a type in which no Caffe stores blobs.
        """
        if self.array.dtype.str[1:] not in (*_FLOATS, "i4", "i8"):
            raise TypeError(f"'{'/'.join(self.path)}' is of type {self.array.dtype}; blobs are of floats")
        return np.asarray(self.array, np.float32)

    def number(self) -> int:
        """The value of an array of one number.

        Raises:
            TypeError, ValueError: it is something else.
        """
        if self.array.dtype.kind not in "iu" or self.array.size != 1:
            raise ValueError(f"'{'/'.join(self.path)}' is no whole number but {self.array.dtype}{self.array.shape}")
        return int(self.array.ravel()[0])

    def text(self) -> str:
        """The value of a string.

        Raises:
            ValueError: it is something else, or not UTF-8.
        """
        value = self.array[()]
        if not isinstance(value, bytes):
            raise ValueError(f"'{'/'.join(self.path)}' is no string but {self.array.dtype}{self.array.shape}")
        return bytes(value).decode()


class Contents:
    """All datasets of a file, to be iterated once.

    Args:
        file: its root group.

    Raises, while it is iterated:
        ValueError, TypeError, OSError: the file is damaged or refused.
    """

    def __init__(self, file: Group) -> None:
        self._file = file
        self.checksum = 0
        """Of what was read so far."""
        self.counts: dict[str, int] = {}
        """Datasets read so far, by the first name of their path."""

    def __iter__(self) -> Iterator[Content]:
        size, length = 0, self._file.file.length
        for path, dataset, attributes in datasets(self._file):
            size = check_dataset(dataset, size)
            if size > _SMALL + length * _MAX_PACKED:
                raise ValueError(f"'{dataset.name}' would bring what is read of {length} bytes to {size}; is it whole?")
            array = _read(dataset)
            self.checksum = _extend(self.checksum, path, array)
            self.counts[path[0]] = self.counts.get(path[0], 0) + 1
            yield Content(path, array, attributes)

    def number(self, name: str) -> int | None:
        """An attribute of the root that is a number; None if there is none.

        Raises:
            ValueError: the attribute is something else.
        """
        if name not in self._file.attributes:
            return None
        value = self._file.attributes[name]
        if value is None:
            raise ValueError(f"the attribute '{name}' is no whole number")
        return value


def content_checksum(file: Group) -> tuple[int, list[tuple[str, ...]]]:
    """The CRC-32C of all datasets with their paths, types and shapes, and these paths; of a file of our own."""
    checksum, paths = 0, []
    for path, dataset, _ in datasets(file):
        checksum = _extend(checksum, path, _read(dataset))
        paths.append(path)
    return checksum, paths


def _extend(checksum: int, path: tuple[str, ...], array: np.ndarray) -> int:
    title = f"{'/'.join(path)}\0{array.dtype.str}\0{array.shape}\0"
    return extend_checksum(extend_checksum(checksum, title.encode()), array.tobytes())


def _read(dataset: Dataset) -> np.ndarray:
    """The values, of numbers or of fixed or variable strings.

    Raises:
        TypeError: they are of another type.
    """
    kind = dataset.dtype
    if kind is not None and (kind.str[1:] in (*_FLOATS, *_INTEGERS) or kind.kind == "S"):
        return dataset.read()
    if dataset.is_text and dataset.shape == ():
        return np.array(dataset.text())
    raise TypeError(f"'{dataset.name}' is of type {dataset.kind}, which no snapshot holds")


def datasets(file: Group) -> Iterator[tuple[tuple[str, ...], Dataset, frozenset[str]]]:
    """Path, dataset and the names of its group's attributes; those of a group before those of the groups in it."""
    seen = set()
    waiting: list[tuple[tuple[str, ...], Group]] = [((), file)]
    while waiting:
        path, group = waiting.pop()
        if group.address in seen or len(path) > _MAX_LEVELS:
            raise ValueError(f"the group '{'/'.join(path)[:200]}' is there twice, in itself or too deep in others")
        seen.add(group.address)
        attributes = frozenset(group.attributes) if path else frozenset()
        inner = []
        for name in sorted(group.links, key=lambda name: (len(name), name)):
            group.file.charge(sum(map(len, path)))  # long paths of many datasets take time as well
            item = find_object(group, name)
            if isinstance(item, Dataset):
                yield (*path, name), item, attributes
            elif isinstance(item, Group):
                inner.append(((*path, name), item))
        waiting += reversed(inner)

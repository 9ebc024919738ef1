"""HDF5 files from strangers: what would read another file, or take far more memory than the file has bytes, is refused.

Owns the opening of HDF5 files for reading; data files and snapshots share it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caffepy.errors import UserError
from caffepy.files import open_regular

if TYPE_CHECKING:
    import h5py

_MAX_LINKS = 16
"""Soft links in a row, as in HDF5 itself."""
_SMALL = 1 << 26
"""Bytes that a dataset may always have."""
_MAX_PACKED = 1032
"""Bytes that deflate makes of one at most: no filter in use packs more densely."""
_CHUNK_BYTES = 4096
"""What HDF5 takes for each chunk of a dataset while it is read, however small the chunk is."""
_DAMAGE = (ArithmeticError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
"""What h5py raises for damaged files."""


@contextmanager
def open_hdf5(path: Path, failure: type[UserError], name: str = "HDF5 file") -> Iterator[h5py.File]:
    """Open a regular HDF5 file for reading.

    Args:
        path: the file.
        failure: the kind of error to raise.
        name: what messages call the file.

    Raises:
        failure: it cannot be opened; or h5py or a function of this module raised an error in the block.
    """
    import h5py

    try:
        open_regular(path).close()
        with h5py.File(path, "r") as file:
            yield file
    except _DAMAGE as error:
        raise failure(f"{name} '{path}' cannot be read: {_said(error)}") from error


def _said(error: Exception) -> str:
    """The first line of an error's message, without the quotes of a KeyError."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    said = str(error.args[0]) if error.args else ""
    return said.partition("\n")[0] or ("out of memory" if isinstance(error, MemoryError) else type(error).__name__)


def find_object(group: h5py.Group, name: str) -> Any:
    """The group or dataset of a path below a group, None if there is none; soft links are followed, others are not.

    Raises:
        ValueError: an external link, which names another file, or too many links.
        KeyError, OSError, RuntimeError: the file is damaged.
    """
    return _find(group, name, [_MAX_LINKS])


def _find(group: Any, name: str, links: list[int]) -> Any:
    import h5py

    item = group.file if name.startswith("/") else group
    for part in name.split("/"):
        if part in ("", "."):
            continue
        if not isinstance(item, h5py.Group) or (link := item.get(part, getlink=True)) is None:
            return None
        if isinstance(link, h5py.SoftLink):
            links[0] -= 1
            if links[0] < 0:
                raise ValueError(f"'{name}' is reached by more than {_MAX_LINKS} links")
            item = _find(item, link.path, links)
        elif isinstance(link, h5py.HardLink):
            item = item[part]
        else:
            raise ValueError(f"'{part}' is an external link, which would read another file; copy the data into one")
    return item


def check_dataset(dataset: h5py.Dataset, before: int = 0) -> int:
    """Refuse a dataset that reads other files, or that is far larger than what is stored of it. Nothing is read.

    Args:
        dataset: found by `find_object`.
        before: bytes of the datasets that are read from the file besides: many names may mean the same bytes.

    Returns:
        The bytes that all of them take with this one.

    Raises:
        ValueError: external storage, a virtual dataset, or a size that the file cannot fill.
        OSError, RuntimeError, TypeError: the file is damaged, or its type is none of numpy's.
    """
    import h5py

    layout, name = dataset.id.get_create_plist(), dataset.name
    if layout.get_layout() == h5py.h5d.VIRTUAL:  # first: asking for the shape may open the other files
        raise ValueError(f"'{name}' is a virtual dataset, which would read other files; copy the data into one")
    if layout.get_external_count():
        raise ValueError(f"'{name}' has external storage, which would read another file; copy the data into it")
    chunked = layout.get_layout() == h5py.h5d.CHUNKED
    shape, cell = dataset.shape or (), layout.get_chunk() if chunked else ()
    size: int = max(math.prod(shape), math.prod(cell)) * dataset.id.get_type().get_size()
    if chunked:
        count = math.prod(-(-length // part) for length, part in zip(shape, cell, strict=True))
        size = max(size, count * _CHUNK_BYTES)
    length = os.stat(dataset.file.filename).st_size
    stored, packed = min(dataset.id.get_storage_size(), length), _MAX_PACKED if chunked else 1
    if size > max(_SMALL, stored * packed) or before + size > _SMALL + length * packed:
        raise ValueError(f"'{name}' would take {size} bytes, but the file has only {stored} of it; is it whole?")
    return before + size

"""Damages HDF5 files as somebody would who means harm: objects that read other files, sizes, types, links."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import cache
from typing import Any

import h5py
import numpy as np
from fuzz.mutate import Random

_SIZES = (0, 1, 3, 7, 2**16, 2**31 - 1, 2**31, 2**40, 2**62)
_KINDS: tuple[Any, ...] = (
    "f2", "f4", "f8", ">f4", "i1", "i4", ">i8", "u8", "S5", "c8", "?", "V3", h5py.string_dtype(), h5py.ref_dtype,
    np.dtype([("a", "f4"), ("b", "S2")]), h5py.vlen_dtype(np.float32), np.dtype(("f4", (2, 3))),
    h5py.enum_dtype({"A": 0}),
)  # fmt: skip
_FILTERS: tuple[dict[str, Any], ...] = ({}, {"compression": "gzip"}, {"shuffle": True}, {"fletcher32": True})
_REFUSALS = (KeyError, OSError, RuntimeError, TypeError, ValueError)
_OTHER = "/proc/self/environ"


def damage_hdf5(data: bytes, random: Random, seal: Callable[[h5py.File], None] | None = None) -> bytes:
    """One to three changes to the objects of a whole file.

    Args:
        data: the file.
        random: decides what is changed.
        seal: called at the end, to bring checksums up to date.
    """
    buffer = io.BytesIO(data)
    with h5py.File(buffer, "r+") as file:
        for _ in range(random.choice((1, 1, 2, 3))):
            name, change = random.choice(_names(data)), random.choice(_CHANGES)
            with contextlib.suppress(*_REFUSALS):
                if name in file:
                    change(file, name, random)
        if seal is not None:
            with contextlib.suppress(*_REFUSALS):  # what is there now may have no checksum
                seal(file)
    return buffer.getvalue()


@cache
def _names(data: bytes) -> list[str]:
    """All objects of a seed."""
    found: list[str] = []
    with h5py.File(io.BytesIO(data)) as file:
        file.visit(found.append)
    return found


def _replace(file: h5py.File, name: str, random: Random) -> None:
    """Another type or shape, or the size of a bomb."""
    del file[name]
    shape = tuple(random.choice(_SIZES) for _ in range(random.choice((0, 1, 1, 2, 4))))
    more: dict[str, Any] = dict(random.choice(_FILTERS))
    if shape and random.random() < 0.7:
        more["chunks"] = tuple(min(max(size, 1), random.choice((1, 64, 1 << 20))) for size in shape)
        more["maxshape"] = tuple(None for _ in shape)
    elif not shape or max(shape) > 1 << 16:
        more = {}
    _try(lambda: file.create_dataset(name, shape, random.choice(_KINDS), **more))


def _external(file: h5py.File, name: str, random: Random) -> None:
    del file[name]
    _try(lambda: file.create_dataset(name, (64,), random.choice(("u1", "f4")), external=[(_OTHER, 0, 64)]))


def _virtual(file: h5py.File, name: str, random: Random) -> None:
    layout = h5py.VirtualLayout(shape=(random.choice((4, 100, 2**31)),), dtype="f4")
    source = h5py.VirtualSource(random.choice((".", _OTHER, "other.h5")), random.choice(("x", name)), (4,))
    _try(lambda: layout.__setitem__(slice(4), source))  # a name with % is none for it
    del file[name]
    _try(lambda: file.create_virtual_dataset(name, layout))


def _link(file: h5py.File, name: str, random: Random) -> None:
    """A link to another file, to itself or to its own group."""
    target = random.choice((h5py.ExternalLink("/proc/self/mem", "x"), h5py.SoftLink(f"/{name}"), h5py.SoftLink("/")))
    del file[name]
    file[name] = target


def _hard_link(file: h5py.File, name: str, random: Random) -> None:
    other = random.choice((name, name.rpartition("/")[0] or "/"))
    _try(lambda: file.__setitem__(f"{name}_{random.randrange(9)}", file[other]))


def _remove(file: h5py.File, name: str, _: Random) -> None:
    del file[name]


def _move(file: h5py.File, name: str, random: Random) -> None:
    folder = name.rpartition("/")[0]
    new = random.choice(("0", "1", "99", "100", "007", "²", "x" * 3000, "a/b/c", "näch", "%2F", "%"))
    _try(lambda: file.move(name, f"{folder}/{new}"))


def _group(file: h5py.File, name: str, random: Random) -> None:
    del file[name]
    _try(lambda: file.create_group(name + "/g" * random.choice((1, 50, 200))))


def _attribute(file: h5py.File, name: str, random: Random) -> None:
    holder = file[random.choice((name, "/"))]
    key = random.choice((*file.attrs.keys(), "caffepy_quoted", "caffepy_crc32c", "caffepy_blobs"))
    value = random.choice((-1, 0, 2**63, "text", np.zeros(3), np.float64("nan"), h5py.Empty("f4")))
    _try(lambda: holder.attrs.__setitem__(key, value))


def reads_others(item: h5py.Dataset) -> bool:
    """Whether a dataset is of other files, which ends the process where its own file is a buffer."""
    layout = item.id.get_create_plist()
    return bool(layout.get_layout() == h5py.h5d.VIRTUAL or layout.get_external_count())


def _values(file: h5py.File, name: str, random: Random) -> None:
    """Other numbers in an array of its own shape."""
    item = file[name]
    plain = isinstance(item, h5py.Dataset) and not reads_others(item)
    if plain and item.shape and item.dtype.kind in "fiu" and item.size < 1 << 16:
        value = random.choice((0, 1, -1, 255, 2**31 - 1, float("inf"), float("nan"), 1e300))
        with np.errstate(all="ignore"):
            values = np.full(item.shape, value, np.float64).astype(item.dtype)
        _try(lambda: item.__setitem__(..., values))


def _try(change: Callable[[], Any]) -> None:
    """HDF5 refuses some of what is asked of it; the file stays as it was then."""
    with contextlib.suppress(*_REFUSALS):
        change()


_CHANGES = (_replace, _replace, _external, _virtual, _link, _hard_link, _remove, _move, _group, _attribute, _values)

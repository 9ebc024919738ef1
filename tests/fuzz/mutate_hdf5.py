"""Damages HDF5 files on purpose: objects that read other files, sizes, types, links; addresses in their structure."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import cache
from typing import Any

import h5py
import numpy as np
from fuzz.mutate import INTEGERS, Random

_SIZES = (0, 1, 3, 7, 2**16, 2**31 - 1, 2**31, 2**40, 2**62)
_KINDS: tuple[Any, ...] = (
    *["f2", "f4", "f8", ">f4", "i1", "i4", ">i8", "u8", "S5", "c8", "?", "V3"],
    *(h5py.string_dtype(), h5py.ref_dtype, np.dtype([("a", "f4"), ("b", "S2")]), h5py.vlen_dtype(np.float32)),
    *(np.dtype(("f4", (2, 3))), h5py.enum_dtype({"A": 0})),
)
_FILTERS: tuple[dict[str, Any], ...] = ({}, {"compression": "gzip"}, {"shuffle": True}, {"fletcher32": True})
_REFUSALS = (KeyError, OSError, RuntimeError, TypeError, ValueError)
_OTHER = "/proc/self/environ"


def damage_hdf5(data: bytes, random: Random, seal: Callable[[h5py.File, io.BytesIO], None] | None = None) -> bytes:
    """One to three changes to the objects of a whole file.

    Args:
        data: the file.
        random: decides what is changed.
        seal: called with the open file and its bytes at the end, to bring checksums up to date.
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
                seal(file, buffer)
    return buffer.getvalue()


_SIGNATURES = (
    *b"TREE SNOD HEAP GCOL FRHP FHDB FHIB BTHD BTLF BTIN OHDR OCHK FAHD FADB EAHD EAIB EASB EADB".split(),
    b"\x89HDF",
)
"""Of superblocks, object headers, groups, heaps and indexes of chunks."""


def damage_structure(data: bytes, random: Random) -> bytes:
    """One to four words of a file's structure changed: counts, sizes, and addresses, which then form loops."""
    places, addresses = _structure(data)
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        if random.random() < 0.5:  # an address: to another structure, often one that it is part of
            at, size, value = random.choice(addresses or places), 8, random.choice(places)
        else:
            at = random.choice(places) + random.randrange(random.choice((8, 32, 96)))
            size = random.choice((1, 2, 4, 8))
            value = random.choice((*INTEGERS, len(data), len(data) - 1, random.choice(places)))
        if at + size <= len(changed):
            changed[at : at + size] = (value & (1 << 8 * size) - 1).to_bytes(size, "little")
    return bytes(changed)


@cache
def _structure(data: bytes) -> tuple[list[int], list[int]]:
    """Where structures begin, and where their addresses are stored."""
    places = sorted(at for signature in _SIGNATURES for at in _all(data, signature))
    words = [at for at in range(len(data) - 8) if 48 <= int.from_bytes(data[at : at + 8], "little") < len(data)]
    pointed = {int.from_bytes(data[at : at + 8], "little") for at in words}
    headers = [
        at for at in sorted(pointed) if data[at : at + 2] == b"\x01\x00" and data[at + 4 : at + 8] == b"\x01\0\0\0"
    ]
    places += headers
    return places, [at for at in words if int.from_bytes(data[at : at + 8], "little") in set(places)]


def _all(data: bytes, signature: bytes) -> list[int]:
    found, at = [], data.find(signature)
    while at >= 0:
        found.append(at)
        at = data.find(signature, at + 1)
    return found


def structured_files() -> list[bytes]:
    """Files with `data` and `label` in every form of groups, attributes and indexes of chunks."""
    found = []
    packed: dict[str, Any] = {"compression": "gzip", "shuffle": True, "fletcher32": True}
    for version in ("earliest", "v108", "latest"):
        for limit, more in (((None, 2), {}), ((None, None), packed), ((300, 2), packed), ((300, 2), {})):
            buffer = io.BytesIO()
            with h5py.File(buffer, "w", libver=(version, "latest")) as file:
                values = np.arange(600, dtype=np.float32).reshape(300, 2)
                file.create_dataset("data", data=values, chunks=(2, 1), maxshape=limit, **more)
                file["label"] = np.arange(300)
                for number in range(12):
                    file.create_group(f"group {number}").attrs["x"] = number
                    file.attrs[f"attribute {number}"] = number
                file["text"], file["soft"] = "a string", h5py.SoftLink("/data")
            found.append(buffer.getvalue())
    return found


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

"""The reader of HDF5 files: what h5py writes is read alike; damaged and hostile files are refused in short time."""

from __future__ import annotations

import contextlib
import io
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.errors import DataError
from caffepy.formats.hdf5 import Dataset, Group, check_dataset, find_object, open_hdf5, read_hdf5


def made(path: Path, fill: Callable[[Any], object]) -> Path:
    with h5py.File(path, "w") as file:
        fill(file)
    return path


def read(path: Path, name: str = "data") -> Any:
    with open_hdf5(path, DataError) as file:
        dataset = find_object(file, name)
        return dataset.read() if isinstance(dataset, Dataset) else None


def test_soft_links_and_packed_data_are_read(tmp_path: Path) -> None:
    def fill(file: Any) -> None:
        file.create_dataset("group/values", data=np.zeros(1 << 25, np.float32), compression="gzip", compression_opts=9)
        file["data"] = h5py.SoftLink("other")
        file["other"] = h5py.SoftLink("/group/./values")

    path = made(tmp_path / "good.h5", fill)
    assert read(path).size == 1 << 25 and path.stat().st_size < 300_000
    assert read(path, "absent") is None and read(path, "group/values/0") is None


def test_many_names_of_one_dataset_are_counted_each(tmp_path: Path) -> None:
    def fill(file: Any) -> None:
        file["0"] = np.zeros(1 << 20, np.float32)

    taken: int = 0
    with (
        pytest.raises(DataError, match="'/0' would take 4194304 bytes"),
        open_hdf5(made(tmp_path / "bad.h5", fill), DataError) as file,
    ):
        for _ in range(100):
            dataset = find_object(file, "0")
            assert isinstance(dataset, Dataset)
            taken = check_dataset(dataset, taken)
    assert taken == 17 << 22


@pytest.mark.parametrize(
    "error", [IndexError("a\nb"), KeyError("a"), MemoryError(), OverflowError("a"), OSError("a"), RecursionError("a")]
)
def test_errors_name_the_file(tmp_path: Path, error: Exception) -> None:
    path = made(tmp_path / "x.h5", lambda file: None)
    with (
        pytest.raises(DataError, match=r"snapshot '.*/x.h5' cannot be read: (a|out of memory)$"),
        open_hdf5(path, DataError, "snapshot"),
    ):
        raise error


# -- what h5py writes ------------------------------------------------------------------------------------

VERSIONS = ("earliest", "v108", ("v110", "v110"), "latest")
OLD_CHUNKS = VERSIONS[:2]
KINDS = ("<f2", "<f4", "<f8", ">f4", ">f8", "i1", "u2", "<i4", ">i8", "u8", "S5")


@st.composite
def datasets(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `create_dataset`."""
    shape = draw(st.lists(st.sampled_from((1, 2, 5, 17, 40)), min_size=1, max_size=3).map(tuple))
    if draw(st.integers(0, 9)) == 0:
        shape = (draw(st.sampled_from((3000, 20000))),)
    made: dict[str, Any] = {"shape": shape, "dtype": draw(st.sampled_from(KINDS))}
    if draw(st.booleans()):
        made["chunks"] = tuple(min(draw(st.sampled_from((1, 2, 3, 7, 40))), length) for length in shape)
        made["compression"] = draw(st.sampled_from((None, "gzip")))
        made["shuffle"], made["fletcher32"] = draw(st.booleans()), draw(st.booleans())
        if draw(st.booleans()):
            made["maxshape"] = tuple(draw(st.sampled_from((None, length, 2 * length))) for length in shape)
        if draw(st.booleans()):
            made["fillvalue"] = np.array(3).astype(made["dtype"])
    return made


@settings(deadline=None, max_examples=60)
@given(
    version=st.sampled_from(VERSIONS),
    block=st.sampled_from((0, 512, 2048)),
    groups=st.sampled_from((1, 3, 300)),
    attributes=st.sampled_from((0, 2, 12)),
    made=st.lists(datasets(), min_size=1, max_size=3),
    filled=st.sampled_from((0.0, 0.5, 1.0)),
    seed=st.integers(0, 99),
)
def test_files_of_h5py_are_read_as_h5py_reads_them(
    version: Any, block: int, groups: int, attributes: int, made: list[dict[str, Any]], filled: float, seed: int
) -> None:
    buffer, random = io.BytesIO(), np.random.default_rng(seed)
    with h5py.File(buffer, "w", libver=version, userblock_size=block) as file:
        for number in range(groups):
            file.create_group(f"g{number}")
        for number in range(attributes):
            file["g0"].attrs[f"a{number}"] = number
        for number, arguments in enumerate(made):
            dataset = file.create_dataset(f"inner/{number}", **arguments)
            rows = int(filled * len(dataset))
            dataset[:rows] = (random.random((rows, *dataset.shape[1:])) * 100).astype(dataset.dtype)
        file["scalar"] = 3.5
    root = read_hdf5(buffer)
    if groups > 8 and version != "earliest":
        with pytest.raises(ValueError, match="a group with an index of HDF5 1.8 .*h5repack"):
            find_object(root, "g0")
        return
    group = find_object(root, "g0")
    assert isinstance(group, Group)
    indexed = attributes > 8 and version != "earliest"
    assert group.attributes == {f"a{number}": number for number in range(0 if indexed else attributes)}
    with h5py.File(buffer) as file:
        assert set(root.links) == set(file)
        for name in ("scalar", *(f"inner/{number}" for number in range(len(made)))):
            wanted = file[name]
            if wanted.chunks and version not in OLD_CHUNKS:
                with pytest.raises(ValueError, match=f"'/{name}' has an index of chunks of HDF5 1.10 .*h5repack"):
                    find_object(root, name)
                continue
            found = find_object(root, name)
            assert isinstance(found, Dataset)
            assert found.stored_bytes == wanted.id.get_storage_size()
            np.testing.assert_array_equal(found.read(), wanted[()], strict=True)
            if wanted.dtype.kind in "fiu" and wanted.shape:
                np.testing.assert_array_equal(found.read(np.float32), wanted.astype(np.float32)[...], strict=True)
                np.testing.assert_array_equal(found.read(rows=1), wanted[:1], strict=True)


def test_a_committed_datatype_is_refused(tmp_path: Path) -> None:
    def fill(file: Any) -> None:
        file["kind"] = np.dtype("<f4")
        file.create_dataset("data", data=[1, 2.5], dtype=file["kind"])

    path = made(tmp_path / "x.h5", fill)
    with pytest.raises(DataError, match="it has a named type, which is not read"):
        read(path)
    assert read(path, "kind") is None


@pytest.mark.parametrize(
    "more, message",
    [
        ({"compression": "lzf"}, r"'/data' is compressed with the filter lzf, which is not supported; .*h5repack"),
        ({"scaleoffset": 3}, "'/data' is compressed with the filter scaleoffset"),
    ],
)
def test_filters_that_are_not_read_are_named(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    path = made(tmp_path / "x.h5", lambda file: file.create_dataset("data", data=np.arange(64), **more))
    with pytest.raises(DataError, match=message):
        read(path)


@pytest.mark.parametrize("more", [{"compression": "gzip"}, {"fletcher32": True}, {}])
def test_damaged_values_of_a_chunk_are_found_where_the_filter_can(tmp_path: Path, more: dict[str, Any]) -> None:
    values = np.arange(1000, dtype=np.float32)
    path = made(tmp_path / "x.h5", lambda file: file.create_dataset("data", data=values, chunks=(1000,), **more))
    with h5py.File(path) as file:
        at = file["data"].id.get_chunk_info(0).byte_offset
    with path.open("r+b") as raw:
        raw.seek(at + 40)
        raw.write(b"\xff\x00\xff")
    if more:
        with pytest.raises(DataError, match="a chunk of '/data' is damaged"):
            read(path)
    else:
        assert (read(path) != values).sum() == 1


# -- files that harm libhdf5 -----------------------------------------------------------------------------


def small_file(version: str) -> bytes:
    """Groups, links, attributes, contiguous and packed arrays."""
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", libver=version) as file:
        file.create_dataset("data", data=np.arange(12, dtype=np.float32).reshape(6, 2))
        more: dict[str, Any] = {"maxshape": (None,), "compression": "gzip", "shuffle": True}
        if version == "earliest":
            file.create_dataset("packed", data=np.arange(60), chunks=(7,), **more)
        for number in range(8):
            file.create_group(f"many/{number}")
            file["many"].attrs[f"a{number}"] = number
        file["text"], file["soft"] = "a string", h5py.SoftLink("/many/3")
    return buffer.getvalue()


def read_all(data: bytes) -> None:
    """Everything that readers of data and of snapshots ask for."""
    root = read_hdf5(io.BytesIO(data))
    for name in ("data", "packed", "many/7", "text", "soft"):
        item = find_object(root, name)
        if isinstance(item, Dataset):
            item.text() if item.is_text else item.read(np.float32)
        elif item is not None:
            assert isinstance(item.links, dict) and isinstance(item.attributes, dict)


@pytest.mark.parametrize("version", ["earliest", "latest"])
def test_any_word_of_a_file_may_be_damaged(version: str) -> None:
    """libhdf5 ends the process by SIGSEGV, or does not return, for some of these."""
    whole = small_file(version)
    read_all(whole)
    words = [struct.pack("<Q", value)[:size] for value in (0, 1, 96, 2**16 - 1, 2**63 - 1) for size in (1, 2, 8)]
    slowest = 0.0
    for at in range(0, len(whole) - 8, 2):
        if whole[at : at + 8] == bytes(8) and at % 16:
            continue  # mostly unused space
        word = words[at // 2 % len(words)]
        start = time.thread_time()
        with contextlib.suppress(ArithmeticError, LookupError, MemoryError, TypeError, ValueError):
            read_all(whole[:at] + word + whole[at + len(word) :])
        slowest = max(slowest, time.thread_time() - start)
    assert slowest < 10


def in_place(data: bytes, find: bytes, offset: int, value: int) -> bytes:
    """A file with another address behind a signature."""
    at = data.index(find) + offset
    return data[:at] + struct.pack("<Q", value) + data[at + 8 :]


def test_structures_that_contain_themselves_end() -> None:
    """A B-tree that is its own child, an object header that continues itself, a heap of 2^40 bytes."""
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        file.create_dataset("data", (100_000,), "f4", chunks=(10,))[...] = 1
        for number in range(30):
            file.attrs[f"attribute {number}"] = number
    whole = buffer.getvalue()
    tree = whole.index(b"TREE\x01\x02") if b"TREE\x01\x02" in whole else whole.index(b"TREE\x01\x01")
    damaged = [whole[: tree + 5] + b"\xff" + whole[tree + 6 :], in_place(whole, b"HEAP", 8, 1 << 40)]
    for at in range(tree + 24 + 24, tree + 24 + 24 + 60 * 32, 32):
        whole = whole[:at] + struct.pack("<Q", tree) + whole[at + 8 :]
    damaged.append(whole)
    for data in damaged:
        start = time.thread_time()
        with pytest.raises(ValueError, match="damaged"):
            dataset = find_object(read_hdf5(io.BytesIO(data)), "data")
            assert isinstance(dataset, Dataset)
            dataset.read()
        assert time.thread_time() - start < 10


def test_a_header_that_continues_itself_ends() -> None:
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        file.create_group("a")
    data = bytearray(buffer.getvalue())
    root = struct.unpack_from("<Q", data, 64)[0]
    struct.pack_into("<HHIQQ", data, root + 16, 16, 16, 0, root + 16, 24)
    with pytest.raises(ValueError, match="damaged"):
        read_hdf5(io.BytesIO(bytes(data)))


def file_of_names(count: int, length: int) -> bytes:
    """A group with so many links, whose names are the ends of one text of this length."""
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        file.create_group("a")
    data = bytearray(buffer.getvalue())
    symbols = len(data)
    data += b"SNOD\1\0" + struct.pack("<H", count)
    data += b"".join(struct.pack("<QQII16x", number, 96, 0, 0) for number in range(count))
    heap = len(data)
    data += b"HEAP\0\0\0\0" + struct.pack("<QQQ", length, 0, heap + 32) + b"x" * (length - 1) + b"\0"
    tree = len(data)
    data += b"TREE\0\0" + struct.pack("<HQQQQQ", 1, 2**64 - 1, 2**64 - 1, 0, symbols, 0)
    message = data.index(struct.pack("<HH", 17, 16))
    struct.pack_into("<QQ", data, message + 8, tree, heap)
    struct.pack_into("<Q", data, 40, len(data))
    return bytes(data)


def test_names_that_overlap_do_not_take_the_memory() -> None:
    """8 GB of names in 1.2 MB."""
    assert sorted(read_hdf5(io.BytesIO(file_of_names(2, 5))).links) == ["xxx", "xxxx"]
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="refer to themselves or overlap"):
            read_hdf5(io.BytesIO(file_of_names(20_000, 400_000))).links  # noqa: B018
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()


def test_a_chunk_that_unpacks_to_too_much(tmp_path: Path) -> None:
    """64 MiB of zeros where a chunk of 40 bytes should be."""
    path = made(
        tmp_path / "x.h5",
        lambda file: file.create_dataset("data", data=np.zeros(1 << 24, np.float32), chunks=(1 << 24,), compression=9),
    )
    data = path.read_bytes()
    assert data.count(struct.pack("<II", 1 << 24, 4)) == 1
    path.write_bytes(data.replace(struct.pack("<II", 1 << 24, 4), struct.pack("<II", 10, 4)))
    with pytest.raises(DataError, match="a chunk of '/data' has 44 bytes and not 40"):
        read(path)

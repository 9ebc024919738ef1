"""HDF5 snapshots from strangers: what reads other files or takes far more memory than it has bytes is refused."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from caffepy.errors import SnapshotError
from caffepy.formats.caffemodel import read_weights
from caffepy.formats.proto.caffe_pb2 import SolverState
from caffepy.formats.solverstate import read_solverstate, write_solverstate

SECRET = np.arange(4, dtype=np.float32)


def external_storage(parent: Any, name: str) -> None:
    SECRET.tofile("secret")
    parent.create_dataset(name, (4,), "f4", external=[("secret", 0, 16)])


def external_link(parent: Any, name: str) -> None:
    with h5py.File("other.h5", "w") as other:
        other["secret"] = SECRET
    parent[name] = h5py.ExternalLink("other.h5", "/secret")


def virtual(parent: Any, name: str) -> None:
    with h5py.File("other.h5", "w") as other:
        other["secret"] = SECRET
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource("other.h5", "secret", (4,))
    parent.create_virtual_dataset(name, layout)


def unallocated(parent: Any, name: str) -> None:
    parent.create_dataset(name, (1 << 31,), "f4")


def packed_fill(parent: Any, name: str) -> None:
    parent.create_dataset(name, (1 << 31,), "f4", chunks=(1 << 20,), compression="gzip", fillvalue=1)


def packed_zeros(parent: Any, name: str) -> None:
    parent.create_dataset(name, data=np.zeros(1 << 25, np.float32), chunks=(1 << 22,), compression="gzip")


def one_huge_chunk(parent: Any, name: str) -> None:
    parent.create_dataset(name, (1,), "f4", maxshape=(None,), chunks=(1 << 29,))


def many_names(parent: Any, name: str) -> None:
    parent[name] = np.zeros(1 << 18, np.float32)
    for index in range(1, 99):
        parent[str(index)] = parent[name]


def group(parent: Any, name: str) -> None:
    parent.create_group(name)


def text(parent: Any, name: str) -> None:
    parent[name] = "a string"


def compound(parent: Any, name: str) -> None:
    parent[name] = np.zeros(3, [("a", "f4"), ("b", "f4")])


def variable_length(parent: Any, name: str) -> None:
    parent.create_dataset(name, (2,), h5py.vlen_dtype(np.float32))


def references(parent: Any, name: str) -> None:
    parent.create_dataset(name, (2,), h5py.ref_dtype)


def small_integers(parent: Any, name: str) -> None:
    parent[name] = np.zeros(4, np.int8)


def nothing(parent: Any, name: str) -> None:
    parent[name] = h5py.Empty("f4")


def many_axes(parent: Any, name: str) -> None:
    parent.create_dataset(name, (1,) * 32, "f4")
    parent.create_dataset("1", (0,) + (1 << 40,) * 3, "f4")


READS = [(external_storage, "external storage"), (external_link, "external link"), (virtual, "a virtual dataset")]
BOMBS = [
    (unallocated, "would take 8589934592 bytes"),
    (packed_fill, "would take 8589934592 bytes"),
    (packed_zeros, "would unpack a file of .* bytes to 1342177"),
    (one_huge_chunk, "would take"),
    (many_names, "would take|would bring"),
]
ODD = [
    (text, "blobs hold floats|which snapshots do not contain"),
    (compound, "which snapshots do not contain"),
    (variable_length, "which snapshots do not contain"),
    (references, "which snapshots do not contain"),
    (small_integers, "has type int8; blobs hold floats"),
    (nothing, "cannot be read"),
    (many_axes, "impossible shape|cannot be read"),
]


def peak(read: Callable[[], object]) -> int:
    """The most bytes that NumPy and Python held at once."""
    tracemalloc.start()
    try:
        read()
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return most


@pytest.mark.parametrize(("make", "message"), READS + BOMBS + ODD)
def test_weights_are_refused(make: Callable[[Any, str], None], message: str) -> None:
    with h5py.File("w.h5", "w") as file:
        make(file.create_group("data/ip"), "0")

    def read() -> None:
        with pytest.raises(SnapshotError, match=f"w.h5.*({message})"):
            read_weights(Path("w.h5"))

    assert peak(read) < 1 << 28


@pytest.mark.parametrize(("make", "message"), READS + BOMBS + ODD)
def test_histories_are_refused(make: Callable[[Any, str], None], message: str) -> None:
    with h5py.File("s.h5", "w") as file:
        file["iter"] = np.array([3], np.int32)
        make(file.create_group("history"), "0")

    def read() -> None:
        with pytest.raises(SnapshotError, match=f"s.h5.*({message})"):
            read_solverstate(Path("s.h5"))

    assert peak(read) < 1 << 28


@pytest.mark.parametrize("name", ["iter", "learned_net", "current_step", "caffepy"])
@pytest.mark.parametrize(
    "value", [3.5, [1, 2], np.zeros(2, [("a", "f4")]), np.int64(2**40), b"\xff\xfe", np.zeros(0, "S3")], ids=str
)
def test_other_fields_that_make_no_sense(name: str, value: object) -> None:
    with h5py.File("s.h5", "w") as file:
        for field, content in {"iter": np.array([3], np.int32), name: value}.items():
            file[field] = content
        file.create_group("history")
    if name == "caffepy" and isinstance(value, np.ndarray) and not value.size:
        assert read_solverstate(Path("s.h5")).message.iter == 3  # no bytes are a message without fields
    else:
        with pytest.raises(SnapshotError, match="s.h5"):
            read_solverstate(Path("s.h5"))


def test_an_iteration_that_is_a_group() -> None:
    with h5py.File("s.h5", "w") as file:
        file.create_group("iter")
        file.create_group("history")
    with pytest.raises(SnapshotError, match="s.h5: is not a .solverstate.h5 but another file"):
        read_solverstate(Path("s.h5"))


def test_groups_in_themselves() -> None:
    with h5py.File("w.h5", "w") as file:
        layer = file.create_group("data/ip")
        layer["0"] = SECRET
        layer["again"] = file["data"]
    with pytest.raises(SnapshotError, match="w.h5.*the group 'data/ip/again' occurs twice"):
        read_weights(Path("w.h5"))


def test_soft_links_in_circles() -> None:
    with h5py.File("w.h5", "w") as file:
        file.create_group("data/ip")["0"] = h5py.SoftLink("/data/ip/1")
        file["data/ip/1"] = h5py.SoftLink("/data/ip/0")
    with pytest.raises(SnapshotError, match="w.h5.*needs more than 16 soft links"):
        read_weights(Path("w.h5"))


def test_groups_that_double_with_each_level() -> None:
    """2^40 paths in a few kilobytes."""
    with h5py.File("w.h5", "w") as file:
        inner = file.create_group("data")
        for _ in range(40):
            deeper = inner.create_group("a")
            inner["b"] = deeper
            inner = deeper
        inner["0"] = SECRET
    with pytest.raises(SnapshotError, match="w.h5.*occurs twice"):
        read_weights(Path("w.h5"))


def test_groups_that_are_too_deep() -> None:
    with h5py.File("w.h5", "w") as file:
        inner = file.create_group("data")
        for _ in range(2000):
            inner = inner.create_group("a")
    with pytest.raises(SnapshotError, match="w.h5.*nested too deeply"):
        read_weights(Path("w.h5"))


def test_a_history_with_a_gap() -> None:
    with h5py.File("s.h5", "w") as file:
        file["iter"] = np.array([3], np.int32)
        for index in (0, 2):
            file[f"history/{index}"] = SECRET
    with pytest.raises(SnapshotError, match="s.h5: history 1 of 2 is missing; the file is damaged"):
        read_solverstate(Path("s.h5"))


def test_the_data_of_a_net_are_no_weights() -> None:
    with h5py.File("w.h5", "w") as file:
        file["data"] = SECRET
    with pytest.raises(SnapshotError, match="w.h5: is not a .caffemodel.h5 but another file"):
        read_weights(Path("w.h5"))


def test_a_checksum_that_was_lost_or_changed() -> None:
    state = SolverState(iter=3, learned_net="x", blob_count=1)
    write_solverstate(Path("s.h5"), state, [SECRET])
    with h5py.File("s.h5", "a") as file:
        value = int(file.attrs["caffepy_crc32c"])
        file.attrs["caffepy_crc32c"] = np.uint32(value ^ 1)
    with pytest.raises(SnapshotError, match=f"s.h5: .* its checksum is {value:08x}, but {value ^ 1:08x} was"):
        read_solverstate(Path("s.h5"), strict=True)
    with h5py.File("s.h5", "a") as file:
        del file.attrs["caffepy_crc32c"]
    assert not read_solverstate(Path("s.h5"), strict=True).message.HasField("crc32c")
    with h5py.File("s.h5", "a") as file:
        file.attrs["caffepy_crc32c"] = "no number"
    with pytest.raises(SnapshotError, match="s.h5.*the attribute 'caffepy_crc32c' is not an integer"):
        read_solverstate(Path("s.h5"))


def test_a_link_that_becomes_a_fifo() -> None:
    os.mkfifo("w.h5")
    with pytest.raises(SnapshotError, match="w.h5: cannot read the file: it is a FIFO, not a regular file"):
        read_weights(Path("w.h5"))


def test_what_other_programs_write_is_read() -> None:
    """Doubles, halves and packed datasets, a string of variable length; an attribute of theirs is no harm."""
    with h5py.File("w.h5", "w") as file:
        file["data/ip/0"] = np.arange(6, dtype=np.float64).reshape(2, 3)
        file.create_dataset("data/ip/1", data=np.arange(2, dtype=np.float16), chunks=(2,), compression="gzip")
        file["data/bn/0"] = h5py.SoftLink("/data/ip/1")
        file.attrs["made by"] = "somebody"
    layers = {layer.name: layer.blobs for layer in read_weights(Path("w.h5")).layer}
    assert [list(blob.shape.dim) for blob in layers["ip"]] == [[2, 3], [2]]
    assert list(layers["ip"][0].data) == [0, 1, 2, 3, 4, 5]
    assert list(layers["bn"][0].data) == [0, 1]
    with h5py.File("s.h5", "w") as file:
        file["iter"] = np.array([3], np.int32)
        file["learned_net"] = "Größe.caffemodel.h5"
        file.create_group("history")
    assert read_solverstate(Path("s.h5")).message.learned_net == "Größe.caffemodel.h5"

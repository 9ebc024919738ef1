"""HDF5 that would read other files, or take memory that its file does not justify, is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from caffepy.errors import DataError
from caffepy.hdf5 import check_dataset, find_object, open_hdf5


def made(path: Path, fill: Callable[[Any], object]) -> Path:
    with h5py.File(path, "w") as file:
        fill(file)
    return path


def read(path: Path, name: str = "data") -> Any:
    with open_hdf5(path, DataError) as file:
        dataset = find_object(file, name)
        if dataset is None:
            return None
        check_dataset(dataset)
        return dataset[...]


def virtual(file: Any) -> None:
    layout = h5py.VirtualLayout(shape=(3,), dtype="f4")
    layout[:] = h5py.VirtualSource("/etc/passwd", "data", shape=(3,))
    file.create_virtual_dataset("data", layout)


@pytest.mark.parametrize(
    "fill, message",
    [
        (virtual, "'/data' is a virtual dataset"),
        (lambda file: file.create_dataset("data", (9,), "u1", external=[("/etc/passwd", 0, 9)]), "external storage"),
        (lambda file: file.update(data=h5py.ExternalLink("/etc/passwd", "x")), "'data' is an external link"),
        (lambda file: file.update(data=h5py.SoftLink("/data")), "more than 16 links"),
        (lambda file: file.create_dataset("data", (2**31 - 1,), "f4"), "would take 8589934588 bytes"),
        (lambda file: file.create_dataset("data", (300_000,), "i1", chunks=(1,)), "would take 1228800000 bytes"),
        (
            lambda file: file.create_dataset("data", (5,), "f4", chunks=(1 << 25,), maxshape=(None,)),
            "would take 134217728 bytes, but the file has only 0 of it",
        ),
    ],
)
def test_what_reads_other_files_or_takes_the_memory_is_refused(
    tmp_path: Path, fill: Callable[[Any], object], message: str
) -> None:
    with pytest.raises(DataError, match=rf"HDF5 file '.*/bad.h5' cannot be read: .*{message}"):
        read(made(tmp_path / "bad.h5", fill))


def test_an_external_link_behind_a_soft_link_is_refused(tmp_path: Path) -> None:
    def fill(file: Any) -> None:
        file["group/there"] = h5py.ExternalLink("/etc/passwd", "/")
        file["data"] = h5py.SoftLink("group/there/data")

    with pytest.raises(DataError, match="'there' is an external link"):
        read(made(tmp_path / "bad.h5", fill))


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

    taken = 0
    with (
        pytest.raises(DataError, match="'/0' would take 4194304 bytes"),
        open_hdf5(made(tmp_path / "bad.h5", fill), DataError) as file,
    ):
        for _ in range(100):
            taken = check_dataset(find_object(file, "0"), taken)
    assert taken == 17 << 22


@pytest.mark.parametrize(
    "error", [IndexError("a\nb"), KeyError("a"), MemoryError(), OverflowError("a"), OSError("a"), RecursionError("a")]
)
def test_errors_of_h5py_name_the_file(tmp_path: Path, error: Exception) -> None:
    path = made(tmp_path / "x.h5", lambda file: None)
    with (
        pytest.raises(DataError, match=r"snapshot '.*/x.h5' cannot be read: (a|out of memory)$"),
        open_hdf5(path, DataError, "snapshot"),
    ):
        raise error


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(DataError, match="it is a FIFO, not a regular file"):
        read(tmp_path / "fifo")

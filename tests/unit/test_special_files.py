"""Paths that are no regular files: refused at once, by whatever reads files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from caffepy.data.conversion.mnist_cifar import FILES, folder_reader
from caffepy.data.mean import read_mean
from caffepy.data.sources.databases import LmdbSource
from caffepy.data.sources.image_list import ImageListSource
from caffepy.distributed.launch.launchers import read_hostfile
from caffepy.errors import ConfigError, DataError, SnapshotError
from caffepy.export.onnx_import.read import read_onnx
from caffepy.formats.caffemodel import read_weights
from caffepy.formats.hdf5 import open_hdf5
from caffepy.formats.load import read_net
from caffepy.formats.solverstate import read_solverstate
from caffepy.layers.input.hdf5 import Hdf5Source
from caffepy.scaling.model import read_measurements
from caffepy.scaling.profile import read_profile


def read_hdf5_data(path: Path) -> Hdf5Source:
    return Hdf5Source(path, ["x"])


def read_hdf5_file(path: Path) -> None:
    with open_hdf5(path, DataError):
        """Nothing is read."""


def read_model(path: Path) -> object:
    return read_onnx(path, "net")


def read_idx(path: Path) -> object:
    os.rename(path, FILES["test"][0].name)
    return folder_reader(Path())(FILES["test"][0])


FIFO, DEVICE, NUL, LONG = "fifo", "/dev/zero", "a\0b", "x" * 5000
IS_FIFO, IS_DEVICE = "it is a FIFO, not a regular file", "it is a device, not a regular file"
ABSENT = "does not exist|cannot be read|cannot be opened"


@pytest.mark.parametrize(
    ("read", "path", "error", "message"),
    [
        (read_net, NUL, ConfigError, "cannot read the net: the path has a NUL character"),
        (read_net, LONG, ConfigError, "cannot read the net: File name too long"),
        (read_net, DEVICE, ConfigError, f"cannot read the net: {IS_DEVICE}"),
        (read_net, FIFO, ConfigError, IS_FIFO),
        *(
            (read, FIFO, SnapshotError, f"fifo: cannot read the file: {IS_FIFO}")
            for read in (read_weights, read_solverstate)
        ),
        *(
            (read, DEVICE, SnapshotError, f"/dev/zero: cannot read the file: {IS_DEVICE}")
            for read in (read_weights, read_solverstate)
        ),
        (read_weights, "fifo.h5", SnapshotError, f"fifo.h5: cannot read the file: {IS_FIFO}"),
        (ImageListSource, FIFO, DataError, f"cannot be read: {IS_FIFO}"),
        *(
            (read, path, DataError, ABSENT)
            for read in (LmdbSource, ImageListSource, read_mean, read_hdf5_data)
            for path in (NUL, LONG)
        ),
        (read_hdf5_file, FIFO, DataError, IS_FIFO),
        (read_mean, DEVICE, DataError, "mean_file '/dev/zero' cannot be read: it is a device"),
        (read_idx, FIFO, DataError, f"has no {FILES['test'][0].name}"),
        (read_hostfile, FIFO, ConfigError, f"cannot be read: {IS_FIFO}"),
        (read_profile, DEVICE, ConfigError, IS_DEVICE),
        (read_measurements, DEVICE, ConfigError, IS_DEVICE),
        (read_model, "absent.onnx", ConfigError, "cannot be read: "),
        (read_model, FIFO, ConfigError, "it is a FIFO"),
    ],
)
def test_what_is_no_regular_file_is_refused(
    read: Callable[[Path], object],
    path: str,
    error: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if path.startswith(FIFO):
        os.mkfifo(path)
    with pytest.raises(error, match=message) as caught:
        read(Path(path))
    assert "\n" not in str(caught.value)

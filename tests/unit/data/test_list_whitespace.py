"""White space in lists: a run of spaces and tabs divides a line, and lines may end in white space."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from training import build_net

from caffepy.data.clips import ClipList
from caffepy.data.conversion.annotation_sets import write_image_sizes
from caffepy.data.sources.image_list import ImageListSource, labelled_lines
from caffepy.errors import DataError
from caffepy.forks.rcnn.object_windows import ObjectWindowSource
from caffepy.forks.segmentation.dense_labels import PairList
from caffepy.infer.images import list_images
from caffepy.layers.detection.boxes import read_image_sizes
from caffepy.layers.input.hdf5 import Hdf5Source
from caffepy.layers.input.window_data import WindowSource

LABELS = "a.png 1\nb c.png -12\n"
PAIRS = "a.png a.txt\nb.png b.txt\n"


def image_list(path: Path) -> Any:
    source = ImageListSource(path, "root/")
    return source.files, source.labels


def image_sizes(path: Path) -> Any:
    net = build_net('layer { name: "d" type: "Input" top: "d" input_param { shape { dim: 1 } } }')
    return read_image_sizes(net.layers[0], str(path))


def hdf5_files(path: Path) -> Any:
    for name in "ab":
        with h5py.File(path.with_name(f"{name}.h5"), "w") as file:
            file["data"] = np.zeros((2, 3))
    return Hdf5Source(path, ["data"]).files


def window_files(path: Path) -> Any:
    return WindowSource(path, "", (0.5, 0.5), False).files


def object_files(path: Path) -> Any:
    return [each.path for each in ObjectWindowSource(path, "", False).entries]


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "ImageData": (LABELS, image_list),
    "convert_imageset, convert_annoset": (LABELS, lambda path: list(labelled_lines(path))),
    "VideoData": ("a 5 1\nb c 12 3\n", lambda path: ClipList(path).lines),
    "VideoData of several labels": ("a 5 1,2\nb c 12 3\n", lambda path: ClipList(path, several=True).lines),
    "ImageSegData": (PAIRS, lambda path: PairList(path, "root/", True).names),
    "HDF5Data": ("a.h5\nb.h5\n", hdf5_files),
    "WindowData": ("# 0\na.png\n3\n4\n5\n1\n1 0.9 0 1 2 3\n", window_files),
    "ImageGtData": ("# 0\na.png\n3\n4\n5\n1\n1 0 0 1 2 3\n0\n", object_files),
    "classify": ("a.png 7\nb.png\n", lambda path: [Path(image.name).name for image in list_images([path])]),
    "name_size_file": ("a 5 7\nb 12 9\n", image_sizes),
}


@pytest.mark.parametrize(
    ("run", "end"),
    [("\t", "\n"), ("   ", " \n"), (" ", "\r\n"), (" \t", "\t \r\n")],
    ids=["tabs", "columns", "CRLF", "all"],
)
@pytest.mark.parametrize("reader", READERS)
def test_any_run_of_white_space_divides(reader: str, run: str, end: str, tmp_path: Path) -> None:
    text, read = READERS[reader]
    plain, other = tmp_path / "plain.txt", tmp_path / "other.txt"
    plain.write_text(text)
    divided = text.replace("b c", "b/c").replace(" ", run).replace("b/c", "b c").replace("\n", end)
    other.write_bytes(divided.encode())
    assert read(other) == read(plain)


def test_white_space_within_a_path_stays(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("a  b\tc.png \t3\n")
    assert list(labelled_lines(tmp_path / "list.txt")) == [(1, "a  b\tc.png", 3)]


@pytest.mark.parametrize(
    ("content", "read"),
    [
        ("my data/a.h5\n", hdf5_files),
        ("# 0 my data/a.png 3 4 5 0", window_files),
        ("# 0 my data/a.png 3 4 5 0 0", object_files),
        ("my data/a 3 4", image_sizes),
        ("my data/a.png a.xml", lambda path: write_image_sizes("", path, path.with_suffix(".sizes"))),
    ],
    ids=["HDF5Data", "WindowData", "ImageGtData", "name_size_file", "get_image_size"],
)
def test_a_space_in_a_path_is_explained(content: str, read: Callable[[Path], Any], tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(content)
    with pytest.raises(DataError, match=r"white space divides.*, so a \w+ cannot contain any"):
        read(tmp_path / "list.txt")

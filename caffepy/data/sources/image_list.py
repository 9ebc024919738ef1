"""Image lists of Caffe's ImageData: one `path label` per line. The last run of white space divides them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from caffepy.data.images import read_file
from caffepy.data.sources.databases import hash_of
from caffepy.errors import DataError
from caffepy.utils.files import read_list

_MAX_LIST_BYTES = 1 << 30
_LABELS = range(-(2**31), 2**31)
"""Valid labels: C's int, as in Caffe."""


def list_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number (from 1) and text of each line that is not blank.

    Raises:
        DataError: the list cannot be read, or a line has a NUL character.
    """
    lines = read_list(path, _MAX_LIST_BYTES, f"image list '{path}'").split("\n")
    for number, line in enumerate(lines, 1):
        if "\0" in line:
            raise DataError(f"'{path}':{number}: the line has a NUL character, which a path cannot contain")
        if line.strip():
            yield number, line.rstrip()


def labelled_lines(path: Path) -> Iterator[tuple[int, str, int]]:
    """Yield number, path and label of each line that is not blank.

    BVLC Caffe divides at the last space, so paths may contain spaces. NVIDIA Caffe divides at white space
    (`infile >> filename >> label`), so lists may have tabs and aligned columns.

    Raises:
        DataError: the list cannot be read, or has a line without a label or with a NUL character.
    """
    for number, line in list_lines(path):
        *name, label = line.rsplit(maxsplit=1)
        if not re.fullmatch(r"[-+]?[0-9]{1,20}", label) or int(label) not in _LABELS:
            raise DataError(
                f"'{path}':{number}: '{label[:40]}' is not a label; a line is a path, a space or a tab, and a 32-bit "
                "integer"
            )
        yield number, "".join(name), int(label)


class ImageListSource:
    """The image files of a list, in its order; a `RecordSource`.

    Args:
        path: the list.
        root_folder: prefix of each path; no slash is added, as in Caffe.

    Raises:
        DataError: the list cannot be read, has a line without a label or with a NUL character, or is empty.
    """

    index = None

    def __init__(self, path: Path, root_folder: str = "") -> None:
        self.description = f"image list '{path}'"
        self.labels: list[int] = []
        self.files: list[str] = []
        for _, name, label in labelled_lines(path):
            self.labels.append(label)
            self.files.append(root_folder + name)
        if not self.files:
            raise DataError(f"{self.description} names no images; each line must be a path, a space and a label")

    def __len__(self) -> int:
        return len(self.files)

    def read(self, number: int) -> bytes:
        return read_file(self.files[number], "; see root_folder in image_data_param")

    def allows_concurrent_reads(self, count: int) -> bool:
        return True

    def record_name(self, number: int) -> str:
        return f"record {number} ('{self.files[number]}')"

    def fingerprint(self) -> dict[str, str]:
        labels = ",".join(map(str, self.labels))
        return {
            "the number of images": str(len(self)),
            "the hash of the labels": hash_of(labels.encode()),
            "the hash of the first image": hash_of(self._read_named(0)),
            "the hash of the last image": hash_of(self._read_named(len(self) - 1)),
        }

    def _read_named(self, number: int) -> bytes:
        try:
            return self.read(number)
        except DataError as error:
            raise DataError(f"{self.description}: {self.record_name(number)} {error}") from error

    def close(self) -> None:
        """Do nothing: no file is open between reads."""

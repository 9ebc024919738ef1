"""Lists of image files with labels, as Caffe's ImageData takes them: one `path label` a line."""

from __future__ import annotations

import os
import re
from pathlib import Path

from caffepy.data.sources.source import hash_of
from caffepy.errors import DataError
from caffepy.files import read_regular

_MOST_LIST_BYTES = 1 << 30
_MOST_IMAGE_BYTES = 1 << 28
_LABELS = range(-(2**31), 2**31)
"""Those of Caffe, whose labels are C's int."""


class ImageListSource:
    """The image files that a list names, in its order; a `RecordSource`.

    Args:
        path: the list.
        root_folder: put before each path as it is, without a slash, as Caffe does.

    Raises:
        DataError: the list cannot be read, has a line without a label or with a NUL character, or is empty.
    """

    index = None

    def __init__(self, path: Path, root_folder: str = "") -> None:
        self.description = f"image list '{path}'"
        self.labels: list[int] = []
        self._files: list[str] = []
        try:
            lines = os.fsdecode(read_regular(path, _MOST_LIST_BYTES)).split("\n")
        except OSError as error:
            raise DataError(f"{self.description} cannot be read: {error.strerror}") from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                self._add(line.rstrip(), root_folder, f"'{path}':{number}")
        if not self._files:
            raise DataError(f"{self.description} names no images; each line must be a path, a space and a label")

    def _add(self, line: str, root_folder: str, where: str) -> None:
        name, _, label = line.rpartition(" ")
        if "\0" in line:
            raise DataError(f"{where}: the line has a NUL character, which no path can have")
        if not re.fullmatch(r"[-+]?[0-9]{1,20}", label) or int(label) not in _LABELS:
            raise DataError(
                f"{where}: '{label[:40]}' is no label; a line is a path, a space and a whole number of 32 bits"
            )
        self.labels.append(int(label))
        self._files.append(root_folder + name)

    def __len__(self) -> int:
        return len(self._files)

    def read(self, number: int) -> bytes:
        try:
            return read_regular(self._files[number], _MOST_IMAGE_BYTES)
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}; see root_folder in image_data_param") from error

    def concurrent(self, count: int) -> bool:
        return True

    def record_name(self, number: int) -> str:
        return f"record {number} ('{self._files[number]}')"

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
        """There is nothing open between reads."""

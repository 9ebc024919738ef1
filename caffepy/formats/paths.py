"""Resolution of the relative paths in a prototxt."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

log = logging.getLogger(__name__)

_PATH = re.compile(r".*(source|file|file_name|folder|directory|prefix)|(train_|test_)?net|weights|deploy|calibrator")
"""Names of string fields that name a file or folder, which may differ from host to host."""


def is_path(field: FieldDescriptor) -> bool:
    """Return whether a field of the schema names a file or folder."""
    return field.type == field.TYPE_STRING and _PATH.fullmatch(field.name) is not None


def path_fields(message: Message) -> Iterator[tuple[Message, FieldDescriptor]]:
    """Yield the fields that are set and name a file or folder, with the messages that hold them."""
    for field, value in message.ListFields():
        if is_path(field):
            yield message, field
        elif field.message_type is not None:
            for inner in [value] if isinstance(value, Message) else value:
                yield from path_fields(inner)


def is_folder(path: Path | str) -> bool:
    """Return whether a folder exists; False for invalid paths (NUL, too long)."""
    try:
        return os.path.isdir(path)
    except (OSError, ValueError):
        return False


def _exists(path: Path) -> bool:
    try:
        return os.path.exists(path)
    except (OSError, ValueError):
        return False


class PathResolver:
    """Resolves the paths in a prototxt.

    A relative path is resolved from the working directory, as in Caffe. If nothing exists there, it is resolved from
    the prototxt's folder, and the log reports it. Caffe's own files contain paths from the folder of its sources: in
    ``models/lenet/solver.prototxt``, ``models/lenet/train_test.prototxt`` is also ``train_test.prototxt`` beside it.

    Args:
        prototxt: the file that contains the paths, or None.
    """

    def __init__(self, prototxt: Path | None) -> None:
        self.prototxt = prototxt
        self.folder = Path(prototxt).parent if prototxt is not None else None
        self._reported: set[str] = set()

    def __call__(self, name: str) -> Path:
        """Return the existing file or folder for a path, else the path from the working directory."""
        path = Path(os.path.expanduser(name))
        if self.folder is None or path.is_absolute() or _exists(path):
            return path
        for beside in self._beside(path):
            if _exists(beside):
                self._log_once(name, beside)
                return beside
        return path

    def output(self, name: str) -> Path:
        """Return the path of an output file: from the working directory, as in Caffe, if its folder exists there."""
        path = Path(os.path.expanduser(name))
        if self.folder is None or path.is_absolute() or is_folder(path.parent):
            return path
        return next((beside for beside in self._beside(path) if is_folder(beside.parent)), path)

    def _beside(self, path: Path) -> Iterator[Path]:
        """Yield a path from the prototxt's folder, then without leading folders by which that folder's path ends."""
        if self.folder is None:
            return
        yield self.folder / path
        try:
            own, parts = Path(os.path.abspath(self.folder)).parts, path.parts
        except OSError:  # the working directory was removed
            return
        for count in range(min(len(own), len(parts) - 1), 0, -1):
            if own[-count:] == parts[:count]:
                yield self.folder.joinpath(*parts[count:])

    def _log_once(self, name: str, path: Path) -> None:
        if name not in self._reported:
            self._reported.add(name)
            log.info("'%s' is not in the working directory; using %s, beside the prototxt", name, path)

"""Where the relative paths in a prototxt lead."""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)


def is_folder(path: Path | str) -> bool:
    """Whether there is such a folder; False for what cannot be a path at all: with NUL, too long."""
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
    """Finds files that a prototxt names.

    A relative path counts from the working directory, as in Caffe; where nothing is there, from
    the prototxt's own folder, and the log then says so.

    Args:
        prototxt: the file that holds the paths; ``None`` when there is none.
    """

    def __init__(self, prototxt: Path | None) -> None:
        self.prototxt = prototxt
        self.folder = Path(prototxt).parent if prototxt is not None else None
        self._reported: set[str] = set()

    def __call__(self, written: str) -> Path:
        """The file or folder that `written` names; a path that does not exist is returned as Caffe would use it."""
        path = Path(os.path.expanduser(written))
        if self.folder is None or path.is_absolute() or _exists(path):
            return path
        beside = self.folder / path
        if not _exists(beside):
            return path
        self._report(written, beside)
        return beside

    def output(self, written: str) -> Path:
        """Where to write what `written` names: always from the working directory, as in Caffe."""
        return Path(os.path.expanduser(written))

    def _report(self, written: str, used: Path) -> None:
        if written not in self._reported:
            self._reported.add(written)
            log.info("'%s' is not in the working directory; using %s, beside the prototxt", written, used)

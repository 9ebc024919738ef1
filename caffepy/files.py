"""Atomic writes: a file appears complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from caffepy.errors import RunError


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; after the block it is synced and renamed to `path`.

    If the block fails, the temporary file is removed and `path` is unchanged.

    Raises:
        RunError: the file cannot be written (no space, no permission, no such folder).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise RunError(
                f"{path}: cannot be written: {error.strerror or error}; the files of older snapshots are as they were"
            ) from error
        raise


def _sync(path: Path) -> None:
    """fsync a file, or a folder after a rename in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

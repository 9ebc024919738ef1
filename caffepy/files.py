"""Files: only regular ones are read, and what is written appears complete or not at all."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from caffepy.errors import RunError

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}

_MORE_BYTES = 2**24
"""Read at most beyond the size that a file is said to have."""


def open_regular(path: Path | str) -> BinaryIO:
    """Open a regular file for reading; a FIFO, which might never send anything, and a device are refused unopened.

    Raises:
        OSError: it cannot be opened or is not a regular file; `strerror` says why, also of a path that is no path.
    """
    try:
        _check_regular(os.stat(path).st_mode, path)
        # The file may be another one by now: opening never waits, and what was opened is checked again.
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb")
    except UnicodeError as error:
        raise OSError(errno.EILSEQ, "the path has characters that the locale cannot express", repr(path)) from error
    except ValueError as error:
        raise OSError(errno.EINVAL, "the path has a NUL character", repr(path)) from error
    try:
        _check_regular(os.fstat(file.fileno()).st_mode, path)
    except OSError:
        file.close()
        raise
    return file


def read_regular(path: Path | str, most: int) -> bytes:
    """The bytes of a regular file.

    Args:
        path: the file.
        most: bytes that it may have.

    Raises:
        OSError: it cannot be read, is not a regular file or is larger; `strerror` says why.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1) if size <= most else b""  # a buffer of what is asked for is made at once
        if len(content) > size:  # it grows, or is one of the kernel's, which say that they are empty
            content += file.read(min(most - size, _MORE_BYTES))
    if size > most or len(content) > most:
        size = max(size, len(content))
        raise OSError(errno.EFBIG, f"the file has {size} bytes, more than the {most} that are read", str(path))
    return content


def _check_regular(mode: int, path: Path | str) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


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

"""Files: only regular ones are read, what is written appears complete or not at all; standard streams, libraries."""

from __future__ import annotations

import codecs
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from caffepy.errors import RunError, UserError

_STARTED = time.time()
"""When this process began, nearly: what is older was left by another one."""
_MORE_BYTES = 2**24
"""Read at most beyond the size that a file is said to have."""
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp", re.DOTALL)
"""The names that `temporary_beside` gives."""

_ADVICE = {
    errno.ENOENT: "make its folder first",
    errno.ENOTDIR: "name a file in a folder that is there",
    errno.EISDIR: "name a file",
    errno.EACCES: "name a file in a folder that you may write to",
    errno.EROFS: "name a file in a folder that you may write to",
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there",
}
"""What to do about a file that cannot be written."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


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


def read_list(path: Path | str, most: int) -> str:
    """The text of a list of files, which may hold names of any bytes; a byte order mark before it is no part of it.

    Raises:
        OSError: as `read_regular`.
    """
    return os.fsdecode(read_regular(path, most).removeprefix(codecs.BOM_UTF8))


def working_folder() -> str:
    """The working directory for a message, also where it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return "a folder that has been removed"


def _check_regular(mode: int, path: Path | str) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def read_private(path: Path, most: int) -> bytes:
    """The bytes of a regular file that nobody but this user can have written or read.

    Args:
        path: the file.
        most: bytes that it may have.

    Raises:
        UserError: it is another user's, others may read or write it, or it is no regular file.
        OSError: it cannot be read, or is larger.
    """
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise UserError(f"{path} is a link, a folder or a device where a file is expected; name another path")
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise UserError(
                f"{path} belongs to user {status.st_uid} and has the mode {status.st_mode & 0o777:03o}: it must be "
                f"user {os.geteuid()}'s and have the mode 600, or others could have written it; name another path"
            )
        if status.st_size > most:
            raise OSError(errno.EFBIG, f"the file has {status.st_size} bytes, more than the {most} that are read", path)
        return file.read(most)


# -- writing -------------------------------------------------------------------------------------------


@contextmanager
def atomic_write(path: Path, unharmed: str = "", durable: bool = True) -> Iterator[BinaryIO]:
    """Yield a new file beside `path`, open for writing; after the block it is synced and renamed to `path`.

    If the block fails, the new file is removed and `path` is unchanged. Its name cannot be foreseen and must be new, so
    that nobody can lay a link there; its mode is the umask's. What processes have left that were killed while they
    wrote `path` is removed.

    Args:
        path: the file to write.
        unharmed: for the error's message, what the failure leaves as it was.
        durable: whether it must outlive a failure of the system right after; syncing takes milliseconds.

    Raises:
        RunError: the file cannot be written (no space, no permission, no such folder).
    """
    try:
        temporary = temporary_beside(path)
        with _create(temporary) as file:
            try:
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
                os.replace(temporary, path)
                if durable:
                    _sync_folder(path.parent)
                with suppress(OSError):  # the folder may be written and not listed
                    remove_leftovers(path.parent, path.name.__eq__)
            except BaseException:
                with suppress(OSError):
                    temporary.unlink()
                with suppress(OSError):  # it would write what is left in its buffer
                    file.close()
                raise
    except OSError as error:
        raise _unwritable(path, error, unharmed) from error


def check_writable(path: Path) -> None:
    """Find out, before long computation, whether `atomic_write` will be able to write a file.

    Raises:
        RunError: it will not.
    """
    try:
        if path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        temporary = temporary_beside(path)
        _create(temporary).close()
        temporary.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError, unharmed: str = "") -> RunError:
    hints = [text for text in (unharmed, _ADVICE.get(error.errno or 0)) if text]
    return RunError("; ".join([f"{path}: cannot be written: {error.strerror or error}", *hints]))


def temporary_beside(path: Path) -> Path:
    """A name that cannot be foreseen, for what is to be renamed to `path` when it is complete.

    Raises:
        OSError: the path is empty, which names the working directory, or is the root.
    """
    if not path.name:
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def remove_leftovers(folder: Path, is_ours: Callable[[str], bool]) -> list[Path]:
    """Remove what killed processes have left of `atomic_write`; returns what was removed.

    Left alone: another user's files, those that a process still writes, and those younger than this process.

    Args:
        folder: where to look.
        is_ours: whether to remove what should have become a file of this name.
    """
    removed = []
    for name in os.listdir(folder):
        match = _TEMPORARY.fullmatch(name)
        if match and is_ours(match[1]) and _remove_abandoned(folder / name):
            removed.append(folder / name)
    return removed


def remove_leftover_folders(path: Path, is_ours: Callable[[set[str]], bool]) -> None:
    """Remove folders that killed processes have left beside `path`, which they should have become.

    Left alone is what `remove_leftovers` leaves alone, and folders whose files' names `is_ours` refuses.
    """
    for name in os.listdir(path.parent):
        match = _TEMPORARY.fullmatch(name)
        if match and match[1] == path.name:
            _remove_abandoned_folder(path.with_name(name), is_ours)


@contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """Make a folder that is locked within the block, which tells it from what a killed process has left.

    Raises:
        OSError: it cannot be made, or is there.
    """
    path.mkdir()
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # as in `_create`
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove_abandoned_folder(path: Path, is_ours: Callable[[set[str]], bool]) -> None:
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if status.st_uid == os.geteuid() and status.st_mtime < _STARTED:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_ours(set(os.listdir(path))):
                    shutil.rmtree(path)
        finally:
            os.close(descriptor)


def _create(path: Path) -> BinaryIO:
    """A new file, locked for as long as it is open, which tells it from what a killed process has left."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.fdopen(os.open(path, flags, 0o666), "wb")
    with suppress(OSError):  # a file system without locks: `_remove_abandoned` removes nothing there
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def _remove_abandoned(path: Path) -> bool:
    """Remove a temporary file that no process writes any more; whether it was removed."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "wb") as file:
            status = os.fstat(file.fileno())
            own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if not own or status.st_mtime >= _STARTED:
                return False
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            return True
    except OSError:
        return False


def _sync_folder(path: Path) -> None:
    """fsync a folder after a rename in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_library(path: str) -> ctypes.CDLL:
    """A shared library, while whose loading other threads go on; `ctypes.CDLL` itself lets none.

    Args:
        path: as dlopen(3) takes it.

    Raises:
        OSError: it cannot be loaded.
    """
    system = ctypes.CDLL(None)
    system.dlopen.restype, system.dlerror.restype = ctypes.c_void_p, ctypes.c_char_p
    handle = system.dlopen(os.fsencode(path), os.RTLD_NOW)
    if not handle:
        raise OSError((system.dlerror() or b"").decode(errors="replace") or f"{path} cannot be loaded")
    return ctypes.CDLL(path, handle=handle)


def open_closed_streams() -> None:
    """Let standard streams with which the process was not started lead to the null device.

    A file that is opened would get the number of such a stream, and with it what libraries print.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            device = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is the stream's
            stream = open(device, "w" if number else "r", closefd=False)  # noqa: SIM115 - as long as the process
            setattr(sys, name, stream)

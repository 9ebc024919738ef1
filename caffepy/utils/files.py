"""Reading of regular files only, atomic writes, standard streams and shared libraries."""

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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from caffepy.errors import CaffepyError, ConfigError, DataError, RunError, UserError

_STARTED = time.time()
"""About when this process began; older temporary files are another process's."""
_MORE_BYTES = 2**24
"""Read at most this far beyond the size that `fstat` reports."""
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp", re.DOTALL)
"""Names made by `temporary_beside`."""

_ADVICE = {
    errno.ENOENT: "make its folder first",
    errno.ENOTDIR: "name a file in a folder that is there",
    errno.EISDIR: "name a file",
    errno.EACCES: "name a file in a folder that you may write to",
    errno.EROFS: "name a file in a folder that you may write to",
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there",
}
"""Advice for errors of writing."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: Path | str) -> BinaryIO:
    """Open a regular file for reading; FIFOs, which can block for ever, and devices are refused unopened.

    Raises:
        OSError: the path is invalid, cannot be opened or is not a regular file; `strerror` says why.
    """
    try:
        _check_regular(os.stat(path).st_mode, path)
        # The file may have been replaced since: open without blocking and check the open file again.
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
        most: the largest size accepted, in bytes.

    Raises:
        OSError: it cannot be read, is not a regular file or is larger; `strerror` says why.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1) if size <= most else b""  # `read` allocates the requested size at once
        if len(content) > size:  # the file grows, or is in /proc, whose files report a size of 0
            content += file.read(min(most - size, _MORE_BYTES))
    if size > most or len(content) > most:
        size = max(size, len(content))
        raise OSError(errno.EFBIG, f"the file has {size} bytes, more than the {most} that are read", str(path))
    return content


def read_input(path: Path | str, kind: str, error_type: type[CaffepyError], most: int, advice: str) -> bytes:
    """The bytes of a file that the user has named.

    Args:
        path: the file.
        kind: of file, for messages.
        error_type: of error.
        most: bytes that it may have.
        advice: what to do about a larger one.

    Raises:
        CaffepyError: an `error_type`: the file is absent, too large, not a regular file or cannot be read.
    """
    try:
        return read_regular(path, most)
    except FileNotFoundError:
        raise error_type(f"{path}: no such {kind}; check the path (working directory: {working_folder()})") from None
    except OSError as error:
        if error.errno == errno.EINVAL and Path(path).is_dir():
            raise error_type(f"{path}: this is a folder; name a {kind} in it") from None
        hint = f"; {advice}" if error.errno == errno.EFBIG else ""
        raise error_type(f"{path}: cannot read the {kind}: {error.strerror}{hint}") from None


def read_data(path: Path | str, most: int, name: str = "", advice: str = "") -> bytes:
    """The bytes of a regular file of data; `most` as in `read_regular`.

    Raises:
        DataError: it cannot be read; the message begins with `name` and ends with `advice`.
    """
    try:
        return read_regular(path, most)
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror}{advice}".lstrip()) from error


def read_list(path: Path | str, most: int, name: str) -> str:
    """Return the text of a list of files without its byte order mark; file names may hold any bytes.

    Raises:
        DataError: as `read_data`.
    """
    return os.fsdecode(read_data(path, most, name).removeprefix(codecs.BOM_UTF8))


def working_folder() -> str:
    """The working directory for a message, even if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return "a folder that has been removed"


def _check_regular(mode: int, path: Path | str) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def read_private(path: Path, most: int) -> bytes:
    """Return the bytes of a regular file that only this user may read and write.

    Args:
        path: the file.
        most: the largest size accepted, in bytes.

    Raises:
        UserError: another user owns it, other users may read or write it, or it is not a regular file.
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

    If the block fails, the new file is removed and `path` is unchanged. The temporary name is random and opened with
    O_EXCL, so that no link can be planted there; the mode follows the umask. Temporary files of killed processes that
    were writing `path` are removed.

    Args:
        path: the file to write.
        unharmed: a clause for the error's message that says what the failure leaves unchanged.
        durable: whether to fsync, which takes milliseconds, so that the file survives a crash of the system.

    Raises:
        RunError: the file cannot be written (no space, no permission, no such folder, or `path` is a device).
    """
    try:
        _check_replaceable(path)
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
                with suppress(OSError):  # the folder may be writable and not readable
                    remove_leftovers(path.parent, path.name.__eq__)
            except BaseException:
                with suppress(OSError):
                    temporary.unlink()
                with suppress(OSError):  # closing would flush the buffer
                    file.close()
                raise
    except OSError as error:
        raise _unwritable(path, error, unharmed) from error


def check_writable(path: Path) -> None:
    """Check, before a long computation, that `atomic_write` can write a file.

    Raises:
        RunError: it cannot.
    """
    try:
        if path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        _check_replaceable(path)
        temporary = temporary_beside(path)
        _create(temporary).close()
        temporary.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


def check_output(path: Path, overwrite: bool, inputs: Iterable[Path] = (), mark: bytes = b"") -> None:
    """Check, before a command reads or computes anything long, that it may write its output, and can.

    Args:
        path: the output.
        overwrite: whether the user gave --overwrite.
        inputs: files that the command reads.
        mark: the first bytes of files that the command writes; such a file is replaced unless it is an input. Empty:
            no file is known by its beginning.

    Raises:
        ConfigError: the output is an input, or a file that the command did not write, and `overwrite` is off.
        RunError: it cannot be written.
    """
    check_writable(path)
    if overwrite or not os.path.lexists(path):
        return
    if is_same_file(path, inputs):
        raise ConfigError(
            f"{path}: the output is also an input; name another file, or give --overwrite to replace the input"
        )
    if not (mark and _begins_with(path, mark)):
        raise ConfigError(f"{path}: the output exists; name another file, or give --overwrite to replace it")


def check_not_input(path: Path, inputs: Iterable[Path]) -> None:
    """Check that a tool of Caffe, which replaces an existing output as in Caffe, does not replace an input.

    Raises:
        ConfigError: it would.
    """
    if is_same_file(path, inputs):
        raise ConfigError(f"{path}: the output is also an input; name another file")


def is_same_file(path: Path, others: Iterable[Path]) -> bool:
    """Whether a file is one of others under this or another name: a link, or another path."""
    for other in others:
        with suppress(OSError, ValueError):  # one is absent, or has an invalid path
            if os.path.samefile(path, other):
                return True
    return False


def _begins_with(path: Path, mark: bytes) -> bool:
    try:
        with open_regular(path) as file:
            return file.read(len(mark)) == mark
    except OSError:
        return False


def _check_replaceable(path: Path) -> None:
    """Refuse a device, FIFO or socket: the rename would replace it by a file."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # there is none yet
        return
    if not stat.S_ISDIR(mode):
        _check_regular(mode, path)


def _unwritable(path: Path, error: OSError, unharmed: str = "") -> RunError:
    hints = [text for text in (unharmed, _ADVICE.get(error.errno or 0)) if text]
    return RunError("; ".join([f"{path}: cannot be written: {error.strerror or error}", *hints]))


def temporary_beside(path: Path) -> Path:
    """Return a random temporary name in the folder of `path`.

    Raises:
        OSError: the path is empty or the root directory.
    """
    if not path.name:
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def remove_leftovers(folder: Path, is_ours: Callable[[str], bool]) -> list[Path]:
    """Remove temporary files that killed processes left in `atomic_write`; returns the removed paths.

    Files of other users, files that a process still writes and files younger than this process are left alone.

    Args:
        folder: where to look.
        is_ours: takes the name of the target file; True to remove its temporary files.
    """
    removed = []
    for name in os.listdir(folder):
        match = _TEMPORARY.fullmatch(name)
        if match and is_ours(match[1]) and _remove_abandoned(folder / name):
            removed.append(folder / name)
    return removed


def remove_leftover_folders(path: Path, is_ours: Callable[[set[str]], bool]) -> None:
    """Remove temporary folders that killed processes left while they wrote the folder `path`.

    The exceptions of `remove_leftovers` hold, and `is_ours` takes the names of the folder's files.
    """
    for name in os.listdir(path.parent):
        match = _TEMPORARY.fullmatch(name)
        if match and match[1] == path.name:
            _remove_abandoned_folder(path.with_name(name), is_ours)


@contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """Make a folder and lock it within the block; a folder left by a killed process has no lock.

    Raises:
        OSError: it cannot be made, or exists.
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
    """Create a file that is locked while it is open; a file left by a killed process has no lock."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.fdopen(os.open(path, flags, 0o666), "wb")
    with suppress(OSError):  # a file system without locks: `_remove_abandoned` removes nothing there
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def _remove_abandoned(path: Path) -> bool:
    """Remove a temporary file that no process is writing; returns whether it was removed."""
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
    """Load a shared library without holding the GIL, which `ctypes.CDLL` holds.

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
    """Open /dev/null for standard streams that are closed.

    Otherwise the next file that is opened would get such a stream's descriptor, and the output of libraries.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            device = os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor: the stream's
            stream = open(device, "w" if number else "r", closefd=False)  # noqa: SIM115 - as long as the process
            setattr(sys, name, stream)

"""CUDA's libraries read from disk before they are loaded, in threads beside Python's imports.

After a machine was started, its first process that uses a GPU reads their kernels from disk in small pieces, as they
are touched, one after the other: to read whole files at once takes less. What lies in memory already is left alone.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue

LIBRARIES = (
    "libcudnn_graph.so", "libcudnn_heuristic.so", "libcudnn_engines_precompiled.so",
    "libcudnn_engines_runtime_compiled.so", "libcudnn_ops.so", "libcudnn_cnn.so",
)  # fmt: skip
"""What the names of the files begin with, in the order in which training wants them. Others are not here because
reading them (cuBLASLt has 500 MB) kept imports waiting for the disk."""

CUPY = ("cupy/_core", "cupy/cuda", "cupy_backends/cuda", "cupy_backends/cuda/api", "cupy_backends/cuda/libs")
"""Folders whose modules `import cupy` loads, while this process still imports what it trains with."""

SYSTEM_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/local/cuda/lib64", "/usr/lib64")

PIECE = 1 << 22
"""Bytes that are read at once."""

THREADS = 2
"""Files that are read at once; more would keep imports from theirs."""

MAX_OF_MEMORY = 0.25
"""Part of the free memory that the files may take."""


@cache
def begin() -> threading.Thread:
    """Begin to look for the files and to read them, once in a process; returns at once."""
    thread = threading.Thread(target=_read_all, name="read ahead", daemon=True)
    thread.start()
    return thread


def _read_all() -> None:
    files: SimpleQueue[Path] = SimpleQueue()
    for path in library_files():
        files.put(path)
    helpers = [threading.Thread(target=_read_some, args=(files,), name="read ahead", daemon=True)
               for _ in range(THREADS - 1)]  # fmt: skip
    for thread in helpers:
        thread.start()
    _read_some(files)
    for thread in helpers:
        thread.join()


def library_files(path: Sequence[str] | None = None, system: Sequence[str] = SYSTEM_FOLDERS) -> list[Path]:
    """The files of CuPy and of the libraries, these of NVIDIA's packages on Python's path, else of the system.

    None if all together take more memory than there is to spare.
    """
    path = sys.path if path is None else path
    folders = list(_package_folders(path)) + [Path(folder) for folder in system]
    found: dict[str, Path] = {}
    for folder in folders:
        with suppress(OSError):
            names = sorted(os.listdir(folder))
            for library in LIBRARIES:
                files = [folder / name for name in names if name.startswith(library)]
                if library not in found and files:
                    found[library] = files[0]
    files = list(_modules(path)) + [found[library] for library in LIBRARIES if library in found]
    return files if sum(map(_size, files)) <= MAX_OF_MEMORY * _free_memory() else []


def _package_folders(path: Sequence[str]) -> Iterator[Path]:
    for entry in path:
        with suppress(OSError):
            if entry:
                yield from sorted(Path(entry, "nvidia").glob("*/lib"))


def _modules(path: Sequence[str]) -> Iterator[Path]:
    """CuPy's compiled modules."""
    root = next((entry for entry in path if entry and os.path.isdir(os.path.join(entry, CUPY[0]))), None)
    for folder in CUPY if root else ():
        with suppress(OSError):
            yield from sorted(file for file in Path(str(root), folder).iterdir() if file.suffix == ".so")


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def _free_memory() -> int:
    with suppress(OSError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


def _read_some(files: SimpleQueue[Path]) -> None:
    buffer = memoryview(bytearray(PIECE))
    with suppress(Empty):
        while True:
            path = files.get_nowait()
            with suppress(OSError):
                read(path, buffer)


def read(path: Path, buffer: memoryview) -> int:
    """Read those pieces of a file that are not in memory; how many bytes that were.

    Args:
        path: the file.
        buffer: takes a piece.

    Raises:
        OSError: it cannot be read, or the file system does not say what is in memory.
    """
    number = 0
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        for offset in range(0, size, len(buffer)):
            if not _is_in_memory(file, (offset + min(size, offset + len(buffer))) // 2, buffer):
                number += os.preadv(file, [buffer], offset)
    finally:
        os.close(file)
    return number


def _is_in_memory(file: int, offset: int, buffer: memoryview) -> bool:
    """Whether a byte is; not the first of a piece, because the system reads on a little behind the piece before."""
    try:
        os.preadv(file, [buffer[:1]], offset, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno != errno.EAGAIN:
            raise
        return False
    return True

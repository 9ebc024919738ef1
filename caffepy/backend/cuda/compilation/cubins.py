"""Kernels' machine code in the cache folder: looked up, compiled where it is missing, here or by other processes.

Owns the key of a text, the files of all keys, and the processes that compile ahead. A file whose content is not what
its name says is compiled anew.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import shutil
import tempfile
import threading
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path

from caffepy.backend.cuda.compilation import worker
from caffepy.backend.cuda.compilation.pool import Job, Pool, most_processes, worker_command
from caffepy.backend.cuda.compilation.target import Target, nvrtc
from caffepy.caches import version_folder
from caffepy.errors import RunError
from caffepy.files import read_regular
from caffepy.version import __version__

logger = logging.getLogger(__name__)

_MAX_BYTES = 1 << 26
"""Of a file."""

_pools: dict[str, Pool] = {}
_making = threading.Lock()


@cache
def temporary_folder() -> Path:
    """Where files go that cannot be kept; removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="caffepy-cubins-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def cubin_folder() -> Path:
    """The folder of the .cubin files, in the cache folder or, where that cannot be written, a temporary one."""
    return version_folder("cubins", __version__) or temporary_folder()


@lru_cache(maxsize=4096)
def key_of(text: str, target: Target) -> str:
    """The name of a text's machine code: a digest of text, compiler and options."""
    parts = (target.identity, *target.options, text)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


def find_cubin(text: str, target: Target) -> Path | None:
    """The file of a text's machine code, None where there is none or it is damaged."""
    folder = cubin_folder()
    name = worker.find(str(folder), key_of(text, target))
    return _whole(folder / name) if name else None


def _whole(path: Path) -> Path | None:
    try:
        if worker.is_whole(path.name, read_regular(path, _MAX_BYTES)):
            return path
        logger.warning("%s is damaged and is made anew", path)
        path.unlink()
    except OSError as error:
        logger.debug("%s cannot be read: %s", path, error)
    return None


def foresee(text: str, target: Target) -> None:
    """Have a text compiled by another process where it is not in the cache, and other processes can be started."""
    if find_cubin(text, target) is None:
        _pool(target).add(Job(key_of(text, target), text.encode(), target.options))


def is_known(net: str, target: Target) -> bool:
    """Whether the kernels of a net of this description were foreseen before, so that they are in the cache."""
    return (cubin_folder() / f"{key_of(net, target)}.foreseen").exists()


def remember(net: str, target: Target) -> None:
    """Let `is_known` be true from now on, in later processes too."""
    with suppress(OSError):
        (cubin_folder() / f"{key_of(net, target)}.foreseen").touch()


def make_cubin(text: str, target: Target) -> Path:
    """The file of a text's machine code; compiles it where no process does.

    Raises:
        RunError: it does not compile.
    """
    found = find_cubin(text, target)
    if found is None and target.library in _pools:
        name = _pools[target.library].result(key_of(text, target))
        found = _whole(cubin_folder() / name) if name else None
    return found or _keep(key_of(text, target), _compile(text, target))


def _compile(text: str, target: Target) -> bytes:
    try:
        return nvrtc(target.library).compile(text.encode(), [option.encode() for option in target.options])
    except worker.CompileError as error:
        words = " ".join(str(error).split())
        raise RunError(f"NVRTC {target.identity} refuses a CUDA kernel of caffepy's: {words}") from error


def _keep(key: str, cubin: bytes) -> Path:
    folder = cubin_folder()
    try:
        return folder / worker.keep(str(folder), key, cubin)
    except OSError as error:
        logger.debug("%s cannot be written: %s", folder, error)
        return temporary_folder() / worker.keep(str(temporary_folder()), key, cubin)


def _pool(target: Target) -> Pool:
    with _making:
        if target.library not in _pools:
            command = worker_command(worker.__file__, target.library, str(cubin_folder()))
            _pools[target.library] = Pool(command, most_processes() if command else 0)
        return _pools[target.library]


def end_processes() -> None:
    """End the processes that compile ahead; later ones are started anew where there is need."""
    with _making:
        pools = list(_pools.values())
        _pools.clear()
    for pool in pools:
        pool.close()

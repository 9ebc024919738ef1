"""The cache folder of caffepy: in the user's cache folder, never beside the package.

    $XDG_CACHE_HOME/caffepy/autotune-5.json             the fastest algorithms (cuda/convolution/cache.py)
    $XDG_CACHE_HOME/caffepy/kernels-0.2.0-5f0c63a1b2d4/ compiled CPU kernels (cpu/jit/compiler.py)
    $XDG_CACHE_HOME/caffepy/plans-0.2.0-9c1e0b7d2f3a/   cuDNN's plans (cuda/convolution/cache.py)

XDG_CACHE_HOME defaults to ~/.cache. CuPy keeps compiled CUDA kernels in a folder of its own. site-packages may be
read-only, and files there survive `pip uninstall` and shadow the next installation.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

UNUSED_DAYS = 30
"""The folder of another version is removed after this many days without use."""


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return caffepy's cache folder, which need not exist; None without XDG_CACHE_HOME and a home directory."""
    given = Path(environment.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():  # the XDG specification says to ignore relative ones
        return given / "caffepy"
    try:
        return Path.home() / ".cache" / "caffepy"
    except RuntimeError:
        return None


@cache
def version_folder(kind: str, version: str) -> Path | None:
    """Return the cache folder of one kind and version of files; made, or marked as used, once per process.

    The process that makes it removes folders of other versions that were not used for `UNUSED_DAYS`. An existing folder
    may be read-only. A folder that other users may write to is refused, because cached machine code is executed.

    Args:
        kind: of the files, e.g. ``kernels``.
        version: files of different versions are never mixed.

    Returns:
        None where the folder cannot be made or other users may write to it.
    """
    parent = cache_folder()
    if parent is None:
        return None
    folder = parent / f"{kind}-{version}"
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_safe(parent):
            return None
        if _make(folder):
            _remove_unused(parent, kind)
        return folder if _is_safe(folder) else None
    except OSError as error:
        logger.info("%s cannot be made, so %s are not kept for the next process: %s", folder, kind, error.strerror)
        return None


def _is_safe(folder: Path) -> bool:
    """Whether only this user, root and the folder's group may write into a folder."""
    status = folder.stat()
    if is_own(status, os.geteuid()) and not status.st_mode & stat.S_IWOTH:
        return True
    logger.warning(
        "%s can be written by other users: what is compiled is neither read from there nor kept; remove it, or set "
        "XDG_CACHE_HOME to a folder of your own",
        folder,
    )
    return False


def is_own(status: os.stat_result, user: int) -> bool:
    """Whether a file belongs to a user, or to root."""
    return status.st_uid in (user, 0)


def _make(folder: Path) -> bool:
    """Make a folder, or mark it as used now; returns whether it was made."""
    try:
        folder.mkdir(mode=0o700)
        return True
    except FileExistsError:
        if not folder.is_dir():
            raise
    with suppress(OSError):
        os.utime(folder)
    return False


def _remove_unused(parent: Path, kind: str) -> None:
    oldest = time.time() - UNUSED_DAYS * 24 * 3600
    for folder in parent.glob(f"{kind}-*"):
        with suppress(OSError):
            if folder.stat().st_mtime < oldest:
                shutil.rmtree(folder, ignore_errors=True)

"""Where caffepy keeps what it can make again: in the user's cache folder, never beside the package.

    $XDG_CACHE_HOME/caffepy/autotune-3.json             the fastest algorithms (cuda/convolution/autotune_cache.py)
    $XDG_CACHE_HOME/caffepy/kernels-0.1.0-5f0c63a1b2d4/ compiled CPU kernels (cpu/jit/cache.py)
    $XDG_CACHE_HOME/caffepy/cubins-0.1.0/               CUDA kernels' machine code (cuda/compilation/cubins.py)
    $XDG_CACHE_HOME/caffepy/plans-0.1.0-9c1e0b7d2f3a/   cuDNN's plans (cuda/convolution/kept_plans.py)

XDG_CACHE_HOME is ~/.cache where it is not set. site-packages may be read-only, and what lies there outlives
`pip uninstall` and shadows the next installation.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

UNUSED_DAYS = 30
"""After so many days without a process that used it, the folder of another version is removed."""


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """caffepy's cache folder, which need not exist; None where there is neither XDG_CACHE_HOME nor a home."""
    given = Path(environment.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():  # the XDG specification says to ignore relative ones
        return given / "caffepy"
    try:
        return Path.home() / ".cache" / "caffepy"
    except RuntimeError:
        return None


@cache
def version_folder(kind: str, version: str) -> Path | None:
    """The folder of one version of a kind of files; once a process it is made, or marked as used.

    Whoever makes it removes those of other versions that nobody used for `UNUSED_DAYS`. A folder that is there and
    cannot be written is good for reading.

    Args:
        kind: what the files are, e.g. ``kernels``.
        version: tells apart what must not be mixed.

    Returns:
        None where it cannot be made.
    """
    parent = cache_folder()
    if parent is None:
        return None
    folder = parent / f"{kind}-{version}"
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _make(folder):
            _remove_unused(parent, kind)
    except OSError as error:
        logger.info("%s cannot be made, so %s are not kept for the next process: %s", folder, kind, error.strerror)
        return None
    return folder


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

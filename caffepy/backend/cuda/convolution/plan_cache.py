"""cuDNN plans in cuDNN's serialised form, cached on disk for later processes.

Building a plan queries heuristics for all plans of its graph and may compile kernels; loading one does neither. There
is one file per plan, in a folder per GPU model and release of cuDNN, of its frontend and of caffepy. Files are
untrusted: they are read up to a maximum size, and used only if their header names this plan and the checksum matches. A
file that cannot be read or written only costs time.
"""

from __future__ import annotations

import hashlib
import logging
from functools import cached_property
from pathlib import Path

from caffepy import version
from caffepy.errors import RunError
from caffepy.utils.caches import version_folder
from caffepy.utils.files import atomic_write, read_regular

logger = logging.getLogger(__name__)

_BEGINNING = b"caffepy's copy of a plan of cuDNN, 1\n"
"""File header; change it when the format changes."""

_DIGEST = hashlib.sha256().digest_size

MAX_BYTES = 1 << 24
"""Maximum bytes of a plan; most have a few thousand."""


class PlanCache:
    """The plans of one GPU model.

    Args:
        device: names and versions of the GPU and the libraries, part of each key.
    """

    def __init__(self, device: str) -> None:
        self._device = device

    def read(self, key: str) -> bytes | None:
        """Return the plan stored under a key, or None."""
        path = self._path(key)
        if path is None:
            return None
        try:
            content = read_regular(path, len(_BEGINNING) + 2 * _DIGEST + MAX_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.debug("%s: a cuDNN plan cannot be read and is rebuilt: %s", path, error)
            return None
        head, plan = content[: len(_BEGINNING) + 2 * _DIGEST], content[len(_BEGINNING) + 2 * _DIGEST :]
        if head != self._head(key, plan):
            logger.debug("%s: the header or checksum does not match, the plan is rebuilt", path)
            return None
        return plan

    def write(self, key: str, plan: bytes) -> None:
        """Store a plan; failures are logged and ignored."""
        path = self._path(key)
        if path is None or len(plan) > MAX_BYTES:
            return
        try:
            with atomic_write(path, durable=False) as file:  # the checksum detects a damaged file
                file.write(self._head(key, plan) + plan)
        except (OSError, RunError) as error:
            logger.debug("%s: a cuDNN plan is not stored: %s", path, error)

    def _head(self, key: str, plan: bytes) -> bytes:
        """Return a file's header."""
        return _BEGINNING + self._digest(key) + hashlib.sha256(plan).digest()

    def _digest(self, key: str) -> bytes:
        return hashlib.sha256(f"{self._device}; {key}".encode()).digest()

    def _path(self, key: str) -> Path | None:
        return None if self._folder is None else self._folder / self._digest(key).hex()[:32]

    @cached_property
    def _folder(self) -> Path | None:
        digest = hashlib.sha256(self._device.encode()).hexdigest()[:12]
        return version_folder("plans", f"{version.__version__}-{digest}")

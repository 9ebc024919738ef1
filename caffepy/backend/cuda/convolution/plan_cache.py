"""cuDNN's plans in its own serialised form, kept on disk for the processes that come later.

To build a plan asks heuristics for all plans of its graph first and may compile kernels; to read one does neither. Owns
the files: one for each plan, in a folder for each kind of GPU and each release of cuDNN, of its frontend and of
caffepy. What is in a file may be anything: it is read only up to a size, and used only if it says that it holds this
very plan and its checksum is right. A file that cannot be read or written costs time and nothing else.
"""

from __future__ import annotations

import hashlib
import logging
from functools import cached_property
from pathlib import Path

from caffepy import version
from caffepy.caches import version_folder
from caffepy.errors import RunError
from caffepy.files import atomic_write, read_regular

logger = logging.getLogger(__name__)

_BEGINNING = b"caffepy's copy of a plan of cuDNN, 1\n"
"""Of each file; to be changed when what follows changes."""

_DIGEST = hashlib.sha256().digest_size

MAX_BYTES = 1 << 24
"""Of a plan; most have a few thousand."""


class PlanCache:
    """The plans of one kind of GPU.

    Args:
        device: the GPU's and the libraries' names and versions: what plans depend on beside what they are asked for.
    """

    def __init__(self, device: str) -> None:
        self._device = device

    def read(self, key: str) -> bytes | None:
        """The plan that was kept under a key; None if there is none that can be used."""
        path = self._path(key)
        if path is None:
            return None
        try:
            content = read_regular(path, len(_BEGINNING) + 2 * _DIGEST + MAX_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.debug("%s: a plan of cuDNN cannot be read, it is built anew: %s", path, error)
            return None
        head, plan = content[: len(_BEGINNING) + 2 * _DIGEST], content[len(_BEGINNING) + 2 * _DIGEST :]
        if head != self._head(key, plan):
            logger.debug("%s: not what was kept there, the plan is built anew", path)
            return None
        return plan

    def write(self, key: str, plan: bytes) -> None:
        """Keep a plan, if that can be done."""
        path = self._path(key)
        if path is None or len(plan) > MAX_BYTES:
            return
        try:
            with atomic_write(path, durable=False) as file:  # a damaged one is noticed
                file.write(self._head(key, plan) + plan)
        except (OSError, RunError) as error:
            logger.debug("%s: a plan of cuDNN is not kept: %s", path, error)

    def _head(self, key: str, plan: bytes) -> bytes:
        """What a file begins with."""
        return _BEGINNING + self._digest(key) + hashlib.sha256(plan).digest()

    def _digest(self, key: str) -> bytes:
        return hashlib.sha256(f"{self._device}; {key}".encode()).digest()

    def _path(self, key: str) -> Path | None:
        return None if self._folder is None else self._folder / self._digest(key).hex()[:32]

    @cached_property
    def _folder(self) -> Path | None:
        digest = hashlib.sha256(self._device.encode()).hexdigest()[:12]
        return version_folder("plans", f"{version.__version__}-{digest}")

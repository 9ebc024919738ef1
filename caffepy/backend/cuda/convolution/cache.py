"""Caches on disk for later processes: the fastest candidate of each task (autotuning), and cuDNN's plans.

Owns the file of decisions in the user's cache folder. All processes that share the file use the same decisions: one
process tunes a task while the others wait. If two processes tune a task nevertheless, the first entry in the file wins.
Therefore the bits of a run do not depend on whether its decisions were cached.

cuDNN's plans are cached in cuDNN's serialised form. Building a plan queries heuristics for all plans of its graph and
may compile kernels; loading one does neither. There is one file per plan, in a folder per GPU model and release of
cuDNN, of its frontend and of caffepy. Files are untrusted: they are read up to a maximum size, and used only if their
header names this plan and the checksum matches. A file that cannot be read or written only costs time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from caffepy import version
from caffepy.errors import RunError
from caffepy.utils.caches import cache_folder, version_folder
from caffepy.utils.files import atomic_write, read_regular

logger = logging.getLogger(__name__)


# -- cuDNN's plans -------------------------------------------------------------------------------------

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
        # The key is in the header too: a file that was renamed or copied must not be loaded as another plan.
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


# -- decisions -----------------------------------------------------------------------------------------

VERSION = 5
"""Increment it when a change of candidates invalidates old decisions."""

WAIT = 120.0
"""Seconds to wait for another thread or process that tunes the same task, before tuning it here."""

_WRITE_WAIT = 30.0
"""Seconds to wait for another process that writes the file."""

_MAX_BYTES = 1 << 26
"""Maximum bytes of the file."""

_POLL_INTERVAL = 0.02
"""Polling interval of file locks in seconds."""


@dataclass(frozen=True)
class Decision:
    """The choice for a task.

    Args:
        name: name of the fastest candidate.
        microseconds: its time.
    """

    name: str
    microseconds: float


class Decisions:
    """Decisions of this and other processes, shared by all solver threads.

    Args:
        path: the file, or None. It is read at first use and before a task is tuned, and written after each new
            decision.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = {}
        self._locks = _FileLocks(None if path is None else path.with_name(f"{path.name}.lock"))
        self._passing: dict[str, Decision] = {}
        self._known = self._read()

    def get(self, key: str) -> Decision | None:
        """Return the decision of a task, or None."""
        return self._known.get(key) or self._passing.get(key)

    def put(self, key: str, decision: Decision, instead: str | None = None, lasting: bool = True) -> Decision:
        """Store a decision. A failed write is logged and ignored.

        Args:
            key: the task.
            decision: the choice.
            instead: a previous candidate that no longer exists, to be replaced.
            lasting: whether to share the decision with other processes.

        Returns:
            The decision in effect: this one, or an earlier one of another thread or process.
        """
        with self._lock, self._locks.held(None, _WRITE_WAIT):
            known = {name: d for name, d in self._known.items() if name != key or d.name != instead}
            # Other processes may have written since: entries of the file are kept, and entries of this process win over
            # them.
            self._known = {**self._read(), **known}
            current = self._known.get(key) or self._passing.get(key)
            if current is not None and current.name != instead:
                return current
            self._known.pop(key, None)
            self._passing.pop(key, None)
            if not lasting:
                self._passing[key] = decision
                return decision
            self._known[key] = decision
            try:
                self._write()
            except (OSError, RunError) as error:
                logger.debug("%s: autotuning decisions are not stored: %s", self._path, error)
        return decision

    @contextmanager
    def turn(self, key: str) -> Iterator[None]:
        """Serialise the tuning of a task across threads and processes, so that others find its decision."""
        with self._lock:
            lock = self._turns.setdefault(key, threading.Lock())
        # A thread that tunes may be stuck with its device; after the wait the task is tuned twice, which only costs
        # time.
        acquired = lock.acquire(timeout=WAIT)
        try:
            # The thread before has decided; no lock of the file is needed.
            if self.get(key) is not None:
                yield
                return
            with self._locks.held(key, WAIT):
                with self._lock:
                    # Read under the lock: another process that held it may have decided.
                    self._known = {**self._read(), **self._known}
                yield
        finally:
            if acquired:
                lock.release()

    def _read(self) -> dict[str, Decision]:
        if self._path is None:
            return {}
        try:
            entries = json.loads(read_regular(self._path, _MAX_BYTES))
            return {str(key): Decision(_name(name), float(time)) for key, (name, time) in entries.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            logger.warning("%s: not a file of autotuning decisions, ignored: %s", self._path, error)
            return {}

    def _write(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        entries = {key: (d.name, round(d.microseconds, 2)) for key, d in sorted(self._known.items())}
        with atomic_write(self._path) as file:
            file.write(json.dumps(entries, indent=0).encode())


class _FileLocks:
    """Locks shared by processes: one per key (by checksum) and one global lock.

    Args:
        path: an empty lock file. Without it, or if it cannot be locked (some network drives), locks have no effect.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: int | None = None
        self._opening = threading.Lock()

    @contextmanager
    def held(self, key: str | None, seconds: float) -> Iterator[None]:
        """Hold a key's lock (None: the global lock) in a `with` block, which starts without it after `seconds`."""
        # Each process may hold one lock of each kind at a time, because file locks belong to processes, not to threads.
        offset = 0 if key is None else 1 + zlib.crc32(key.encode())
        file = self._opened()
        locked = file is not None and _lock(file, offset, seconds)
        try:
            yield
        finally:
            if locked and file is not None:
                fcntl.lockf(file, fcntl.LOCK_UN, 1, offset)

    def _opened(self) -> int | None:
        """Return the open file. It stays open, because closing it releases all locks of the process."""
        with self._opening:
            if self._file is None and self._path is not None:
                try:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                except OSError as error:
                    logger.debug("%s: autotuning is not shared with other processes: %s", self._path, error)
            return self._file


def _lock(file: int, offset: int, seconds: float) -> bool:
    """Lock a byte of a file. Return False after `seconds` or on failure."""
    end = time.monotonic() + seconds
    while True:
        try:
            # One byte of the file for each key, so that processes tune different tasks at once.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
            return True
        except (BlockingIOError, PermissionError):  # another process holds it
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_INTERVAL)
        except OSError as error:
            logger.debug("autotuning is not shared with other processes: %s", error)
            return False


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a candidate's name is {value!r}")
    return value


def cache_file(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file of decisions, or None without a cache folder."""
    folder = cache_folder(environment)
    return None if folder is None else folder / f"autotune-{VERSION}.json"


_decisions: dict[Path | None, Decisions] = {}
_making = threading.Lock()


def decisions(path: Path | None) -> Decisions:
    """Return the decisions of a file, one object for all threads.

    Separate objects would not exclude each other, because file locks belong to processes.
    """
    with _making:  # functools.cache alone may call the function once per thread
        if path not in _decisions:
            _decisions[path] = Decisions(path)
        return _decisions[path]

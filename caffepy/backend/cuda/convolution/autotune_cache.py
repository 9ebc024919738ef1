"""The autotuning cache: which candidate is the fastest for which task, shared with other and earlier processes.

Owns the file of decisions in the user's cache folder. All processes that share the file, at once or one after the
other, decide alike: one of them looks into a task while the others wait, and where two have looked all the same, what
came into the file first holds. So the bits of a run do not depend on whether its decisions were cached.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caffepy.caches import cache_folder
from caffepy.errors import RunError
from caffepy.files import atomic_write, read_regular

logger = logging.getLogger(__name__)

VERSION = 5
"""To be raised when candidates change so that old decisions no longer hold."""

WAIT = 120.0
"""Seconds that a thread waits for another one, of any process, that tries the same task, before it tries for itself."""

_WRITE_WAIT = 30.0
"""Seconds that a thread waits for another process that is writing the file."""

_MAX_BYTES = 1 << 26
"""Of the file."""

_LOOK = 0.02
"""Seconds between looks whether another process has given a lock back."""


@dataclass(frozen=True)
class Decision:
    """The choice for a task.

    Args:
        name: the fastest candidate's.
        microseconds: what it takes.
    """

    name: str
    microseconds: float


class Decisions:
    """Decisions of this process and of others, shared by all solver threads.

    Args:
        path: file that they are kept in, if any; read once and whenever a task is looked into, written whenever there
            is a new decision.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = {}
        self._locks = _FileLocks(None if path is None else path.with_name(f"{path.name}.lock"))
        self._passing: dict[str, Decision] = {}
        self._known = self._read()

    def get(self, key: str) -> Decision | None:
        """What was decided, if anything."""
        return self._known.get(key) or self._passing.get(key)

    def put(self, key: str, decision: Decision, instead: str | None = None, lasting: bool = True) -> Decision:
        """Remember a decision; a file that cannot be written is no reason to stop.

        Args:
            key: the task.
            decision: the choice.
            instead: the candidate that was decided on before and is not there any more.
            lasting: other processes are to decide so too; else it holds in this one alone.

        Returns:
            What holds from now on: the decision, or that of somebody who was faster.
        """
        with self._lock, self._locks.held(None, _WRITE_WAIT):
            known = {name: d for name, d in self._known.items() if name != key or d.name != instead}
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
                logger.debug("%s: autotuning is not remembered: %s", self._path, error)
        return decision

    @contextmanager
    def turn(self, key: str) -> Iterator[None]:
        """Let one thread at a time, of all processes, look into a task, so that the others find its decision."""
        with self._lock:
            lock = self._turns.setdefault(key, threading.Lock())
        acquired = lock.acquire(timeout=WAIT)
        try:
            if self.get(key) is not None:
                yield
                return
            with self._locks.held(key, WAIT):
                with self._lock:
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
    """Locks that processes share: one for each key, as far as their checksums differ, and one for all.

    Args:
        path: a file of no content. Where there is none, or it cannot be locked (some network drives), nobody waits.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: int | None = None
        self._opening = threading.Lock()

    @contextmanager
    def held(self, key: str | None, seconds: float) -> Iterator[None]:
        """Hold a key's lock, or with None the one for all, in a `with` block, which begins without it after `seconds`.

        Of each lock a process may hold one at a time: locks belong to processes, not to threads.
        """
        offset = 0 if key is None else 1 + zlib.crc32(key.encode())
        file = self._opened()
        locked = file is not None and _lock(file, offset, seconds)
        try:
            yield
        finally:
            if locked and file is not None:
                fcntl.lockf(file, fcntl.LOCK_UN, 1, offset)

    def _opened(self) -> int | None:
        """The file, open; it stays so, because to close it would give all locks of the process back."""
        with self._opening:
            if self._file is None and self._path is not None:
                try:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                except OSError as error:
                    logger.debug("%s: autotuning is not shared with other processes: %s", self._path, error)
            return self._file


def _lock(file: int, offset: int, seconds: float) -> bool:
    """Lock a byte of a file; False if that takes too long or cannot be done."""
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
            return True
        except (BlockingIOError, PermissionError):  # another process holds it
            if time.monotonic() > end:
                return False
            time.sleep(_LOOK)
        except OSError as error:
            logger.debug("autotuning is not shared with other processes: %s", error)
            return False


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a candidate's name is {value!r}")
    return value


def cache_file(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where decisions are kept; None where there is no cache folder."""
    folder = cache_folder(environment)
    return None if folder is None else folder / f"autotune-{VERSION}.json"


_decisions: dict[Path | None, Decisions] = {}
_making = threading.Lock()


def decisions(path: Path | None) -> Decisions:
    """The decisions of a file, the same for all threads.

    Threads with objects of their own would not wait for each other, and decide differently: file locks are a process's.
    """
    with _making:  # functools.cache calls the function once in each thread that comes before the first has returned
        if path not in _decisions:
            _decisions[path] = Decisions(path)
        return _decisions[path]

"""Which candidate was found to be the fastest for which task, in this process and in earlier ones.

Owns the file of decisions in the user's cache folder.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from caffepy.caches import cache_folder

logger = logging.getLogger(__name__)

VERSION = 2
"""To be raised when candidates change so that old decisions no longer hold."""

WAIT = 120.0
"""Seconds that a thread waits for another one that tries the same task, before it tries for itself."""


@dataclass(frozen=True)
class Decision:
    """What was found for a task.

    Args:
        name: the fastest candidate's.
        microseconds: what it takes.
    """

    name: str
    microseconds: float


class Decisions:
    """Decisions of this process and of earlier ones, shared by all solver threads.

    Args:
        path: file that they are kept in, if any; read once, written whenever there is a new one.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = {}
        self._known = self._read()

    def get(self, key: str) -> Decision | None:
        """What was decided, if anything."""
        return self._known.get(key)

    def put(self, key: str, decision: Decision) -> None:
        """Remember; a file that cannot be written is no reason to stop."""
        with self._lock:
            self._known = {**self._read(), **self._known, key: decision}
            try:
                self._write()
            except OSError as error:
                logger.debug("%s: autotuning is not remembered: %s", self._path, error)

    @contextmanager
    def turn(self, key: str) -> Iterator[None]:
        """Let one thread at a time look into a task, so that the others find its decision."""
        with self._lock:
            lock = self._turns.setdefault(key, threading.Lock())
        held = lock.acquire(timeout=WAIT)
        try:
            yield
        finally:
            if held:
                lock.release()

    def _read(self) -> dict[str, Decision]:
        if self._path is None:
            return {}
        try:
            stored = json.loads(self._path.read_text(encoding="utf-8"))
            return {str(key): Decision(_name(name), float(time)) for key, (name, time) in stored.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            logger.warning("%s: not a file of autotuning decisions, ignored: %s", self._path, error)
            return {}

    def _write(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.{threading.get_ident()}")
        stored = {key: (d.name, round(d.microseconds, 2)) for key, d in sorted(self._known.items())}
        temporary.write_text(json.dumps(stored, indent=0), encoding="utf-8")
        os.replace(temporary, self._path)


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a candidate's name is {value!r}")
    return value


def cache_file(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where decisions are kept; None where there is no cache folder."""
    folder = cache_folder(environment)
    return None if folder is None else folder / f"autotune-{VERSION}.json"


@cache
def decisions(path: Path | None) -> Decisions:
    """The decisions of a file, the same for all threads."""
    return Decisions(path)

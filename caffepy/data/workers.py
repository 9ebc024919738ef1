"""Threads for work that releases the GIL (image decoding, disk reads), a parallel map, and progress of a conversion.

The map yields results in the order of the items.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from caffepy.errors import RunError
from caffepy.utils.process_fork import tell_after_fork

logger = logging.getLogger(__name__)


# -- the pool ------------------------------------------------------------------------------------------

_POLL_SECONDS = 1.0
"""Interval at which the caller checks that the worker threads are alive."""


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Options of glibc's mallopt(3)."""
_KEPT_BYTES, _MAPPED_BYTES = 1 << 28, 1 << 25
"""Freed memory that an arena keeps, and the size from which memory is mapped anew each time (the largest allowed)."""


def keep_freed_memory() -> None:
    """Let glibc keep the memory that threads free; other C libraries have no such setting.

    By default glibc returns blocks of an image's size to the system. Each image would cost hundreds of page faults, and
    each return interrupts the cores of all threads.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


class _Job:
    """A queue of items that several threads process."""

    def __init__(self, function: Callable[[int], None], items: Iterable[int]) -> None:
        self._function = function
        self._items = deque(items)
        self._changed = threading.Condition()
        self._working: set[threading.Thread] = set()
        self.error: BaseException | None = None

    def process(self) -> None:
        thread = threading.current_thread()
        with self._changed:
            self._working.add(thread)
        try:
            while self.error is None and (item := self._pop()) is not None:
                self._function(item)
        except BaseException as error:
            self.error = error
        finally:
            with self._changed:
                self._working.discard(thread)
                self._changed.notify_all()

    def wait(self) -> None:
        """Wait until no thread processes an item. A dead thread counts as an error."""
        with self._changed:
            while self._working:
                if dead := [thread.name for thread in self._working if not thread.is_alive()]:
                    self.error = self.error or RunError(f"the thread '{dead[0]}' ended in the middle of its work")
                    return
                self._changed.wait(_POLL_SECONDS)

    def _pop(self) -> int | None:
        try:
            return self._items.popleft()
        except IndexError:
            return None


class Workers:
    """A thread pool in which the caller works too. Threads start on first use.

    The threads are daemons: a thread that hangs on a dead network drive does not keep the process alive.

    Args:
        threads: number of threads, including the caller.
        name: thread name.
    """

    def __init__(self, threads: int, name: str = "worker") -> None:
        self.threads = max(threads, 1)
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._started: list[threading.Thread] = []
        tell_after_fork(self)

    def forked(self) -> None:
        """Reset after a fork; the next `run` starts threads in the child."""
        self._jobs = queue.SimpleQueue()
        self._started.clear()

    def run(self, function: Callable[[int], None], items: Iterable[int]) -> None:
        """Call `function` with each item, in any order. The first error stops the pool and is raised."""
        numbers = list(items)
        helpers = min(self.threads, len(numbers)) - 1
        self._started = [thread for thread in self._started if thread.is_alive()]
        while len(self._started) < helpers:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._started.append(thread)
            thread.start()
        job = _Job(function, numbers)
        for _ in range(helpers):
            self._jobs.put(job)
        job.process()
        job.wait()
        if job.error is not None:
            raise job.error

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.process()

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        for _ in self._started:
            self._jobs.put(None)
        for thread in self._started:
            thread.join()
        self._started.clear()


# -- the map -------------------------------------------------------------------------------------------

Item = TypeVar("Item")
Result = TypeVar("Result")

_CHUNK = 4
"""Items per task: submitting a task costs as much Python time as a small image."""
_TASKS_AHEAD = 3
"""Submitted tasks per thread, including finished ones; bounds the memory of decoded images."""


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """Yield ``map(function, items)``; threads compute the results ahead of the consumer.

    An item's exception is raised at its position. If the consumer stops early, it waits only for running tasks.
    """
    remaining = iter(items)
    chunks = iter(lambda: list(islice(remaining, _CHUNK)), [])
    executor = ThreadPoolExecutor(threads, thread_name_prefix="convert")
    running: deque[Future[list[Result]]] = deque()
    try:
        for chunk in chunks:
            running.append(executor.submit(lambda chunk: [function(item) for item in chunk], chunk))
            if len(running) > _TASKS_AHEAD * threads:
                yield from running.popleft().result()
        while running:
            yield from running.popleft().result()
    finally:
        executor.shutdown(cancel_futures=True)


# -- progress ------------------------------------------------------------------------------------------


_LOG_SECONDS = 10.0
"""Interval between log lines."""


class Progress:
    """Counts processed items and logs the count periodically.

    Args:
        unit: name of the items, in the plural.
    """

    def __init__(self, unit: str = "files") -> None:
        self.done = 0
        self.total = 0
        self._unit = unit
        self._logged = time.monotonic()

    def advance(self, count: int = 1) -> None:
        """Add `count` to the processed items."""
        self.done += count
        now = time.monotonic()
        if now - self._logged >= _LOG_SECONDS:
            self._logged = now
            logger.info("Processed %d of %d %s.", self.done, self.total, self._unit)

    def finish(self, count: int) -> None:
        """Log the final count, in the words of Caffe's tools."""
        logger.info("Processed %d %s.", count, self._unit)

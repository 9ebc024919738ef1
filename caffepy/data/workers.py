"""A thread pool for work that releases the GIL: image decoding and disk reads."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable

from caffepy.errors import RunError
from caffepy.utils.process_fork import tell_after_fork

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

"""A parallel map that yields results in the order of the items.

Progress of a conversion.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

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


logger = logging.getLogger(__name__)

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

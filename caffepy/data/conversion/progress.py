"""How far a conversion is, for whoever shows it."""

from __future__ import annotations

import logging
import os
import time

logger = logging.getLogger(__name__)

_LOG_SECONDS = 10.0
"""Between two lines of the log."""


class Progress:
    """Counts what is done, and says so in the log from time to time.

    Args:
        what: what is counted, in the plural.
    """

    def __init__(self, what: str = "files") -> None:
        self.done = 0
        self.total = 0
        self._what = what
        self._logged = time.monotonic()

    def advance(self, count: int = 1) -> None:
        """Count `count` more."""
        self.done += count
        now = time.monotonic()
        if now - self._logged >= _LOG_SECONDS:
            self._logged = now
            logger.info("Processed %d of %d %s.", self.done, self.total, self._what)

    def finish(self, count: int) -> None:
        """Log what came of it, in the words of Caffe's tools."""
        logger.info("Processed %d %s.", count, self._what)


def all_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

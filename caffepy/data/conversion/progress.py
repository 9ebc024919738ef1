"""Progress of a conversion."""

from __future__ import annotations

import logging
import time

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

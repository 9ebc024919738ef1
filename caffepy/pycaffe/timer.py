"""Timer of host or GPU work (pycaffe's Timer; Caffe's `benchmark.cpp`)."""

from __future__ import annotations

import logging

from caffepy.backend.handles import TimedEvent
from caffepy.backend.synchronous import HostTimedEvent
from caffepy.pycaffe.mode import mode

logger = logging.getLogger(__name__)


class Timer:
    """Measures milliseconds between `start` and `stop`; after `set_mode_gpu`, on the GPU's stream."""

    def __init__(self) -> None:
        self._start: TimedEvent | None = None
        self._stop: TimedEvent | None = None

    def start(self) -> None:
        """Start the timer. No effect if it is running."""
        if self._start is None or self._stop is not None:
            self._start, self._stop = _now(), None

    def stop(self) -> None:
        """Stop the timer if it is running."""
        if self._start is not None and self._stop is None:
            self._stop = _now()

    @property
    def ms(self) -> float:
        """Stop the timer and return milliseconds; 0 if it was never started."""
        if self._start is None:
            logger.warning("a Timer that was never started has no time; call start() and stop() first")
            return 0.0
        self.stop()
        assert self._stop is not None
        return self._stop.seconds_since(self._start) * 1000.0


def _now() -> TimedEvent:
    """Record an event after the queued work, on the host or on the GPU's stream."""
    if not mode.gpu:
        return HostTimedEvent()
    backend = mode.present_device().backend
    with backend.activate():
        return backend.record_timed_event()

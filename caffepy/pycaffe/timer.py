"""A stopwatch in the device's time (pycaffe's Timer; Caffe's `benchmark.cpp`)."""

from __future__ import annotations

import logging

from caffepy.backend.device_scalars import HostTimedEvent
from caffepy.backend.handles import TimedEvent
from caffepy.pycaffe.mode import mode

logger = logging.getLogger(__name__)


class Timer:
    """Milliseconds between `start` and `stop`: of the GPU's work in between where `set_mode_gpu` was called."""

    def __init__(self) -> None:
        self._start: TimedEvent | None = None
        self._stop: TimedEvent | None = None

    def start(self) -> None:
        """Start; a timer that runs goes on."""
        if self._start is None or self._stop is not None:
            self._start, self._stop = _now(), None

    def stop(self) -> None:
        """Stop, if it runs."""
        if self._start is not None and self._stop is None:
            self._stop = _now()

    @property
    def ms(self) -> float:
        """The time in milliseconds; stops a timer that runs, and is 0 for one that never did."""
        if self._start is None:
            logger.warning("a Timer that was never started has no time; call start() and stop() first")
            return 0.0
        self.stop()
        assert self._stop is not None
        return self._stop.seconds_since(self._start) * 1000.0


def _now() -> TimedEvent:
    """An event behind the work that was queued so far, on the host or on the GPU's stream."""
    if not mode.gpu:
        return HostTimedEvent()
    backend = mode.present_device().backend
    with backend.activate():
        return backend.record_timed_event()

"""Capture of repeated work in graphs; segments that cannot be captured run eagerly between the graphs.

Captured and eager runs call the same functions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from caffepy.backend import Backend

log = logging.getLogger(__name__)

CAPTURE_ATTEMPTS = 2
"""Passes that run eagerly before capturing is given up.

The first pass also tunes kernels and allocates workspaces in another order and in other sizes than later passes. Memory
cannot be allocated during capture, so a second eager pass allocates the missing workspaces.
"""


@dataclass(frozen=True)
class Segment:
    """One call of the work to capture.

    Args:
        name: for messages.
        run: does the work on the backend's stream.
        blocker: why it cannot be captured; None if it can.
    """

    name: str
    run: Callable[[], None]
    blocker: str | None = None


class GraphSegments:
    """Segments that run in order, eagerly or as captured graphs.

    Args:
        backend: the segments run on its stream.
        segments: the work.
    """

    def __init__(self, backend: Backend, segments: Sequence[Segment]) -> None:
        self._backend = backend
        self._segments = list(segments)
        self._calls: list[Callable[[], None]] = []

    @property
    def captured(self) -> bool:
        """Whether `run` replays graphs."""
        return bool(self._calls)

    def capture(self) -> None:
        """Capture the segments in graphs without running them. They must have run eagerly before."""
        self.drop()
        for captured, segments in groupby(self._segments, key=lambda segment: segment.blocker is None):
            group = list(segments)
            if captured:
                graph = self._backend.capture(*(segment.run for segment in group))
                self._calls.append(graph.launch)
            else:
                for segment in group:
                    log.debug("%s runs outside of the captured graphs: %s", segment.name, segment.blocker)
                self._calls += [segment.run for segment in group]

    def run(self) -> None:
        """Run all segments once."""
        if not self.captured:
            _run(self._segments)
            return
        for call in self._calls:
            call()

    def drop(self) -> None:
        """Free the graphs. Call before destroying communicators whose calls the graphs contain."""
        self._calls.clear()


def _run(segments: Sequence[Segment]) -> None:
    for segment in segments:
        segment.run()

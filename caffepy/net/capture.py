"""Repeated work as graphs: captures what can be captured and runs the rest in between.

The segments are the very calls that run eagerly; there is no second implementation of anything.
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

The first one also tunes, which takes workspaces in another order and in other sizes than passes behind it. What these
then need beyond it can only be allocated by another eager pass, not while a graph is captured.
"""


@dataclass(frozen=True)
class Segment:
    """A part of the work.

    Args:
        name: what messages call it.
        run: does it, on the backend's stream.
        blocker: why it cannot be captured; None if it can.
    """

    name: str
    run: Callable[[], None]
    blocker: str | None = None


class GraphSegments:
    """Segments that are run in order, as often as wanted.

    Args:
        backend: whose stream they are put on.
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
        """Make graphs of the segments; nothing is computed yet. The segments must have run eagerly once before."""
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
        """Do the work once."""
        if not self.captured:
            _run(self._segments)
            return
        for call in self._calls:
            call()

    def drop(self) -> None:
        """Free the graphs; communicators whose calls they hold can be destroyed only afterwards."""
        self._calls.clear()


def _run(segments: Sequence[Segment]) -> None:
    for segment in segments:
        segment.run()

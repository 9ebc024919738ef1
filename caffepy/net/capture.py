"""Work that is done again and again, as graphs: captures what can be captured and runs the rest in between.

Owns the cutting of a list of steps into graphs. The steps are the very calls that run eagerly; there is no second
implementation of anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from caffepy.backend import Backend
from caffepy.backend.handles import Graph

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Segment:
    """A part of the work.

    Args:
        name: what messages call it.
        run: does it, on the backend's stream.
        reason: why it cannot be captured; empty if it can.
    """

    name: str
    run: Callable[[], None]
    reason: str = ""


class GraphSegments:
    """Steps that are run in order, as often as wanted.

    Args:
        backend: whose stream they are put on.
        steps: the work.
    """

    def __init__(self, backend: Backend, steps: Sequence[Segment]) -> None:
        self._backend = backend
        self._steps = list(steps)
        self._pieces: list[Callable[[], None]] = []
        self._graphs: list[Graph] = []

    @property
    def captured(self) -> bool:
        """Whether `run` replays graphs."""
        return bool(self._graphs)

    def capture(self) -> None:
        """Make graphs of the steps; nothing is computed yet. The steps must have run eagerly once before."""
        self.drop()
        for captured, group in groupby(self._steps, key=lambda step: not step.reason):
            steps = list(group)
            if captured:
                graph = self._backend.capture(lambda steps=steps: _run(steps))  # type: ignore[misc]
                self._graphs.append(graph)
                self._pieces.append(graph.launch)
            else:
                for step in steps:
                    log.debug("%s runs outside of the captured graphs: %s", step.name, step.reason)
                self._pieces += [step.run for step in steps]
        log.debug("%d steps were captured in %d graphs", len(self._steps), len(self._graphs))

    def run(self) -> None:
        """Do the work once."""
        if not self.captured:
            _run(self._steps)
            return
        for piece in self._pieces:
            piece()

    def drop(self) -> None:
        """Give the graphs back; communicators whose calls they hold can be destroyed only afterwards."""
        self._pieces.clear()
        self._graphs.clear()


def _run(steps: Sequence[Segment]) -> None:
    for step in steps:
        step.run()

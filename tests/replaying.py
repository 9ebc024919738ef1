"""A CPU that plays a capturing device: a graph runs its steps when it is launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from caffepy.backend.cpu import CpuBackend


class Replaying(CpuBackend):
    """A CPU backend that captures: work runs when its graph is launched."""

    asynchronous = True
    captures = True

    def __init__(self) -> None:
        super().__init__(1)
        self.launches = 0

    def capture(self, work: Callable[[], None]) -> Any:
        backend = self

        class Graph:
            def launch(self) -> None:
                backend.launches += 1
                work()

        return Graph()

"""A rank whose other ranks are played, so that nobody starts processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from caffepy.distributed.processes.world import SingleProcess
from caffepy.distributed.store.wire import Failure


def same(rank: int, value: Any) -> Any:
    """The answer of a rank that has what the rank under test has."""
    return value


class FakeWorld(SingleProcess):
    """One rank of several, each on a host of its own: ``h0``, ``h1``.

    Args:
        size: ranks in all.
        rank: the one under test.
        answer: what another rank gathers, given its number and the value of the rank under test.
    """

    def __init__(self, size: int = 1, rank: int = 0, answer: Callable[[int, Any], Any] = same) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.hosts = [f"h{i}" for i in range(size)]
        self.machines = list(self.hosts)
        self.answer = answer
        self.ended: list[int] = []
        """The statuses with which the world was ended; in this one the caller lives on."""

    def watch(self, check: Callable[[], None]) -> None:
        self.check = check

    def all_gather(self, value: Any) -> list[Any]:
        return [value if rank == self.rank else self.answer(rank, value) for rank in range(self.size)]

    def end(self, status: int) -> None:  # type: ignore[override]
        self.ended.append(status)


class FakeWatchdog:
    """Keeps what it is asked to tell."""

    def __init__(self) -> None:
        self.told: list[Failure] = []
        self.log: list[str] = []

    def start(self) -> None:
        self.log.append("start")

    def stop(self) -> None:
        self.log.append("stop")

    def tell_failure(self, failure: Failure) -> None:
        self.told.append(failure)

"""Keeps running statistics (BatchNorm's) and states (LSTM's) out of passes that are no part of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from caffepy.backend import Each, Scalar, expression
from caffepy.backend.types import Array
from caffepy.net import Net


@expression
def unless_void(present: Each, kept: Each, void: Scalar) -> Each:
    return kept if void > 0 else present


class RunningStatsSnapshot:
    """The running statistics as they were after the last iteration that was not void.

    The device decides what is kept, so that an iteration can be captured; states are not in snapshots, and not kept.

    Args:
        net: the train net.
        void: gives what is not 0 after a void iteration, shape (); None: there are none, and nothing is kept.
    """

    def __init__(self, net: Net, void: Callable[[], Array] | None) -> None:
        self._backend = net.backend
        self._void = void
        self._arrays = net.statistics() if void is not None else []
        self._kept = [net.backend.zeros(tuple(array.shape)) for array in self._arrays]

    def keep(self) -> None:
        """Keep the present statistics."""
        for array, kept in zip(self._arrays, self._kept, strict=True):
            self._backend.copy(array, kept)

    def accept(self) -> None:
        """Keep the present statistics, unless the iteration that made them is void."""
        for array, kept in zip(self._arrays, self._kept, strict=True):
            assert self._void is not None
            self._backend.apply(unless_void, (array, kept, self._void()), (kept,))

    def take_back(self) -> None:
        """Give the running statistics the values that were kept."""
        for array, kept in zip(self._arrays, self._kept, strict=True):
            self._backend.copy(kept, array)


@contextmanager
def preserve_running_stats(net: Net) -> Iterator[None]:
    """Restore the running statistics and states after a forward pass of the train net that is no part of training."""
    arrays = [*net.statistics(), *net.state()]
    saved = [net.backend.zeros(tuple(array.shape)) for array in arrays]
    for array, before in zip(arrays, saved, strict=True):
        net.backend.copy(array, before)
    yield
    for array, before in zip(arrays, saved, strict=True):
        net.backend.copy(before, array)

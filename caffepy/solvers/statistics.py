"""Keeps running statistics (BatchNorm's) and states (LSTM's) out of passes that are no part of training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from caffepy.net import Net


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

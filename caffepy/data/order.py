"""From sample numbers, which never wrap, to record numbers, which do: epochs, `rand_skip` and `shuffle`."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from caffepy.data.random import permutation

_CHOICE = 1 << 62
"""An epoch that never comes: its random order chooses the records that are used."""


class RecordOrder:
    """The order in which the records of a source are read.

    Sample s belongs to epoch (s + skip) // length; a batch that runs over the end of the data goes on with
    the next epoch's first record, as Caffe's cursor does. A thread computes the permutation of the next
    epoch in advance, which takes most of a second for a million records.

    Args:
        length: records in the source.
        skip: records passed over at the very start.
        shuffle: whether each epoch has a random order of its own.
        seed: of the solver.
        stream: of the layer.
        whole: records of which `length` are used: the first ones, or, with `shuffle`, random ones; 0: all.
    """

    def __init__(
        self, length: int, skip: int = 0, shuffle: bool = False, seed: int = 0, stream: int = 0, whole: int = 0
    ) -> None:
        self.length = length
        self._whole = whole
        self._used: NDArray[np.int64] | None = None
        """The records that are used, where they are not the first ones."""
        self._skip = skip
        self._shuffle = shuffle
        self._seed = seed
        self._stream = stream
        self._orders: dict[int, NDArray[np.int64]] = {}
        """Permutations of the current and the next epoch."""
        self._epoch = -1
        self._thread: threading.Thread | None = None

    def records(self, first: int, count: int) -> NDArray[np.int64]:
        """The record numbers of the samples [first, first + count)."""
        return self.records_of(np.arange(first, first + count, dtype=np.int64))

    def records_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The record numbers of global samples, in their order."""
        epochs, indices = np.divmod(samples + self._skip, self.length)
        if self._shuffle:
            for epoch in np.unique(epochs):
                mine = epochs == epoch
                indices[mine] = self._permutation(int(epoch))[indices[mine]]
        return self._among_all(indices)

    def _among_all(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self._shuffle or self._whole <= self.length:
            return indices
        if self._used is None:
            self._used = permutation(self._seed, self._stream, _CHOICE, self._whole)[: self.length]
        return self._used[indices]

    def prepare(self) -> None:
        """Start computing the permutation of the next epoch."""
        following = self._epoch + 1
        if not self._shuffle or following in self._orders or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._make, args=(following,), name="permutation", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Join the thread of `prepare`."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def another(self) -> RecordOrder:
        """A copy for another thread; one object serves one thread."""
        return RecordOrder(self.length, self._skip, self._shuffle, self._seed, self._stream, self._whole)

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            self.close()
        if epoch not in self._orders:
            self._make(epoch)
        self._epoch = epoch
        return self._orders[epoch]

    def _make(self, epoch: int) -> None:
        order = permutation(self._seed, self._stream, epoch, self.length)
        self._orders = {known: kept for known, kept in self._orders.items() if known == epoch - 1}
        self._orders[epoch] = order

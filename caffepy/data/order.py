"""From sample numbers, which never wrap, to record numbers, which do: epochs, `rand_skip` and `shuffle`."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from caffepy.data.random import permutation


class RecordOrder:
    """In which order the records of a source are taken.

    Sample s belongs to epoch (s + skip) // length; a batch that runs over the end of the data goes on with
    the next epoch's first record, as Caffe's cursor does. While an epoch is under way a thread makes the order of the
    next one, which for a million records takes most of a second.

    Args:
        length: records in the source.
        skip: records passed over at the very start.
        shuffle: whether each epoch has a random order of its own.
        seed: of the solver.
        stream: of the layer.
    """

    def __init__(self, length: int, skip: int = 0, shuffle: bool = False, seed: int = 0, stream: int = 0) -> None:
        self.length = length
        self._skip = skip
        self._shuffle = shuffle
        self._seed = seed
        self._stream = stream
        self._orders: dict[int, NDArray[np.int64]] = {}
        """The orders of the epoch that was met last and of the one to come."""
        self._met = -1
        self._maker: threading.Thread | None = None

    def records(self, first: int, count: int) -> NDArray[np.int64]:
        """The record numbers of the samples [first, first + count)."""
        return self.records_of(np.arange(first, first + count, dtype=np.int64))

    def records_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The record numbers of some samples."""
        epochs, places = np.divmod(samples + self._skip, self.length)
        if self._shuffle:
            for epoch in np.unique(epochs):
                mine = epochs == epoch
                places[mine] = self._permutation(int(epoch))[places[mine]]
        return places

    def prepare(self) -> None:
        """Begin to make the order of the epoch after the one that was met last."""
        if not self._shuffle or self._met + 1 in self._orders or (self._maker is not None and self._maker.is_alive()):
            return
        self._maker = threading.Thread(target=self._make, args=(self._met + 1,), name="order of records", daemon=True)
        self._maker.start()

    def close(self) -> None:
        """Wait for what `prepare` began."""
        maker, self._maker = self._maker, None
        if maker is not None:
            maker.join()

    def another(self) -> RecordOrder:
        """The same order for another thread."""
        return RecordOrder(self.length, self._skip, self._shuffle, self._seed, self._stream)

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            self.close()
        if epoch not in self._orders:
            self._make(epoch)
        self._met = epoch
        return self._orders[epoch]

    def _make(self, epoch: int) -> None:
        made = permutation(self._seed, self._stream, epoch, self.length)
        self._orders = {known: order for known, order in self._orders.items() if known == epoch - 1}
        self._orders[epoch] = made

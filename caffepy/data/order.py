"""From sample numbers, which never wrap, to record numbers, which do: epochs, `rand_skip` and `shuffle`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caffepy.data.random import permutation


class RecordOrder:
    """In which order the records of a source are taken.

    Sample s belongs to epoch (s + skip) // length; a batch that runs over the end of the data goes on with
    the next epoch's first record, as Caffe's cursor does.

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
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, np.int64)

    def records(self, first: int, count: int) -> NDArray[np.int64]:
        """The record numbers of the samples [first, first + count)."""
        places = np.arange(first, first + count, dtype=np.int64) + self._skip
        epochs, places = np.divmod(places, self.length)
        if self._shuffle:
            for epoch in np.unique(epochs):
                mine = epochs == epoch
                places[mine] = self._permutation(int(epoch))[places[mine]]
        return places

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            self._order = permutation(self._seed, self._stream, epoch, self.length)
            self._epoch = epoch
        return self._order

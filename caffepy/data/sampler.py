"""Which record is which sample: epochs, `rand_skip` and `shuffle`; loaders that make each sample by itself."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images import sides
from caffepy.data.prefetch import Batch
from caffepy.data.random import permutation
from caffepy.data.workers import Workers
from caffepy.errors import DataError
from caffepy.formats.blobs import check_shape

_SELECTION_EPOCH = 1 << 62
"""Pseudo-epoch whose permutation selects the records to use."""


class Sampler:
    """The order in which a loader reads the records of a source.

    Sample s belongs to epoch (s + skip) // length. A batch that reaches the end of the data continues with the
    first record of the next epoch, as Caffe's cursor does. A background thread computes the next epoch's
    permutation in advance (0.5 to 1 s for a million records).

    Args:
        length: records per epoch.
        skip: records skipped at the start of the first epoch.
        shuffle: whether to use a new random order in each epoch.
        seed: the solver's seed.
        stream: the layer's random stream.
        total: records in the source, of which `length` are used: the first ones or, with `shuffle`, random ones; 0:
            all.
    """

    def __init__(
        self, length: int, skip: int = 0, shuffle: bool = False, seed: int = 0, stream: int = 0, total: int = 0
    ) -> None:
        self.length = length
        self._total = total
        self._selected: NDArray[np.int64] | None = None
        """Selected record numbers, if they are not the first `length`."""
        self._skip = skip
        self._shuffle = shuffle
        self._seed = seed
        self._stream = stream
        self._orders: dict[int, NDArray[np.int64]] = {}
        """Permutations of the current and the next epoch."""
        self._epoch = -1
        self._thread: threading.Thread | None = None

    def records(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the record numbers of the samples [first, first + count)."""
        return self.records_of(np.arange(first, first + count, dtype=np.int64))

    def records_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the record numbers of global samples, in the given order."""
        epochs, indices = np.divmod(samples + self._skip, self.length)
        if self._shuffle:
            for epoch in np.unique(epochs):
                in_epoch = epochs == epoch
                indices[in_epoch] = self._permutation(int(epoch))[indices[in_epoch]]
        return self._select(indices)

    def _select(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self._shuffle or self._total <= self.length:
            return indices
        if self._selected is None:
            self._selected = permutation(self._seed, self._stream, _SELECTION_EPOCH, self._total)[: self.length]
        return self._selected[indices]

    def prepare_next_epoch(self) -> None:
        """Start computing the permutation of the next epoch in a thread."""
        next_epoch = self._epoch + 1
        if not self._shuffle or next_epoch in self._orders or (self._thread is not None and self._thread.is_alive()):
            return
        thread = threading.Thread(target=self._compute, args=(next_epoch,), name="permutation", daemon=True)
        thread.start()
        self._thread = thread  # only a started thread can be joined, also in a child that is forked during `start`

    def close(self) -> None:
        """Join the thread of `prepare_next_epoch`."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def copy(self) -> Sampler:
        """Return a copy for another thread; an instance is not thread-safe."""
        other = copy.copy(self)
        other._thread = None
        return other

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            self.close()
        if epoch not in self._orders:
            self._compute(epoch)
        self._epoch = epoch
        return self._orders[epoch]

    def order_of(self, epoch: int) -> NDArray[np.int64]:
        """Return the order of the records in an epoch with `shuffle`."""
        return permutation(self._seed, self._stream, epoch, self.length)

    def _compute(self, epoch: int) -> None:
        order = self.order_of(epoch)
        previous = {key: value for key, value in self._orders.items() if key == epoch - 1}
        self._orders = {**previous, epoch: order}


class SampleLoader:
    """Fills batches with samples, each made by itself; a `Loader`.

    Args:
        where: the layer, for messages.
        make: returns the values of each top, given a sample's record and global number. Its errors follow the record's
            name.
        name: returns the name of a record, for messages. Thread-safe.
        order: of the records; None: a sample's record has its number.
        threads: that make samples.
        objects: the top that lists the objects of all images of a batch as rows of image and values, and the row of a
            batch without any; None: there is none.
    """

    def __init__(
        self,
        where: str,
        make: Callable[[int, int], Sequence[NDArray[np.float32]]],
        name: Callable[[int], str],
        order: Sampler | None = None,
        threads: int = 1,
        objects: tuple[int, Sequence[float]] | None = None,
    ) -> None:
        self.where = where
        self._objects_top, self._no_object = objects or (-1, ())
        self._make, self._name = make, name
        self._order = order or Sampler(sys.maxsize)
        self._record = 0
        self._workers = Workers(threads, f"read for {where}")

    @property
    def reading(self) -> str:
        return self._name(self._record)

    def describe(self, sample: int) -> str:
        """Return the name of the record of a global sample, for messages. Thread-safe."""
        return self._name(int(self._order.copy().records(sample, 1)[0]))

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        self._workers.close()
        self._order.close()

    def load_bytes(self, *_: object) -> int:
        """Return 0: batches are float32."""
        return 0

    def sample(self, record: int, number: int) -> Sequence[NDArray[np.float32]]:
        """Return the values of each top of a global sample, given its record.

        Raises:
            DataError: the sample cannot be made.
        """
        self._record = record
        try:
            return self._make(record, number)
        except DataError as error:
            raise DataError(f"{self.where}: {self._name(record)} {error}") from error

    def load(self, first: int, count: int, batch: Batch) -> None:
        """Fill `batch` with the global samples [first, first + count).

        Raises:
            DataError: a sample cannot be made, or samples of the batch differ in shape.
        """
        records = self._order.records(first, count).tolist()
        rows: list[NDArray[np.float32]] = [np.empty((0, len(self._no_object)), np.float32)] * count

        def fill(index: int) -> None:
            for top, part in enumerate(self.sample(records[index], first + index)[: len(batch.arrays)]):
                shape = (count, *part.shape)
                if top == self._objects_top:
                    rows[index] = np.insert(part, 0, index, axis=1)
                    continue
                if index == 0:
                    check_shape(shape, self.where)
                    batch.array(top, shape)
                elif batch.arrays[top].shape != shape:
                    made, others = (sides(sizes[1:]) for sizes in (shape, batch.arrays[top].shape))
                    raise DataError(
                        f"{self.where}: {self._name(records[index])} makes {made}, but others of its batch make "
                        f"{others}; give all of them one size (a crop or a new size), or batch_size: 1"
                    )
                batch.arrays[top][index] = part

        fill(0)  # sets the shapes
        self._workers.run(fill, range(1, count))
        if 0 <= self._objects_top < len(batch.arrays):
            found = np.concatenate(rows)
            found = found if len(found) else np.array([self._no_object], np.float32)
            batch.array(self._objects_top, (*found.shape, 1, 1))[...] = found[:, :, None, None]
        self._order.prepare_next_epoch()

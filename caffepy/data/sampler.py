"""Which record is which sample: epochs, `rand_skip` and `shuffle`; loaders that make each sample by itself."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


class RecordLoader:
    """The base of loaders whose threads read records of a source.

    Args:
        source: names its records and describes itself.
        order: of the records; None: the loader chooses the record of each sample.
        where: the layer, for messages.
        threads: number of threads.
    """

    def __init__(self, source: Any, order: Sampler | None, where: str = "", threads: int = 1) -> None:
        self.source, self.where, self._order, self._record = source, where, order, 0
        self._workers = Workers(threads, f"read for {where}")

    @property
    def reading(self) -> str:
        return f"image {self._record} of {self.source.description}"

    def record_of(self, sample: int) -> int:
        """Return the record of a global sample. Thread-safe: it works on a copy of the order."""
        assert self._order is not None
        return int(self._order.copy().records(sample, 1)[0])

    def records(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the records of the samples [first, first + count)."""
        assert self._order is not None
        numbers = self._order.records(first, count)
        self._order.prepare_next_epoch()
        return numbers

    @contextmanager
    def reads(self, record: int) -> Iterator[None]:
        """Name the record in errors.

        Raises:
            DataError: with the names of the layer, the source and the record.
        """
        self._record = record
        try:
            yield
        except DataError as error:
            name = f"{self.source.description}: {self.source.record_name(record)}"
            raise DataError(f"{self.where}: {name} {error}") from error

    def close(self) -> None:
        self._workers.close()
        if self._order is not None:
            self._order.close()

    def load_bytes(self, *_: object) -> int:
        """Return 0: batches are float32."""
        return 0


class SampleLoader:
    """Fills batches with samples; a `Loader`.

    Args:
        where: the layer, for messages.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self._sample = 0

    def sample(self, number: int) -> list[NDArray[np.float32]]:
        """Return the values of each top of a global sample.

        Raises:
            DataError: the sample cannot be read.
        """
        raise NotImplementedError

    def describe(self, sample: int) -> str:
        """Return the name of the record of a global sample, for messages. Thread-safe."""
        raise NotImplementedError

    @property
    def reading(self) -> str:
        return self.describe(self._sample)

    def close(self) -> None:
        """Does nothing: the layer closes the source."""

    def load_bytes(self, *_: object) -> int:
        """Return 0: batches are float32."""
        return 0

    def load(self, first: int, count: int, batch: Batch) -> None:
        """Fill `batch` with the global samples [first, first + count).

        Raises:
            DataError: a sample cannot be read, or samples of the batch differ in shape.
        """
        for index in range(count):
            self._sample = first + index
            for top, part in enumerate(self.sample(self._sample)[: len(batch.arrays)]):
                shape = (count, *part.shape)
                if index == 0:
                    check_shape(shape, self.where)
                elif batch.arrays[top].shape != shape:
                    raise DataError(
                        f"{self.where}: {self.reading} makes an array {' x '.join(map(str, part.shape))}, and the "
                        "first sample of the batch another; give all of them one size"
                    )
                batch.array(top, shape)[index] = part

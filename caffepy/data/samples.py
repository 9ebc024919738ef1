"""The base class of loaders that make each sample of a batch by itself, as float32; imported by layers/input."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caffepy.blob import check_shape
from caffepy.data.prefetch import Batch
from caffepy.errors import DataError


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

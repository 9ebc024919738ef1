"""Batches of frames."""

from __future__ import annotations

import numpy as np

from caffepy.blob import check_shape
from caffepy.data.prefetch import Batch
from caffepy.data.sources.video import VideoSource
from caffepy.data.transform import Transformer
from caffepy.data.transforms.draws import Draws
from caffepy.data.transforms.pixels import Image
from caffepy.errors import DataError


class VideoLoader:
    """Fills batches with frames: sample s is frame s * (skip + 1) + skip; a `Loader`.

    Args:
        source: the frames.
        transformer: applied to each.
        skip: frames that are left out before each.
        seed: of the solver.
        stream: of the layer.
        where: the layer, for messages.
    """

    def __init__(
        self, source: VideoSource, transformer: Transformer, skip: int, seed: int, stream: int, where: str
    ) -> None:
        self._source = source
        self._transformer = transformer
        self._skip = skip
        self._key = (seed, stream)
        self._where = where
        self._sample = 0

    @property
    def reading(self) -> str:
        return self.describe(self._sample)

    def close(self) -> None:
        """The layer closes the source."""

    def describe(self, sample: int) -> str:
        return f"frame {self._number(sample)} of {self._source.description}"

    def _number(self, sample: int) -> int:
        return sample * (self._skip + 1) + self._skip

    def load(self, first: int, count: int, batch: Batch) -> None:
        """Fill `batch` with the global samples [first, first + count).

        Raises:
            DataError: the video has ended, or a frame cannot be transformed.
        """
        choices = self._transformer.choose(*self._key, np.arange(first, first + count, dtype=np.int64))
        for index in range(count):
            self._sample = first + index
            try:
                image = self._frame(self._sample)
                shape = self._transformer.output_shape(image.shape)
                check_shape((count, *shape), self._where)
                self._transformer.apply(image, choices, index, batch.array(0, (count, *shape))[index])
            except DataError as error:
                raise DataError(f"{self._where}: {self.describe(self._sample)} {error}") from error
        if len(batch.arrays) > 1:
            batch.array(1, (count,))[...] = 0

    def load_bytes(self, *_: object) -> int:
        """Batches are floats."""
        return 0

    def _frame(self, sample: int) -> Image:
        if self._source.is_camera:
            for _ in range(self._skip):
                self._source.frame(1)
            image = self._source.frame(1)
        else:
            image = self._source.frame(self._number(sample))
        return self._transformer.prepare(image, Draws(self._transformer.seed(self._key[0]), self._key[1], sample))

    def sample_shape(self) -> tuple[int, int, int]:
        """The shape of a frame after the transformation."""
        try:
            first = self._transformer.prepare(self._source.frame(0), Draws(*self._key, 0))
            return self._transformer.output_shape(first.shape)
        except DataError as error:
            raise DataError(f"{self._where}: {self._source.description}: frame 0 {error}") from error

"""Loaders fill batches from images: Datum records of a database, or image files of a list."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.input_ring import ByteImages, ImageSlot
from caffepy.blob import check_shape
from caffepy.data.images.datum import datum_shape, decode_image, parse_datum, resize_image
from caffepy.data.order import RecordOrder
from caffepy.data.prefetch import Batch
from caffepy.data.sources.image_list import ImageListSource
from caffepy.data.sources.source import RecordSource
from caffepy.data.transform import Choices, Transformer
from caffepy.data.workers import Workers
from caffepy.errors import CaffepyError, DataError

logger = logging.getLogger(__name__)

Shape = tuple[int, int, int]
Image = NDArray[np.uint8] | NDArray[np.float32]
"""(C, H, W), any strides."""


class ImageLoader(ABC):
    """Fills batches from a source of images; a `Loader`.

    Args:
        source: the records.
        order: the order in which they are read.
        transformer: applied to each image.
        seed: of the solver.
        stream: of the layer.
        where: the layer, for messages.
        threads: threads that read and decode batches of bytes.
    """

    def __init__(
        self,
        source: RecordSource,
        order: RecordOrder,
        transformer: Transformer,
        seed: int = 0,
        stream: int = 0,
        where: str = "data layer",
        threads: int = 1,
    ) -> None:
        self._source = source
        self._order = order
        self._transformer = transformer
        self._seed = seed
        self._stream = stream
        self._where = where
        self._record = 0
        self._workers = Workers(threads, f"read for {where}")

    @abstractmethod
    def parse(self, number: int) -> tuple[Image, float]:
        """The image of record `number` and its label.

        Raises:
            DataError: its message continues a sentence that begins with the record's name.
        """

    @property
    def reading(self) -> str:
        """The record that is being read, for messages."""
        return f"record {self._record} of {self._source.description}"

    def close(self) -> None:
        """Stop the worker threads. Idempotent."""
        self._workers.close()
        self._order.close()

    def describe(self, sample: int) -> str:
        """The record of a global sample, for messages. Thread-safe."""
        number = int(self._order.another().records(sample, 1)[0])
        return f"{self._source.record_name(number)} of {self._source.description}"

    # -- the first record ----------------------------------------------------------------------------

    def sample_shape(self) -> Shape:
        """The shape of the first record's image after the transformation.

        Raises:
            DataError: it cannot be read or transformed.
        """
        return self._first_image()[1]

    def byte_images(self, count: int) -> ByteImages | None:
        """The layout of batches of `count` images if the first image is uint8; None if it is float32.

        Raises:
            DataError: the first record cannot be read or transformed.
        """
        image, shape = self._first_image()
        if image.dtype != np.uint8:
            return None
        slot = ImageSlot(count, *shape)
        return ByteImages(slot, self._transformer.mean(image.shape), float(self._transformer.scale))

    def _first_image(self) -> tuple[Image, Shape]:
        try:
            image, _ = self.parse(0)
            return image, self._transformer.output_shape(_shape_of(image))
        except DataError as error:
            raise self._named(error, 0) from error

    # -- batches of floats ---------------------------------------------------------------------------

    def load(self, first: int, count: int, batch: Batch) -> None:
        """Fill `batch` with the global samples [first, first + count): images, and labels if it has a second array.

        Raises:
            DataError: naming the record.
        """
        choices = self._transformer.choose(self._seed, self._stream, np.arange(first, first + count, dtype=np.int64))
        labels = np.empty(count, np.float32)
        out: NDArray[np.float32] = np.empty(0, np.float32)
        for index, number in enumerate(self._order.records(first, count).tolist()):
            self._record = number
            try:
                image, labels[index] = self.parse(number)
                result = self._transformer.output_shape(_shape_of(image))
                if index == 0:
                    check_shape((count, *result), self._where)
                    out = batch.array(0, (count, *result))
                elif result != out.shape[1:]:
                    raise DataError(
                        f"is {_format(image.shape)} and makes {_format(result)}, but others of its batch make "
                        f"{_format(out.shape[1:])}; set crop_size, or batch_size: 1"
                    )
                self._transformer.apply(image, choices, index, out[index])
            except DataError as error:
                raise self._named(error, number) from error
        if len(batch.arrays) > 1:
            batch.array(1, (count,))[...] = labels

    def _named(self, error: DataError, number: int) -> DataError:
        if str(error).startswith(self._source.description):  # the source itself has failed
            return DataError(f"{self._where}: {error}")
        return DataError(f"{self._where}: {self._source.description}: {self._source.record_name(number)} {error}")

    # -- batches of bytes ----------------------------------------------------------------------------

    def load_bytes(self, firsts: Sequence[int], count: int, slot: ImageSlot, block: NDArray[np.uint8]) -> int:
        """Fill slots with cropped uint8 images; the device mirrors, subtracts the mean and scales.

        Args:
            firsts: the first global sample of each slot.
            count: samples of each slot.
            slot: the layout.
            block: the slots' memory.

        Returns:
            How many slots are filled. The next one has a record that does not fit the layout or cannot be read; `load`
            reads it as float32 or raises the error.
        """
        samples = (np.array(firsts, np.int64)[:, None] + np.arange(count)).reshape(-1)
        records = self._order.records_of(samples)
        self._record = int(records[0])
        pending = self._copy_plain(records, samples, slot, block)
        uncopied = np.flatnonzero(pending)
        if uncopied.size:
            choices = self._transformer.choose(self._seed, self._stream, samples)
            workers = self._workers if self._source.concurrent(int(records.max()) + 1) else Workers(1)
            workers.run(lambda i: self._copy_one(i, records, choices, slot, block, pending), uncopied.tolist())
            uncopied = np.flatnonzero(pending)
        self._order.prepare()
        return int(uncopied[0]) // count if uncopied.size else len(firsts)

    def _copy_plain(
        self, records: NDArray[np.int64], samples: NDArray[np.int64], slot: ImageSlot, block: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        """Copy records in bulk where possible. Returns for each sample 1 if it is still to be copied, else 0."""
        return np.ones(records.size, np.uint8)

    def _copy_one(
        self, i: int, records: NDArray[np.int64], choices: Choices, slot: ImageSlot, block: NDArray[np.uint8],
        pending: NDArray[np.uint8],
    ) -> None:  # fmt: skip
        """Read sample i's record into its slot; pending[i] stays 1 if it does not fit or cannot be read."""
        try:
            image, label = self.parse(int(records[i]))
            shape = self._transformer.output_shape(_shape_of(image))
        except (CaffepyError, OSError, ValueError, MemoryError):
            return
        if image.dtype != np.uint8 or shape != slot.shape[1:]:
            return
        number, index = divmod(i, slot.count)
        labels, crops, pixels = slot.parts(block[number * slot.size : (number + 1) * slot.size])
        top, left = self._transformer.corner(image.shape[1], image.shape[2], choices, i)
        pixels[index] = image[:, top : top + slot.height, left : left + slot.width]
        crops[index] = choices.mirror[i], top, left
        labels[index] = label
        pending[i] = 0


class DatumLoader(ImageLoader):
    """Records are Datums: bytes, floats, or an encoded image."""

    _warned = False

    def _copy_plain(
        self, records: NDArray[np.int64], samples: NDArray[np.int64], slot: ImageSlot, block: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        from caffepy.data.images.image_bytes import copy_records

        index = self._source.index
        if index is None or not self._source.concurrent(int(records.max()) + 1):
            return super()._copy_plain(records, samples, slot, block)
        pending = copy_records(
            index, records, samples, self._transformer, self._seed, self._stream, slot, block, self._workers.threads
        )
        self._source.concurrent(0)  # again: what the file holds may have changed meanwhile
        return pending

    def parse(self, number: int) -> tuple[Image, float]:
        datum, data = parse_datum(self._source.read(number))
        if datum.encoded:
            return decode_image(data, self._transformer.force_color, self._transformer.force_gray), datum.label
        if (self._transformer.force_color or self._transformer.force_gray) and not self._warned:
            self._warned = True
            logger.warning("%s: force_color and force_gray only change encoded images", self._where)
        if len(data):
            return np.frombuffer(data, np.uint8).reshape(datum_shape(datum, len(data), "bytes")), datum.label
        shape = datum_shape(datum, len(datum.float_data), "floats")
        return np.array(datum.float_data, np.float32).reshape(shape), datum.label


class ImageFileLoader(ImageLoader):
    """Records are image files.

    Args:
        source: the list of files, with their labels.
        color: decode to 3 channels, else to 1.
        size: height and width to resize to; None: no resizing.
        others: of `ImageLoader`.
    """

    def __init__(
        self,
        source: ImageListSource,
        *others: Any,
        color: bool = True,
        size: tuple[int, int] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(source, *others, **more)
        self._labels = source.labels
        self._color = color
        self._size = size

    def parse(self, number: int) -> tuple[Image, float]:
        image = decode_image(self._source.read(number), self._color, not self._color)
        if self._size is not None:
            image = resize_image(image, *self._size)
        return image, self._labels[number]


def _shape_of(image: Image) -> Shape:
    channels, height, width = image.shape
    return channels, height, width


def _format(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))

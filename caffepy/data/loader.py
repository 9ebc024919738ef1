"""Loaders fill batches from images: Datum records of a database, or image files of a list."""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.blob import check_shape
from caffepy.data.datum import LARGE, datum_shape, decode_image, parse_datum, resize_image
from caffepy.data.image_list import ImageListSource
from caffepy.data.order import RecordOrder
from caffepy.data.prefetch import Batch
from caffepy.data.source import RecordSource
from caffepy.data.transform import Choices, Transformer
from caffepy.data.uniform import split_uniform
from caffepy.errors import DataError

logger = logging.getLogger(__name__)

Shape = tuple[int, int, int]
Image = bytes | memoryview | NDArray[np.uint8] | NDArray[np.float32]
"""Bytes and views of them are uint8 in C order; arrays are (C, H, W) of any strides."""

_GROUP_BYTES = 1 << 18
"""Images of one shape share a call of the transformer until they have this many bytes."""


class ImageLoader(ABC):
    """Fills batches from a source of images; a `Loader`.

    Args:
        source: the records.
        order: in which order they are taken.
        transformer: what is done with them.
        seed: of the solver.
        stream: of the layer.
        where: what messages call the layer.
    """

    def __init__(
        self,
        source: RecordSource,
        order: RecordOrder,
        transformer: Transformer,
        seed: int = 0,
        stream: int = 0,
        where: str = "data layer",
    ) -> None:
        self._source = source
        self._order = order
        self._transformer = transformer
        self._seed = seed
        self._stream = stream
        self._where = where
        self._record = 0

    @abstractmethod
    def parse(self, number: int) -> tuple[Image, Shape, float]:
        """The image of record `number`, its shape (C, H, W) and its label.

        Raises:
            DataError: with a message that goes on after the record's name.
        """

    @property
    def reading(self) -> str:
        """What is being read now."""
        return f"record {self._record} of {self._source.description}"

    def sample_shape(self) -> Shape:
        """The shape of the first record's image after the transformation.

        Raises:
            DataError: it cannot be read or transformed.
        """
        try:
            return self._transformer.output_shape(self.parse(0)[1])
        except DataError as error:
            raise self._named(error, 0) from error

    def load(self, first: int, count: int, batch: Batch) -> None:
        """Fill `batch` with the global samples [first, first + count): images, and labels if it has a second array.

        Raises:
            DataError: naming the record.
        """
        group = _Group(self._transformer, self._transformer.choose(self._seed, self._stream, first, count))
        labels = batch.array(1, (count,)) if len(batch.arrays) > 1 else np.empty(count, np.float32)
        for place, number in enumerate(self._order.records(first, count).tolist()):
            self._record = number
            try:
                image, shape, labels[place] = self.parse(number)
                result = self._transformer.output_shape(shape)
                if place == 0:
                    check_shape((count, *result), self._where)
                    group.out = batch.array(0, (count, *result))
                elif result != group.out.shape[1:]:
                    raise DataError(
                        f"is {_format(shape)} and makes {_format(result)}, but others of its batch make "
                        f"{_format(group.out.shape[1:])}; set crop_size, or batch_size: 1"
                    )
                group.add(place, image, shape)
            except DataError as error:
                raise self._named(error, number) from error
        group.flush()

    def describe(self, sample: int) -> str:
        """What messages call a global sample; may be called by any thread."""
        number = int(copy.copy(self._order).records(sample, 1)[0])
        return f"{self._source.record_name(number)} of {self._source.description}"

    def _named(self, error: DataError, number: int) -> DataError:
        if str(error).startswith(self._source.description):  # the source itself has failed
            return DataError(f"{self._where}: {error}")
        return DataError(f"{self._where}: {self._source.description}: {self._source.record_name(number)} {error}")


class _Group:
    """Images of one shape that go to the transformer together."""

    def __init__(self, transformer: Transformer, choices: Choices) -> None:
        self.out: NDArray[np.float32] = np.empty(0, np.float32)
        self._transformer = transformer
        self._choices = choices
        self._images: list[bytes | memoryview] = []
        self._shape: Shape = (0, 0, 0)
        self._first = 0

    def add(self, place: int, image: Image, shape: Shape) -> None:
        if isinstance(image, np.ndarray):
            self.flush()
            self._transformer.apply(image[None], self._choices[place : place + 1], self.out[place : place + 1])
            return
        if shape != self._shape:
            self.flush()
        if not self._images:
            self._first, self._shape = place, shape
        self._images.append(image)
        if len(self._images) * len(image) >= _GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        if not self._images:
            return
        pixels = np.frombuffer(self._images[0] if len(self._images) == 1 else b"".join(self._images), np.uint8)
        part = slice(self._first, self._first + len(self._images))
        images = pixels.reshape(len(self._images), *self._shape)
        self._images.clear()
        self._transformer.apply(images, self._choices[part], self.out[part])


class DatumLoader(ImageLoader):
    """Records are Datums: bytes, floats, or an encoded image."""

    _warned = False
    _uniform = True
    """Whether all batches so far could be taken apart at once."""

    def load(self, first: int, count: int, batch: Batch) -> None:
        self._uniform = self._uniform and self._load_uniform(first, count, batch)
        if not self._uniform:
            super().load(first, count, batch)

    def _load_uniform(self, first: int, count: int, batch: Batch) -> bool:
        """Load small records of one layout together; False where they are not such, or anything is wrong with them."""
        try:
            parts = split_uniform(self._records(first, count))
            if parts is None:
                return False
            pixels, labels = parts
            result = self._transformer.output_shape(_shape_of(pixels[0]))
        except DataError:
            return False  # who takes them one by one can name the record
        check_shape((count, *result), self._where)
        choices = self._transformer.choose(self._seed, self._stream, first, count)
        self._transformer.apply(pixels, choices, batch.array(0, (count, *result)))
        if len(batch.arrays) > 1:
            batch.array(1, (count,))[...] = labels
        return True

    def _records(self, first: int, count: int) -> list[bytes | memoryview]:
        """The records of some samples, as far as they are small."""
        records: list[bytes | memoryview] = []
        for number in self._order.records(first, count).tolist():
            self._record = number
            records.append(self._source.read(number))
            if len(records[-1]) > LARGE:
                break
        return records

    def parse(self, number: int) -> tuple[Image, Shape, float]:
        datum, data = parse_datum(self._source.read(number))
        if datum.encoded:
            image = decode_image(data, self._transformer.force_color, self._transformer.force_gray)
            return image, _shape_of(image), datum.label
        if (self._transformer.force_color or self._transformer.force_gray) and not self._warned:
            self._warned = True
            logger.warning("%s: force_color and force_gray only change encoded images", self._where)
        if len(data):
            return data, datum_shape(datum, len(data), "bytes"), datum.label
        shape = datum_shape(datum, len(datum.float_data), "floats")
        return np.array(datum.float_data, np.float32).reshape(shape), shape, datum.label


class ImageFileLoader(ImageLoader):
    """Records are image files.

    Args:
        source: the list of files, with their labels.
        color: decode to 3 channels, else to 1.
        size: height and width to resize to; None: as they are.
        others: as `ImageLoader`'s.
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

    def parse(self, number: int) -> tuple[Image, Shape, float]:
        image = decode_image(self._source.read(number), self._color, not self._color)
        if self._size is not None:
            image = resize_image(image, *self._size)
        return image, _shape_of(image), self._labels[number]


def _shape_of(image: NDArray[np.uint8]) -> Shape:
    channels, height, width = image.shape
    return channels, height, width


def _format(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))

"""Loaders fill batches from images: Datum records of a database, or image files of a list."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.cpu.jit.deferred import JitThreshold
from caffepy.backend.input_ring import ByteImages, ImageSlot
from caffepy.blob import check_shape
from caffepy.data.images.cache import ImageCache
from caffepy.data.images.datum import datum_shape, decode_image, parse_datum, resize_image
from caffepy.data.order import RecordOrder
from caffepy.data.prefetch import Batch
from caffepy.data.sources.image_list import ImageListSource
from caffepy.data.sources.source import RecordSource
from caffepy.data.transform import Choices, Transformer
from caffepy.data.transforms.draws import Draws
from caffepy.data.transforms.pixels import Image
from caffepy.data.workers import Workers
from caffepy.errors import CaffepyError, DataError
from caffepy.proto import caffe_pb2

logger = logging.getLogger(__name__)

Shape = tuple[int, int, int]

_LARGE = 2**16
"""Bytes of an image that is not compressed from which on reading it takes longer than Python's part."""
_LOADING = 4000
"""Images that are copied one by one in the time that numba takes to be imported, half a second."""


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
        self._knows_the_mean = False
        self._channels = 0
        """Of the first record's image, once a batch was read."""
        self._said: set[str] = set()

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
        mean = self._transformer.mean(shape if self._transformer.centers_mean else image.shape)
        return ByteImages(slot, np.ascontiguousarray(mean), float(self._transformer.scale))

    def _first_image(self) -> tuple[Image, Shape]:
        try:
            self._choose_mean()
            image, _ = self._prepared(0, 0)
            return image, self._transformer.output_shape(_shape_of(image))
        except DataError as error:
            raise self._named(error, 0) from error

    def decodes(self) -> bool:
        """Whether the first record is an encoded image.

        Raises:
            DataError: as `parse`.
        """
        return True

    def _learn_channels(self) -> None:
        self._channels = self._channels or self._first_image()[0].shape[0]

    def _check_channels(self, image: Image) -> None:
        """Compare an image's channels with the first record's.

        A net's weights fit one number of channels alone: Caffe's `base_conv_layer.cpp` ends with CHECK_EQ.

        Raises:
            DataError: they differ.
        """
        channels = image.shape[0]
        if channels == self._channels:
            return
        found = "is gray (1 channel)" if channels == 1 else f"has {channels} channels"
        others = "is gray (1 channel)" if self._channels == 1 else f"has {self._channels}"
        advice = "set transform_param { force_color: true }, which makes all images 3 channels, or force_gray: true"
        if not self.decodes():
            advice = (
                "build the set again with images of one kind (convert_imageset makes all color, with --gray all gray)"
            )
        raise DataError(f"{found}, but record 0 {others}: {advice}")

    def _choose_mean(self) -> None:
        """Let the transformer cut mean_file as NVIDIA Caffe does for such records."""
        transformer = self._transformer
        if not self._knows_the_mean and transformer.whole_size != (0, 0):
            transformer.centers_mean = transformer.resizes_randomly or (transformer.nvidia and self.decodes())
        self._knows_the_mean = True

    def _prepared(self, number: int, sample: int) -> tuple[Image, float]:
        """The image of record `number` as the global sample that it is, in its random size; and the label."""
        image, label = self.parse(number)
        return self._prepared_image(image, sample, True), label

    def _prepared_image(self, image: Image, sample: int, encoded: bool) -> Image:
        """The image of a global sample, in its random size and with noise if its record was encoded."""
        if not self._transformer.prepares:
            return image
        draws = Draws(self._transformer.seed(self._seed), self._stream, sample)
        return self._transformer.prepare(image, draws, encoded)

    # -- batches of floats ---------------------------------------------------------------------------

    def load(self, first: int, count: int, batch: Batch) -> None:
        """Fill `batch` with the global samples [first, first + count): images, and labels if it has a second array.

        Raises:
            DataError: naming the record.
        """
        self._learn_channels()
        choices = self._transformer.choose(self._seed, self._stream, np.arange(first, first + count, dtype=np.int64))
        labels = np.empty(count, np.float32)
        out: NDArray[np.float32] = np.empty(0, np.float32)
        for index, number in enumerate(self._order.records(first, count).tolist()):
            self._record = number
            try:
                image, labels[index] = self._prepared(number, first + index)
                self._check_channels(image)
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
            together = self._source.concurrent(int(records.max()) + 1) and self._gains_by_threads(slot)
            workers = self._workers if together else Workers(1)
            workers.run(lambda i: self._copy_one(i, records, samples, choices, slot, block, pending), uncopied.tolist())
            uncopied = np.flatnonzero(pending)
        self._order.prepare()
        return int(uncopied[0]) // count if uncopied.size else len(firsts)

    def _gains_by_threads(self, slot: ImageSlot) -> bool:
        """Whether more than Python is busy with a record, so that several threads read faster than one."""
        return True

    def _copy_plain(
        self, records: NDArray[np.int64], samples: NDArray[np.int64], slot: ImageSlot, block: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        """Copy records in bulk where possible. Returns for each sample 1 if it is still to be copied, else 0."""
        return np.ones(records.size, np.uint8)

    def _copy_one(
        self, i: int, records: NDArray[np.int64], samples: NDArray[np.int64], choices: Choices, slot: ImageSlot,
        block: NDArray[np.uint8], pending: NDArray[np.uint8],
    ) -> None:  # fmt: skip
        """Read sample i's record into its slot; pending[i] stays 1 if it does not fit or cannot be read."""
        try:
            image, label = self._prepared(int(records[i]), int(samples[i]))
            shape = self._transformer.output_shape(_shape_of(image))
        except (CaffepyError, OSError, ValueError, MemoryError):
            return
        if image.dtype != np.uint8 or shape != slot.shape[1:]:
            return
        number, index = divmod(i, slot.count)
        labels, crops, pixels = slot.parts(block[number * slot.size : (number + 1) * slot.size])
        top, left = self._transformer.corner(image.shape[1], image.shape[2], choices, i)
        pixels[index] = image[:, top : top + slot.height, left : left + slot.width]
        crops[index] = (choices.mirror[i], 0, 0) if self._transformer.centers_mean else (choices.mirror[i], top, left)
        labels[index] = label
        pending[i] = 0


class DatumLoader(ImageLoader):
    """Records are Datums: bytes, floats, or an encoded image."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._patience = JitThreshold(_LOADING)

    def _copy_plain(
        self, records: NDArray[np.int64], samples: NDArray[np.int64], slot: ImageSlot, block: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        index = self._source.index
        if self._transformer.prepares or self._transformer.centers_mean:
            return super()._copy_plain(records, samples, slot, block)
        if index is None or not self._source.concurrent(int(records.max()) + 1):
            return super()._copy_plain(records, samples, slot, block)
        if not self._patience.ends(records.size):
            return super()._copy_plain(records, samples, slot, block)
        from caffepy.data.images.image_bytes import copy_records

        pending = copy_records(
            index, records, samples, self._transformer, self._seed, self._stream, slot, block, self._workers.threads
        )
        self._source.concurrent(0)  # again: what the file holds may have changed meanwhile
        return pending

    def decodes(self) -> bool:
        return parse_datum(self._source.read(0))[0].encoded

    def _gains_by_threads(self, slot: ImageSlot) -> bool:
        return slot.channels * slot.height * slot.width >= _LARGE or self.decodes()

    def parse(self, number: int) -> tuple[Image, float]:
        datum, data = parse_datum(self._source.read(number))
        return self.image_of(datum, data), datum.label

    def _prepared(self, number: int, sample: int) -> tuple[Image, float]:
        datum, data = parse_datum(self._source.read(number))
        return self._prepared_image(self.image_of(datum, data), sample, datum.encoded), datum.label

    def image_of(self, datum: caffe_pb2.Datum, data: bytes | memoryview) -> Image:
        """The image of a Datum whose `data` are given separately."""
        transformer = self._transformer
        if datum.encoded:
            return decode_image(data, transformer.force_color, transformer.force_gray, transformer.nvidia)
        if transformer.force_color or transformer.force_gray:
            self._warn_once("force_color and force_gray only change encoded images")
        if transformer.damages:
            self._warn_once("noise_param changes encoded records alone, as in Caffe")
        if len(data):
            pixels = np.frombuffer(data, np.uint8).reshape(datum_shape(datum, len(data), "bytes"))
            # NVIDIA Caffe resizes such images as floats, without rounding
            return pixels.astype(np.float32) if transformer.nvidia and transformer.resizes_randomly else pixels
        shape = datum_shape(datum, len(datum.float_data), "floats")
        return np.array(datum.float_data, np.float32).reshape(shape)

    def _warn_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s: %s", self._where, text)


class ImageFileLoader(ImageLoader):
    """Records are image files.

    Args:
        source: the list of files, with their labels.
        color: decode to 3 channels, else to 1.
        size: height and width to resize to; None: no resizing.
        short_side: length of the shorter side, which stands in place of `size`; 0: no resizing.
        cache: keeps images, decoded and resized; None: nothing is kept.
        others: of `ImageLoader`.
    """

    def __init__(
        self,
        source: ImageListSource,
        *others: Any,
        color: bool = True,
        size: tuple[int, int] | None = None,
        short_side: int = 0,
        cache: ImageCache | None = None,
        **more: Any,
    ) -> None:
        super().__init__(source, *others, **more)
        self._labels = source.labels
        self._files = source.files
        self._color = color
        self._size = size
        self._short_side = short_side
        self._cache = cache

    def parse(self, number: int) -> tuple[Image, float]:
        if self._cache is None:
            image = self._decoded(number)
        else:
            image = self._cache.image(self._files[number], lambda: self._decoded(number))
        return image, self._labels[number]

    def _decoded(self, number: int) -> NDArray[np.uint8]:
        image = decode_image(self._source.read(number), self._color, not self._color, self._transformer.nvidia)
        size, short = self._size, self._short_side
        if short:
            _, height, width = image.shape
            size = (height * short // width, short) if height > width else (short, width * short // height)
        return image if size is None else resize_image(image, *size)

    def fill_cache(self) -> None:
        """Decode all images into the cache until it is full; images that cannot be read are left for their turn."""
        cache = self._cache
        if cache is not None:
            self._workers.run(self._keep, range(len(self._source)))
            count = sum(file in cache for file in self._files)
            logger.info("%s: %d of %d images are decoded", self._where, count, len(self._files))

    def _keep(self, number: int) -> None:
        if self._cache is not None and not self._cache.full:
            with suppress(DataError):
                self.parse(number)


def _shape_of(image: Image) -> Shape:
    channels, height, width = image.shape
    return channels, height, width


def _format(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))

"""Loaders, which fill batches from Datum records of a database or from image files of a list.

`ImageCache` holds decoded images in memory, for ImageData's `cache` option.
"""

from __future__ import annotations

import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.cpu.jit.deferred import JitThreshold
from caffepy.backend.types import ByteImages, ImageSlot
from caffepy.data.datum import parse_datum, stored_image
from caffepy.data.images import (
    CUBIC,
    LINEAR,
    Image,
    copy_planes,
    decode_image,
    decode_plain_jpeg,
    resize_image,
    sides,
    single_threaded_opencv,
    without_ipp,
)
from caffepy.data.prefetch import Batch
from caffepy.data.random import SampleRng, sample_rngs
from caffepy.data.sampler import Sampler
from caffepy.data.sources.databases import RecordSource
from caffepy.data.sources.image_list import ImageListSource
from caffepy.data.transform import CropParams, DataTransformer
from caffepy.data.workers import Workers, keep_freed_memory
from caffepy.errors import CaffepyError, DataError
from caffepy.formats.blobs import check_shape
from caffepy.formats.proto import caffe_pb2
from caffepy.logs.performance_report import DECODING, READING, TRANSFORMING, StageTimes
from caffepy.utils.process_fork import free_after_fork

if TYPE_CHECKING:
    from caffepy.data.bulk_copy import BulkCopy

logger = logging.getLogger(__name__)


# -- the cache of decoded images -----------------------------------------------------------------------

_shared: WeakValueDictionary[Hashable, ImageCache] = WeakValueDictionary()
_lock = free_after_fork(Lock())

Version = tuple[int, int, int, int]


class ImageCache:
    """Decoded images by file path, up to a memory limit. Thread-safe.

    A modified file is decoded again. The image of a removed file stays.

    Args:
        max_bytes: memory limit for the images.
    """

    def __init__(self, max_bytes: int) -> None:
        self._images: dict[str, tuple[Version, NDArray[np.uint8]]] = {}
        self._free_bytes = max_bytes
        self.full = False
        """Whether the limit was reached."""

    def __contains__(self, path: str) -> bool:
        return path in self._images

    def image(self, path: str, decode: Callable[[], NDArray[np.uint8]]) -> NDArray[np.uint8]:
        """Return the cached image of a file, or call `decode` and cache its result if it fits."""
        version = _version(path)
        entry = self._images.get(path)
        if entry is not None and version in (entry[0], None):
            return entry[1]
        image = decode()
        if version is not None:
            self._store(path, version, image)
        return image

    def _store(self, path: str, version: Version, image: NDArray[np.uint8]) -> None:
        with _lock:
            previous = self._images.pop(path, None)
            if previous is not None:
                self._free_bytes += previous[1].nbytes
            self.full = self.full or image.nbytes > self._free_bytes
            if not self.full:
                self._free_bytes -= image.nbytes
                self._images[path] = version, image


def _version(path: str) -> Version | None:
    """Return values that change when a file is replaced or modified; None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def shared_cache(key: Hashable) -> ImageCache:
    """Return the process-wide cache for `key`, limited to half of the free memory.

    Args:
        key: the settings that affect decoding and resizing.
    """
    with _lock:
        cache = _shared.get(key)
        if cache is None:
            free = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"  # macOS: all memory
            cache = _shared[key] = ImageCache(os.sysconf(free) * os.sysconf("SC_PAGE_SIZE") // 2)
        return cache


# -- loaders -------------------------------------------------------------------------------------------


Shape = tuple[int, int, int]

_MIN_THREADED_BYTES = 2**16
"""Minimum size of an uncompressed image for which several reading threads pay off."""
_JPEG_CHANNELS = 3
"""Channels of a plain JPEG."""
_DECODED_TOGETHER = 16
"""Images that a thread decodes before it copies their crops, so that it rarely takes the GIL."""
_MOST_DECODING_THREADS = 8
"""Threads that decode images of a database without waiting for the GIL much; 16 use 9 cores."""
_NUMBA_IMPORT_IMAGES = 4000
"""Images that Python copies while numba is imported, about 0.5 s."""


@dataclass
class Block:
    """The slots that a call of `load_bytes` fills; the sample i is in slot i // slot.count.

    Args:
        records: record number of each sample.
        rngs: random numbers of each sample's preprocessing; empty without preprocessing.
        crop_params: mirror flags and crop offsets.
        slot: layout of a slot.
        parts: labels, crops and pixels of each slot.
        pending: one flag per sample: 1 if it is not in its slot.
        bulk: samples that were copied or located in bulk; None: no sample.
    """

    records: list[int]
    rngs: list[SampleRng]
    crop_params: CropParams
    slot: ImageSlot
    parts: list[tuple[Any, Any, Any]]
    pending: NDArray[np.uint8]
    bulk: BulkCopy | None

    def ranges(self, limit: int) -> list[range]:
        """Return the ranges of at most `limit` samples of one slot in which any are pending."""
        count = self.slot.count
        starts = [first for slot in range(0, len(self.records), count) for first in range(slot, slot + count, limit)]
        ranges = [range(first, min(first + limit, first - first % count + count)) for first in starts]
        return [samples for samples in ranges if self.pending[samples.start : samples.stop].any()]

    def pixels(self, samples: range) -> NDArray[np.uint8]:
        """Return the pixels of samples of one slot."""
        number, first = divmod(samples.start, self.slot.count)
        pixels: NDArray[np.uint8] = self.parts[number][2][first : first + len(samples)]
        return pixels


class ImageLoader(ABC):
    """Fills batches from a source of images; a `Loader`.

    Args:
        source: the records.
        order: the order of reading.
        transformer: applied to each image.
        seed: the solver's seed.
        stream: the layer's random stream.
        where: layer name for messages.
        threads: threads that read and decode records.
    """

    def __init__(
        self,
        source: RecordSource,
        order: Sampler,
        transformer: DataTransformer,
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
        self._threads_context = ExitStack()
        """What several threads need; `close` leaves it."""
        self._threads_prepared = False
        self.stages = StageTimes()
        """Seconds of the threads in each stage."""
        self._mean_mode_set = False
        self._channels = 0
        """Channels of the first record's image; 0 before the first batch."""
        self._warned: set[str] = set()

    @abstractmethod
    def parse(self, number: int) -> tuple[Image, float]:
        """Return the image of record `number` and its label.

        Raises:
            DataError: the record cannot be read or decoded. The message follows the record's name.
        """

    @property
    def threads(self) -> int:
        """Threads that read and decode records."""
        return self._workers.threads

    def limited_by_gil(self) -> bool:
        """Return whether the threads would often wait for Python's lock (the GIL).

        They do if they change each image in many short calls, or if many of them decode.

        Raises:
            DataError: as `parse`.
        """
        return (self._transformer.preprocesses or self.threads > _MOST_DECODING_THREADS) and self.is_encoded()

    @property
    def reading(self) -> str:
        """The current record, for messages."""
        return f"record {self._record} of {self._source.description}"

    def close(self) -> None:
        """Stop the worker threads. Idempotent."""
        self._workers.close()
        self._threads_context.close()
        self._order.close()

    def describe(self, sample: int) -> str:
        """Return the name of a global sample's record, for messages. Thread-safe."""
        number = int(self._order.copy().records(sample, 1)[0])
        return f"{self._source.record_name(number)} of {self._source.description}"

    # -- the first record ----------------------------------------------------------------------------

    def sample_shape(self) -> Shape:
        """Return the shape of the first record's image after the transformation.

        Raises:
            DataError: the record cannot be read or transformed.
        """
        return self._first_image()[1]

    def byte_images(self, count: int) -> ByteImages | None:
        """Return the layout of batches of `count` images if the first image is uint8, else None.

        Raises:
            DataError: the first record cannot be read or transformed.
        """
        image, shape = self._first_image()
        if image.dtype != np.uint8:
            return None
        slot = ImageSlot(count, *shape)
        mean = self._transformer.mean(shape if self._transformer.center_crops_mean else image.shape)
        return ByteImages(slot, np.ascontiguousarray(mean), float(self._transformer.scale))

    def _first_image(self) -> tuple[Image, Shape]:
        try:
            self._set_mean_mode()
            image, _ = self._read_and_preprocess(0, next(iter(self._rngs(np.zeros(1, np.int64))), None))
            return image, self._transformer.output_shape(_shape_of(image))
        except DataError as error:
            raise self._add_record_name(error, 0) from error

    def is_encoded(self) -> bool:
        """Return whether the first record is an encoded image.

        Raises:
            DataError: as `parse`.
        """
        return True

    def _set_channels(self) -> None:
        self._channels = self._channels or self._first_image()[0].shape[0]

    def _check_channels(self, image: Image) -> None:
        """Check that an image has as many channels as the first record."""
        # The net's weights fit one number of channels: Caffe's `base_conv_layer.cpp` fails with CHECK_EQ.
        channels = image.shape[0]
        if channels == self._channels:
            return
        actual = "is gray (1 channel)" if channels == 1 else f"has {channels} channels"
        expected = "is gray (1 channel)" if self._channels == 1 else f"has {self._channels}"
        advice = (
            "set transform_param { force_color: true }, which converts all images to 3 channels, or force_gray: true"
        )
        if not self.is_encoded():
            advice = "rebuild the database with convert_imageset, which converts all images to color (--gray: to gray)"
        raise DataError(f"{actual}, but record 0 {expected}: {advice}")

    def _set_mean_mode(self) -> None:
        """Make the transformer crop mean_file at its center where NVIDIA Caffe does."""
        transformer = self._transformer
        if not self._mean_mode_set and transformer.mean_size != (0, 0):
            transformer.center_crops_mean = transformer.resizes_randomly or (transformer.nvidia and self.is_encoded())
        self._mean_mode_set = True

    def _read_and_preprocess(self, number: int, rng: SampleRng | None) -> tuple[Image, float]:
        """Read record `number` and preprocess its image; return the image and label."""
        image, label = self.parse(number)
        return image if rng is None else self._transformer.preprocess(image, rng, True), label

    def _rngs(self, samples: NDArray[np.int64]) -> list[SampleRng]:
        """Return the random numbers for preprocessing global samples; empty if nothing is to be preprocessed."""
        transformer = self._transformer
        return sample_rngs(transformer.seed(self._seed), self._stream, samples) if transformer.preprocesses else []

    # -- batches of floats ---------------------------------------------------------------------------

    def load(self, first: int, count: int, batch: Batch) -> None:
        """Fill `batch` with the images of samples [first, first + count), and labels if it has a second array.

        Raises:
            DataError: a record cannot be read or transformed; the message names it.
        """
        self._set_channels()
        samples = np.arange(first, first + count, dtype=np.int64)
        crop_params = self._transformer.draw_crops(self._seed, self._stream, samples)
        rngs = self._rngs(samples)
        labels = np.empty(count, np.float32)
        for index, number in enumerate(self._order.records(first, count).tolist()):
            self._record = number
            try:
                image, labels[index] = self._read_and_preprocess(number, rngs[index] if rngs else None)
                start = perf_counter()
                self._check_channels(image)
                self._put(image, index, count, crop_params, batch)
                self.stages.add(TRANSFORMING, start)
            except DataError as error:
                raise self._add_record_name(error, number) from error
        if len(batch.arrays) > 1:
            batch.array(1, (count,))[...] = labels

    def _put(self, image: Image, index: int, count: int, crop_params: CropParams, batch: Batch) -> None:
        """Transform an image into the batch, whose shape its first image gives."""
        result = self._transformer.output_shape(_shape_of(image))
        if index == 0:
            check_shape((count, *result), self._where)
            batch.array(0, (count, *result))
        elif result != batch.arrays[0].shape[1:]:
            raise DataError(
                f"is {sides(image.shape)} and makes {sides(result)}, but others of its batch make "
                f"{sides(batch.arrays[0].shape[1:])}; set crop_size or resize_param, or batch_size: 1"
            )
        self._transformer.apply(image, crop_params, index, batch.arrays[0][index])

    def _add_record_name(self, error: DataError, number: int) -> DataError:
        if str(error).startswith(self._source.description):  # the source itself failed
            return DataError(f"{self._where}: {error}")
        return DataError(f"{self._where}: {self._source.description}: {self._source.record_name(number)} {error}")

    # -- batches of bytes ----------------------------------------------------------------------------

    def load_bytes(self, firsts: Sequence[int], count: int, slot: ImageSlot, block: NDArray[np.uint8]) -> int:
        """Fill slots with cropped uint8 images. The device mirrors them, subtracts the mean and scales.

        Args:
            firsts: the first global sample of each slot.
            count: samples of each slot.
            slot: the layout.
            block: the slots' memory.

        Returns:
            The number of filled slots. If it is less than len(firsts), the next slot has a record that does not fit the
            layout or cannot be read: `load` reads it as float32 or raises the error.
        """
        samples = (np.array(firsts, np.int64)[:, None] + np.arange(count)).reshape(-1)
        records = self._order.records_of(samples)
        self._record = int(records[0])
        start = perf_counter()
        bulk = self._copy_bulk(records, samples, slot, block)
        self.stages.add(READING, start)
        pending = np.ones(records.size, np.uint8) if bulk is None else bulk.pending
        remaining = np.flatnonzero(pending)
        if remaining.size:
            parts = [slot.parts(block[at : at + slot.size]) for at in range(0, len(firsts) * slot.size, slot.size)]
            crop_params = self._transformer.draw_crops(self._seed, self._stream, samples)
            work = Block(records.tolist(), self._rngs(samples), crop_params, slot, parts, pending, bulk)
            thread_safe = self._source.allows_concurrent_reads(int(records.max()) + 1)
            run = self._run if thread_safe and self._benefits_from_threads(slot) else Workers(1).run
            if bulk is not None and slot.channels == _JPEG_CHANNELS:
                ranges = work.ranges(_DECODED_TOGETHER)
                run(lambda n: self._decode_plain(ranges[n], work, bulk), range(len(ranges)))
                remaining = np.flatnonzero(pending)
            if remaining.size:
                run(lambda i: self._copy_single(i, work), remaining.tolist())
            remaining = np.flatnonzero(pending)
        if bulk is not None:
            self._source.allows_concurrent_reads(0)  # raises if the file changed since `_copy_bulk`
        self._order.prepare_next_epoch()
        return int(remaining[0]) // count if remaining.size else len(firsts)

    def _run(self, function: Callable[[int], None], items: Iterable[int]) -> None:
        """Call `function` with each item in the loader's threads."""
        if not self._threads_prepared and self._workers.threads > 1 and self.is_encoded():
            self._threads_context.enter_context(single_threaded_opencv())
            keep_freed_memory()
            self._threads_prepared = True
        self._workers.run(function, items)

    def _benefits_from_threads(self, slot: ImageSlot) -> bool:
        """Return whether decoding or copying a record releases the GIL long enough for several threads to pay off."""
        return True

    def _copy_bulk(
        self, records: NDArray[np.int64], samples: NDArray[np.int64], slot: ImageSlot, block: NDArray[np.uint8]
    ) -> BulkCopy | None:
        """Copy or locate records in bulk where possible; None: nothing was done."""
        return None

    def _decode_plain(self, samples: range, block: Block, bulk: BulkCopy) -> None:
        """Decode, preprocess and crop plain JPEGs that `bulk` located, with few calls that give the GIL away."""
        # Samples stay pending if they are something else, if they do not fit or if they cannot be read.
        from caffepy.data.bulk_copy import copy_crops

        start = perf_counter()
        files = [bulk.plain_jpeg(i) if block.pending[i] else None for i in samples]
        images = [None if file is None else decode_plain_jpeg(*file) for file in files]
        if all(image is None for image in images):
            return
        start = self.stages.add(DECODING, start)
        corners = np.zeros((len(samples), 2), np.int64)
        with without_ipp():
            for n, i in enumerate(samples):
                image = images[n]
                if image is None:
                    continue
                corner = bulk.corner(i)
                if corner is None:
                    images[n], corner = self._preprocessed(image, i, block)
                corners[n] = corner
        copy_crops(images, corners, block.pixels(samples))
        for i, image, (top, left) in zip(samples, images, corners.tolist(), strict=True):
            if image is not None:
                self._mark_filled(i, block, top, left, None)
        self.stages.add(TRANSFORMING, start)

    def _preprocessed(
        self, image: NDArray[np.uint8], i: int, block: Block
    ) -> tuple[NDArray[np.uint8] | None, tuple[int, int]]:
        """Return the preprocessed image (H, W, 3) of sample i, None if it does not fit, and the crop's corner."""
        result = image.transpose(2, 0, 1)
        try:
            if block.rngs:  # a copy: `_copy_single` draws the same numbers if the sample stays pending
                result = self._transformer.preprocess(result, block.rngs[i].copy(), True)
            corner = self._corner_in_slot(result, i, block)
        except (CaffepyError, OSError, ValueError, MemoryError):
            corner = None
        return (None, (0, 0)) if corner is None else (np.ascontiguousarray(result.transpose(1, 2, 0)), corner)

    def _corner_in_slot(self, image: Image, i: int, block: Block) -> tuple[int, int] | None:
        """Return row and column of the crop of sample i; None if the image (C, H, W) does not fit the slot."""
        slot, (channels, rows, columns) = block.slot, image.shape
        shape = self._transformer.output_shape((channels, rows, columns))
        if image.dtype != np.uint8 or shape != (slot.channels, slot.height, slot.width):
            return None
        return self._transformer.crop_offset(rows, columns, block.crop_params, i)

    def _read_sample(self, i: int, block: Block) -> tuple[Image, float]:
        """Return the preprocessed image of sample i and its label."""
        return self._read_and_preprocess(block.records[i], block.rngs[i] if block.rngs else None)

    def _copy_single(self, i: int, block: Block) -> None:
        """Copy sample i into its slot. Its pending flag stays 1 if the record does not fit or cannot be read."""
        slot = block.slot
        try:
            image, label = self._read_sample(i, block)
            start = perf_counter()
            corner = self._corner_in_slot(image, i, block)
        except (CaffepyError, OSError, ValueError, MemoryError):
            return
        if corner is None:
            return
        number, index = divmod(i, slot.count)
        top, left = corner
        pixels = block.parts[number][2]
        copy_planes(image[:, top : top + slot.height, left : left + slot.width], pixels[index])
        self._mark_filled(i, block, top, left, label)
        self.stages.add(TRANSFORMING, start)

    def _mark_filled(self, i: int, block: Block, top: int, left: int, label: float | None) -> None:
        """Set label, mirror flag and the crop's corner of sample i, whose pixels are in its slot."""
        # Without a label, the slot has it already.
        number, index = divmod(i, block.slot.count)
        labels, crops, _ = block.parts[number]
        mirrored = int(block.crop_params.mirror[i])
        crops[index] = (mirrored, 0, 0) if self._transformer.center_crops_mean else (mirrored, top, left)
        if label is not None:
            labels[index] = label
        block.pending[i] = 0


class DatumLoader(ImageLoader):
    """Reads Datum records: bytes, floats, or an encoded image."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._jit_threshold = JitThreshold(_NUMBA_IMPORT_IMAGES)

    def _copy_bulk(
        self, records: NDArray[np.int64], samples: NDArray[np.int64], slot: ImageSlot, block: NDArray[np.uint8]
    ) -> BulkCopy | None:
        index = self._source.index
        if index is None or not self._source.allows_concurrent_reads(int(records.max()) + 1):
            return None
        if not self._jit_threshold.ends(records.size):
            return None
        from caffepy.data.bulk_copy import copy_records

        return copy_records(
            index,
            records,
            samples,
            self._transformer,
            self._seed,
            self._stream,
            slot,
            block,
            self._workers.threads,
            self.is_encoded(),
        )

    def is_encoded(self) -> bool:
        return self._first_is_encoded

    @cached_property
    def _first_is_encoded(self) -> bool:
        """Read once: `load_bytes` asks for each block."""
        return parse_datum(self._source.read(0))[0].encoded

    def _benefits_from_threads(self, slot: ImageSlot) -> bool:
        return slot.channels * slot.height * slot.width >= _MIN_THREADED_BYTES or self.is_encoded()

    def parse(self, number: int) -> tuple[Image, float]:
        datum, data = self._read_datum(number)
        return self.image_of(datum, data), datum.label

    def _read_datum(self, number: int) -> tuple[caffe_pb2.Datum, bytes | memoryview]:
        start = perf_counter()
        datum, data = parse_datum(self._source.read(number))
        self.stages.add(READING, start)
        return datum, data

    def _read_and_preprocess(self, number: int, rng: SampleRng | None) -> tuple[Image, float]:
        datum, data = self._read_datum(number)
        image = self.image_of(datum, data)
        return image if rng is None else self._preprocess(image, rng, datum.encoded), datum.label

    def _preprocess(self, image: Image, rng: SampleRng, encoded: bool) -> Image:
        start = perf_counter()
        preprocessed = self._transformer.preprocess(image, rng, encoded)
        self.stages.add(TRANSFORMING, start)
        return preprocessed

    def _read_sample(self, i: int, block: Block) -> tuple[Image, float]:
        data = None if block.bulk is None else block.bulk.encoded(i)
        if data is None:
            return super()._read_sample(i, block)
        number, index = divmod(i, block.slot.count)
        image = self._decode(data)
        return (self._preprocess(image, block.rngs[i], True) if block.rngs else image), block.parts[number][0][index]

    def image_of(self, datum: caffe_pb2.Datum, data: bytes | memoryview) -> Image:
        """Return the image of `datum`, whose `data` field is passed separately (`parse_datum`)."""
        transformer = self._transformer
        if datum.encoded:
            return self._decode(data)
        if transformer.force_color or transformer.force_gray:
            self._warn_once("force_color and force_gray affect encoded images only")
        if transformer.adds_noise:
            self._warn_once("noise_param affects encoded records only, as in Caffe")
        pixels = stored_image(datum, data)
        # NVIDIA Caffe resizes raw images in float32, without rounding
        in_floats = transformer.nvidia and transformer.resizes_randomly
        return pixels.astype(np.float32, copy=False) if in_floats else pixels

    def _decode(self, data: bytes | memoryview) -> NDArray[np.uint8]:
        start, transformer = perf_counter(), self._transformer
        image = decode_image(data, transformer.force_color, transformer.force_gray, transformer.nvidia)
        self.stages.add(DECODING, start)
        return image

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s: %s", self._where, text)


class ImageFileLoader(ImageLoader):
    """Reads image files.

    Args:
        source: list of files and labels.
        color: decode to 3 channels; False: to 1.
        size: height and width after resizing; None: keep the size.
        short_side: length of the shorter side after resizing; overrides `size`; 0: unused.
        cache: holds decoded and resized images; None: no caching.
        new_dim: as `short_side`, with the longer side rounded, not cut off; 0: unused.
        bicubic: whether `new_dim` resizes by bicubic interpolation.
        args, kwargs: arguments of `ImageLoader`.
    """

    def __init__(
        self,
        source: ImageListSource,
        *args: Any,
        color: bool = True,
        size: tuple[int, int] | None = None,
        short_side: int = 0,
        cache: ImageCache | None = None,
        new_dim: int = 0,
        bicubic: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(source, *args, **kwargs)
        self._labels = source.labels
        self._files = source.files
        self._color = color
        self._size = size
        self._short_side = short_side
        self._cache = cache
        self._new_dim = new_dim
        self._bicubic = bicubic

    def limited_by_gil(self) -> bool:
        return self._cache is None  # the threads share the cache

    def parse(self, number: int) -> tuple[Image, float]:
        if self._cache is None:
            image = self._decode_file(number)
        else:
            image = self._cache.image(self._files[number], lambda: self._decode_file(number))
        return image, self._labels[number]

    def _decode_file(self, number: int) -> NDArray[np.uint8]:
        start = perf_counter()
        data = self._source.read(number)
        start = self.stages.add(READING, start)
        image = decode_image(data, self._color, not self._color, self._transformer.nvidia)
        self.stages.add(DECODING, start)
        size, short = self._size, self._short_side
        if short:
            _, height, width = image.shape
            size = (height * short // width, short) if height > width else (short, width * short // height)
        if self._new_dim:
            factor = np.float32(self._new_dim) / np.float32(min(image.shape[1:]))
            rows, columns = (math.floor(float(factor * np.float32(side)) + 0.5) for side in image.shape[1:])
            return resize_image(image, rows, columns, CUBIC if self._bicubic else LINEAR)
        return image if size is None else resize_image(image, *size)

    def fill_cache(self) -> None:
        """Decode images into the cache until it is full. Unreadable images are skipped; `load` reports them."""
        cache = self._cache
        if cache is not None:
            self._run(self._cache_image, range(len(self._source)))
            count = sum(file in cache for file in self._files)
            logger.info("%s: cached %d of %d decoded images", self._where, count, len(self._files))

    def _cache_image(self, number: int) -> None:
        if self._cache is not None and not self._cache.full:
            with suppress(DataError):
                self.parse(number)


def _shape_of(image: Image) -> Shape:
    channels, height, width = image.shape
    return channels, height, width

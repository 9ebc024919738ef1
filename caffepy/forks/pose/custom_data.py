"""CustomData: records with several images, flows and masks, of FlowNet 2."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caffepy.data.datum import parse_datum
from caffepy.data.mean import read_mean
from caffepy.data.random import permutation
from caffepy.data.sampler import SampleLoader
from caffepy.data.sources.databases import LmdbSource, RecordSource
from caffepy.errors import DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.input.prefetching import DescribingLoader, PrefetchingLayer, Source
from caffepy.layers.layer import register_layer
from caffepy.utils.files import read_data
from caffepy.utils.options import LARGEST, whole

logger = logging.getLogger(__name__)

MAX_LABELS_BYTES = 1 << 30
"""The most bytes of a preselection file."""

FLOW_UNIT = 32
"""Units of a pixel in UINT16FLOW."""

FLOW_MISSING = 32767
"""The number of UINT16FLOW that stands for NaN."""

_Parameter = caffe_pb2.DataParameter


@register_layer("CustomData")
class CustomDataLayer(PrefetchingLayer):
    """Slices of channels of records of an LMDB (FlowNet 2's `custom_data_layer.cpp`).

    Each `slice_point` begins a slice; each slice is a top (N, channels, H, W), and one more top has the labels
    (N, 1, 1, 1). Records are Datums of floats, or of bytes in which each slice has an `encoding`: UINT8; UINT16FLOW, 16
    bits with sign in units of 1/32 pixel, with 32767 for NaN; BOOL1, one bit a pixel. The top is (x - mean) * `scale`,
    with the mean of `mean_file`, or `subtract` of each channel.

    `preselection_file` has a label of each record; those with `preselection_label` are used. `range_start` and
    `range_end` choose a part of them, before or after `rand_permute` changes their order (`rand_permute_order`), within
    blocks of `block_size` if given. The order is that of caffepy's random numbers for `rand_permute_seed`, or for the
    solver's seed if it is 0, and changes after each `permute_every_iter` batches.

    Raises:
        ConfigError: a setting is missing or contradictory, or crop_size, mirror or rand_skip is set.
        DataError: a file cannot be read, or a record does not fit the slices.
    """

    tops = (1, None)

    def batch_size(self) -> int:
        param = self.param.data_param
        return param.batch_size if param.HasField("batch_size") else 1

    def prefetch_depth(self) -> int:
        return self.param.data_param.prefetch

    def open(self) -> tuple[Source, list[tuple[int, ...]]]:
        param = self.param.data_param
        if not param.source:
            raise self.error("data_param.source must name an LMDB")
        if param.backend != _Parameter.LMDB:
            raise self.error("CustomData reads LMDBs only; set backend: LMDB")
        if param.crop_size or param.mirror or param.rand_skip:
            raise self.error("CustomData has no crop_size, mirror and rand_skip; remove them")
        points = list(param.slice_point)
        if any(a >= b for a, b in zip([0, *points], points, strict=False)):
            raise self.error("slice_point of data_param must rise")
        if len(param.encoding) > len(points) + 1:
            raise self.error(f"data_param has {len(param.encoding)} encodings for {len(points) + 1} slices")
        try:
            self._records: RecordSource = LmdbSource(self.context.resolve(param.source))
        except DataError as error:
            raise DataError(f"{self.where}: {error}") from error
        try:
            self._order = CustomOrder(param, len(self._records), self._selected(), self.where)
            loader = self._make_loader(0, 0)
            shapes = [part.shape for part in loader.sample(0, 0)]
        except BaseException:
            self._records.close()
            raise
        if param.verbose:
            logger.info("%s: %d of %d records are used", self.where, len(self._order), len(self._records))
        return self._records, shapes[: len(self.param.top)]

    def _selected(self) -> NDArray[np.int64]:
        """Return the numbers of the records that the preselection allows."""
        param, count = self.param.data_param, len(self._records)
        if not param.HasField("preselection_file"):
            return np.arange(count, dtype=np.int64)
        if not param.HasField("preselection_label"):
            raise self.error("data_param has preselection_file without preselection_label")
        labels = read_labels(self.context.resolve(param.preselection_file), self.where)
        if len(labels) != count:
            raise self.data_error(
                f"'{param.preselection_file}' has {len(labels)} labels, but '{param.source}' {count} records"
            )
        return np.flatnonzero(labels == param.preselection_label)

    def _make_loader(self, seed: int, stream: int) -> SampleLoader:
        param = self.param.data_param
        mean = None
        if param.HasField("mean_file"):
            try:
                mean = read_mean(self.context.resolve(param.mean_file))
            except DataError as error:
                raise DataError(f"{self.where}: {error}") from error
        elif param.subtract:
            mean = np.array(param.subtract, np.float32).reshape(-1, 1, 1)
        slices, records = Slices(param.slice_point, param.encoding, mean, param.scale), self._records
        order = self._order.with_seed(seed, stream)
        return SampleLoader(
            self.where,
            lambda _, sample: slices.tops(records.read(order.record(sample))),
            lambda sample: f"{records.record_name(order.record(sample))} of {records.description}",
        )

    def make_loader(self) -> DescribingLoader:
        stream = self.random_stream()
        return self._make_loader(stream.seed, stream.stream)

    def epoch_size(self) -> int | None:
        return len(self._order) if self._source is not None else None


def read_labels(path: Path, where: str) -> NDArray[np.int64]:
    """Return the integers of a text file, up to the first word that is none.

    Raises:
        DataError: the file cannot be read.
    """
    words = read_data(path, MAX_LABELS_BYTES, f"{where}: preselection_file '{path}'").split()
    labels = []
    for word in words:
        label = whole(word, -LARGEST, LARGEST)
        if label is None:
            break
        labels.append(label)
    return np.array(labels, np.int64)


class CustomOrder:
    """The order in which records are read.

    Args:
        param: range and permutation.
        total: number of records in the source.
        selected: numbers of the records that may be read.
        where: the layer, for messages.
        seed: of the permutation.
        stream: of the permutation.

    Raises:
        ConfigError: the range is empty.
    """

    def __init__(
        self, param: _Parameter, total: int, selected: NDArray[np.int64], where: str, seed: int = 0, stream: int = 0
    ) -> None:
        count = len(selected)
        if count == 0:
            raise DataError(f"{where}: preselection_file allows none of the {total} records")
        self._param, self._total, self._selected, self._where = param, total, selected, where
        self._first = min(max(param.range_start, 0), count - 1)
        self._last = count - 1 if param.range_end < 0 or param.range_end >= count else param.range_end
        if self._last < self._first:
            raise DataError(f"{where}: range_end {param.range_end} lies before range_start {param.range_start}")
        self._key = (param.rand_permute_seed, 0) if param.rand_permute_seed else (seed, stream)
        self._orders: dict[int, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return self._last - self._first + 1

    def with_seed(self, seed: int, stream: int) -> CustomOrder:
        """Return a copy with other random numbers."""
        return CustomOrder(self._param, self._total, self._selected, self._where, seed, stream)

    def record(self, sample: int) -> int:
        """Return the record of a global sample."""
        every = self._param.permute_every_iter if self._param.rand_permute else 0
        generation = sample // (every * max(self._param.batch_size, 1)) if every else 0
        if generation not in self._orders:
            self._orders = {generation: self._make(generation)}
        return int(self._orders[generation][sample % len(self)])

    def _make(self, generation: int) -> NDArray[np.int64]:
        part = slice(self._first, self._last + 1)
        if not self._param.rand_permute:
            return self._selected[part]
        if self._param.rand_permute_order == _Parameter.FIRST_PERMUTE_THEN_RANGE:
            return self._permuted(self._selected, generation)[part]
        return self._permuted(self._selected[part], generation)

    def _permuted(self, numbers: NDArray[np.int64], generation: int) -> NDArray[np.int64]:
        block = self._param.block_size or len(numbers)
        parts = []
        for index, begin in enumerate(range(0, len(numbers), block)):
            part = numbers[begin : begin + block]
            # Each block of each generation has a pseudo-epoch of its own.
            parts.append(part[permutation(*self._key, (generation << 32) + index, len(part))])
        return np.concatenate(parts)


class Slices:
    """Decodes records into slices of channels.

    Args:
        points: first channel of each slice but the first.
        encodings: of each slice; UINT8 where none is given.
        mean: to subtract, (channels, H, W) or (channels, 1, 1); None: nothing.
        scale: factor of the result.
    """

    def __init__(
        self, points: Sequence[int], encodings: Sequence[int], mean: NDArray[np.float32] | None, scale: float
    ) -> None:
        self._points = list(points)
        self._encodings = list(encodings)
        self._mean, self._scale = mean, np.float32(scale)

    def bounds(self, channels: int) -> list[tuple[int, int]]:
        """Return the first channel of each slice and the one after it.

        Raises:
            DataError: a slice has no channel.
        """
        ends = [*self._points, channels]
        if len(ends) > 1 and ends[-2] >= channels:
            raise DataError(f"has {channels} channels, but slice_point is {ends[-2]}")
        return list(zip([0, *self._points], ends, strict=True))

    def tops(self, record: bytes | memoryview) -> list[NDArray[np.float32]]:
        """Return the slices of a record less the mean, scaled, and its label (1, 1, 1).

        Raises:
            DataError: the record does not fit. The message follows the record's name.
        """
        parts, label = self._decode(record)
        if self._mean is not None:
            bounds = self.bounds(sum(len(part) for part in parts))
            size = self._mean.shape[1:]
            if len(self._mean) > bounds[-1][1] or (size != (1, 1) and size != parts[0].shape[1:]):
                raise DataError("does not have the shape of the mean")
            mean = np.zeros((bounds[-1][1], *size), np.float32)
            mean[: len(self._mean)] = self._mean
            parts = [part - mean[begin:end] for part, (begin, end) in zip(parts, bounds, strict=True)]
        return [*(part * self._scale for part in parts), np.full((1, 1, 1), label, np.float32)]

    def _decode(self, record: bytes | memoryview) -> tuple[list[NDArray[np.float32]], float]:
        """Return the slices of a record, (channels, H, W) each, and its label."""
        datum, data = parse_datum(record)
        shape = (datum.channels, datum.height, datum.width)
        if min(shape) <= 0:
            raise DataError(f"has {shape[0]} channels of {shape[1]} x {shape[2]} pixels")
        bounds = self.bounds(shape[0])
        if datum.float_data:
            if self._encodings or len(datum.float_data) != math.prod(shape):
                raise DataError(f"has {len(datum.float_data)} floats, which do not fit its size or have no encoding")
            values = np.array(datum.float_data, np.float32).reshape(shape)
            return [values[begin:end] for begin, end in bounds], float(datum.label)
        parts, offset, content = [], 0, np.frombuffer(data, np.uint8)
        for index, (begin, end) in enumerate(bounds):
            encoding = self._encodings[index] if index < len(self._encodings) else _Parameter.UINT8
            part, offset = self._decode_slice(content, offset, encoding, (end - begin, *shape[1:]))
            parts.append(part)
        return parts, float(datum.label)

    def _decode_slice(
        self, content: NDArray[np.uint8], offset: int, encoding: int, shape: tuple[int, ...]
    ) -> tuple[NDArray[np.float32], int]:
        count = math.prod(shape)
        if encoding == _Parameter.BOOL1 and shape[0] != 1:
            raise DataError(f"has a slice of {shape[0]} channels with the encoding BOOL1, which is for one channel")
        sizes = {int(_Parameter.UINT8): count, int(_Parameter.UINT16FLOW): 2 * count}
        size = sizes.get(encoding, -(-count // 8))
        part = content[offset : offset + size]
        if part.size != size:
            raise DataError(f"has {content.size} bytes, fewer than its slices need")
        if encoding == _Parameter.UINT8:
            values = part.astype(np.float32)
        elif encoding == _Parameter.UINT16FLOW:
            numbers = part.view("<i2") if part.flags.c_contiguous else np.ascontiguousarray(part).view("<i2")
            values = numbers.astype(np.float32) / np.float32(FLOW_UNIT)
            values[numbers == FLOW_MISSING] = np.nan
        else:
            values = np.unpackbits(part, bitorder="little")[:count].astype(np.float32)
        return values.reshape(shape), offset + size

"""BoxData: images and the objects in the cells of grids, for YOLO 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.types import ByteImages
from caffepy.data.datum import parse_datum
from caffepy.data.images import Image, resize_image
from caffepy.data.loader import DatumLoader
from caffepy.data.prefetch import Batch
from caffepy.data.random import SampleRng
from caffepy.errors import DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.input.images import DataLayer
from caffepy.layers.input.prefetching import Source
from caffepy.layers.layer import register_layer

Floats = NDArray[np.float32]

_VALUES = 6
"""Numbers of an object in a record: class, difficult, center x, center y, width, height."""
_CELL_VALUES = 7
"""Numbers of a cell in a label."""
_DEFAULT_SIDE = 7
_MAX_SIDE = 1000
_LARGEST_CUT = 30
"""Percentages of the sides that the training may cut off: 0 to 29."""
_TRIALS = 100
"""Random crops without an object after which the image stays whole."""


@register_layer("BoxData")
class BoxDataLayer(DataLayer):
    """Images and their objects from a database of Datums (`box_data_layer.cpp` of caffe-yolo).

    Records are encoded images whose float_data holds class from 0, difficult, center x, center y, width and height of
    each object, as fractions of the image. Tops: images (N, C, H, W), and for each `side` S of data_param, by default
    7, labels (N, 7 S^2): for all cells in turn difficult, 1 for an object, and the class, or 0, 0, -1 in an empty cell;
    then center x, center y, width and height of each cell's object. A cell with several objects has the last one. In
    training a random part of 71 % to 100 % of the sides is cut out and resized to the image's size; objects whose
    center lies outside are dropped.

    Raises:
        ConfigError: the sides do not match the tops, or mirror or crop_size is set, which would not move the objects.
        DataError: a record cannot be read, is not encoded, or has no objects or invalid ones.
    """

    tops = (1, None)

    def open(self) -> tuple[Source, list[tuple[int, ...]]]:
        transform = self.param.transform_param
        if transform.mirror or transform.crop_size or transform.crop_h:
            raise self.error("mirror and crop_size would not move the objects; remove them from transform_param")
        self._sides = list(self.param.data_param.side) or [_DEFAULT_SIDE]
        tops = len(self.param.top)
        if tops > 1 and len(self._sides) != tops - 1:
            raise self.error(f"data_param has {len(self._sides)} side for {tops - 1} label tops; give one for each")
        if not all(0 < side <= _MAX_SIDE for side in self._sides):
            raise self.error(f"side is {self._sides}; it must be from 1 to {_MAX_SIDE}")
        return super().open()

    def shapes(self) -> list[tuple[int, ...]]:
        return [self.image_loader(0, 0).sample_shape(), *((_CELL_VALUES * side * side,) for side in self._sides)]

    def byte_images(self, count: int) -> ByteImages | None:
        return None

    def image_loader(self, seed: int, stream: int) -> BoxLoader:
        order, threads = self.record_order(seed, stream), self.threads(self.param.data_param.threads)
        training = self.context.phase == caffe_pb2.TRAIN
        return BoxLoader(
            self._records,
            order,
            self._transformer,
            seed,
            stream,
            self.where,
            threads,
            sides=self._sides,
            crops=training and len(self.param.top) > 1,
        )


class BoxLoader(DatumLoader):
    """Loads Datums with objects.

    Args:
        sides: cells in a row of each label's grid.
        crops: whether to cut out random parts of the images.
        args: of `DatumLoader`.
    """

    def __init__(self, *args: Any, sides: Sequence[int], crops: bool) -> None:
        super().__init__(*args)
        self._sides = sides
        self._crops = crops

    def limited_by_gil(self) -> bool:
        return True

    def load(self, first: int, count: int, batch: Batch) -> None:
        self._set_channels()
        samples = np.arange(first, first + count, dtype=np.int64)
        crop_params = self._transformer.draw_crops(self._seed, self._stream, samples)
        records = self._order.records_of(samples)
        labels = [np.empty((count, _CELL_VALUES * side * side), np.float32) for side in self._sides]

        def fill(index: int) -> None:
            number = self._record = int(records[index])
            try:
                image, objects = self._sample(number, first + index)
                self._check_channels(image)
                self._put(image, index, count, crop_params, batch)
                for label, side in zip(labels, self._sides, strict=True):
                    label[index] = grid_label(objects, side)
            except DataError as error:
                raise self._add_record_name(error, number) from error

        fill(0)  # sets the batch's shape
        self._run(fill, range(1, count))
        for index, label in zip(range(1, len(batch.arrays)), labels, strict=False):
            batch.array(index, label.shape)[...] = label
        self._order.prepare_next_epoch()

    def _sample(self, number: int, sample: int) -> tuple[Image, Floats]:
        """Return the image and the objects (n, 6) of a record, as those of a global sample."""
        datum, data = parse_datum(self._source.read(number))
        if not datum.encoded:
            raise DataError("is not an encoded image (JPEG, PNG), which BoxData needs")
        image = self.image_of(datum, data)
        objects = np.array(datum.float_data, np.float32)
        if (
            not len(objects)
            or len(objects) % _VALUES
            or not np.isfinite(objects).all()
            or (objects[::_VALUES] < 0).any()
        ):
            raise DataError(
                f"has {len(objects)} numbers in float_data; BoxData needs class from 0, difficult, center x, center y, "
                "width and height of each object"
            )
        objects = objects.reshape(-1, _VALUES)
        if not self._crops:
            return image, objects
        return self._cropped(image, objects, SampleRng(self._transformer.seed(self._seed), self._stream, sample))

    def _cropped(self, image: Image, objects: Floats, rng: SampleRng) -> tuple[Image, Floats]:
        """Cut out a random part that has an object's center, and resize it to the image's size."""
        _, height, width = image.shape
        size = np.array([width, height])
        pixels = (objects[:, 2:] * np.tile(size, 2).astype(np.float32)).astype(np.int64)
        for _ in range(_TRIALS):
            scale = np.float32(1 - rng.below(_LARGEST_CUT) / 100)
            part = np.maximum((size * scale).astype(np.int64) - 1, 1)
            corner = np.array([rng.below(int(free)) if free > 0 else 0 for free in size - part])
            inside = ((pixels[:, :2] >= corner) & (pixels[:, :2] < corner + part)).all(1)
            if inside.any():
                moved = objects[inside].copy()
                moved[:, 2:4] = (pixels[inside, :2] - corner) / part.astype(np.float32)
                moved[:, 4:] = pixels[inside, 2:] / part.astype(np.float32)
                (left, top), (columns, rows) = corner.tolist(), part.tolist()
                cut = np.ascontiguousarray(image[:, top : top + rows, left : left + columns])
                return resize_image(cut.astype(np.uint8, copy=False), height, width), moved
        return image, objects


def grid_label(objects: Floats, side: int) -> Floats:
    """Return the label (7 side^2,) of objects (n, 6): class, difficult, center x, center y, width, height."""
    cells = side * side
    label = np.zeros(_CELL_VALUES * cells, np.float32)
    label[2 * cells : 3 * cells] = -1
    places = np.clip(np.floor(objects[:, 2:4] * np.float32(side)).astype(np.int64), 0, side - 1)
    for (column, row), (kind, difficult, *box) in zip(places.tolist(), objects.tolist(), strict=True):
        cell = row * side + column
        label[cell], label[cells + cell], label[2 * cells + cell] = difficult, 1, kind
        label[3 * cells + 4 * cell : 3 * cells + 4 * cell + 4] = box
    return label

"""Layers whose values come from the program or from a filler: Input, DummyData and MemoryData."""

from __future__ import annotations

import logging
import zlib
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.types import RandomStream
from caffepy.errors import RunError, ShapeError
from caffepy.formats.blobs import check_shape
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.fillers import fill
from caffepy.layers.layer import Blobs, Layer, LayerContext, register_layer

log = logging.getLogger(__name__)


@register_layer("Input")
class InputLayer(Layer):
    """Tops that the caller fills (Caffe's `input_layer.cpp`), with one shape for each top or one for all.

    `transform_param` and `image_data_param` (new_height, new_width) say how `caffepy classify`, `caffepy detect` and
    `caffepy.load` make the first top's values of images: as ImageData does in the TEST phase, without mirroring.

    Raises:
        ConfigError: the number of shapes is neither 0, 1 nor the number of tops.
    """

    supports_half = True
    recordable = True
    float32_tops_from = 1
    bottoms = (0, 0)
    tops = (1, None)
    has_backward = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        shapes = self.param.input_param.shape
        if len(shapes) not in (0, 1, len(top)):
            raise self.error(
                f"input_param.shape must be given once, once for each of the {len(top)} tops, or not at all; "
                f"it is given {len(shapes)} times"
            )
        for i, blob in enumerate(top):
            if shapes:
                blob.reshape(tuple(shapes[i if len(shapes) > 1 else 0].dim))

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """Does nothing: `setup` or the caller shapes the tops."""

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        """Does nothing: the caller fills the tops."""


T = TypeVar("T")


@register_layer("DummyData")
class DummyDataLayer(Layer):
    """Tops with the values of fillers (Caffe's `dummy_data_layer.cpp`).

    Constant tops are filled at set-up and never again: what a program writes there stays. Random ones are 0 before the
    first pass and filled in every pass. Random values depend on the global number of each sample.
    As in both Caffes, each device has tops of the prototxt's shapes: the batch is not divided among devices.

    Raises:
        ConfigError: fillers or shapes are not given once or once for each top.
    """

    supports_half = True
    float32_tops_from = 1
    bottoms = (0, 0)
    tops = (1, None)
    has_backward = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.dummy_data_param
        fillers = list(param.data_filler) or [caffe_pb2.FillerParameter(type="constant")]
        if len(fillers) not in (1, len(top)):
            raise self.error(
                f"data_filler must be given once or once for each of the {len(top)} tops; "
                f"it is given {len(fillers)} times"
            )
        self._fillers = fillers * len(top) if len(fillers) == 1 else fillers
        for blob, shape in zip(top, self._shapes(len(top)), strict=True):
            check_shape(shape, self.where)
            blob.reshape(shape)
        self.check_top_memory(top)
        for filler, blob in zip(self._fillers, top, strict=True):
            if filler.type == "constant":
                self.backend.fill(blob.data, filler.value)
        self.context.number_samples(top[0].shape[0] if top[0].shape else 1)

    def _shapes(self, tops: int) -> list[tuple[int, ...]]:
        param = self.param.dummy_data_param
        legacy = {name: list(getattr(param, name)) for name in ("num", "channels", "height", "width")}
        if not any(legacy.values()):
            shapes = [tuple(shape.dim) for shape in param.shape]
            return self._one_each("shape", shapes, tops)
        if param.shape:
            raise self.error("dummy_data_param has both shape and num, channels, height, width; keep shape")
        return list(zip(*(self._one_each(name, sizes, tops) for name, sizes in legacy.items()), strict=True))

    def _one_each(self, field: str, values: list[T], tops: int) -> list[T]:
        if len(values) not in (1, tops):
            raise self.error(
                f"dummy_data_param.{field} must be given once or once for each of the {tops} tops; "
                f"it is given {len(values)} times"
            )
        return values if len(values) == tops else values * tops

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """Does nothing: `setup` shapes the tops."""

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        for i, (filler, blob) in enumerate(zip(self._fillers, top, strict=True)):
            if filler.type != "constant":
                self.backend.from_host(self._random(i, filler, blob.shape), blob.data)

    def capture_blocker(self) -> str | None:
        random = any(filler.type != "constant" for filler in self._fillers)
        return "it fills its tops with random numbers on the host in every pass" if random else None

    def _random(self, index: int, filler: caffe_pb2.FillerParameter, shape: tuple[int, ...]) -> NDArray[np.float32]:
        values = np.empty(shape, np.float32)
        samples = values.reshape(shape[0] if shape else 1, *shape[1:])
        first = self.first_sample()
        for i in range(len(samples)):
            key = zlib.crc32(f"{self.random_name}/{index}/{first + i}".encode())
            samples[i] = fill(filler, (1, *shape[1:]), RandomStream(self.context.seed, key), self.where)[0]
        return values


@register_layer("MemoryData")
class MemoryDataLayer(Layer):
    """Consecutive batches of the arrays given to `reset_arrays` (Caffe's `memory_data_layer.cpp`).

    Tops: (batch_size, channels, height, width) and (batch_size,); the second is (batch_size, 1, 1, 1) from the first
    pass on. The first batch follows the last one. As in Caffe, arrays are not transformed. Arrays and `batch_size`
    belong to one device: the batch is not divided among devices.

    Raises:
        ConfigError: a size is missing.
        RunError: a pass runs before `reset_arrays`.
    """

    bottoms = (0, 0)
    tops = (2, 2)
    has_backward = False
    supports_half = True
    float32_tops_from = 1

    _arrays: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None
    _position = 0

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.memory_data_param
        self._shape = (param.batch_size, param.channels, param.height, param.width)
        if min(self._shape) < 1:
            raise self.error("memory_data_param needs batch_size, channels, height and width, all at least 1")
        self.context.number_samples(self._shape[0])
        top[0].reshape(self._shape)
        top[1].reshape(self._shape[:1])

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """Does nothing: `forward` shapes the tops."""

    def reset_arrays(self, data: NDArray[np.float32], labels: NDArray[np.float32]) -> None:
        """Read the next batches from these arrays, starting at row 0. The arrays are not copied.

        Args:
            data: (n, channels, height, width), n a multiple of the batch size.
            labels: n elements.

        Raises:
            ShapeError: the arrays have other shapes.
        """
        if data.ndim != 4 or data.shape[1:] != self._shape[1:]:
            raise ShapeError(f"{self.where}: data of shape {data.shape} do not fit {('n', *self._shape[1:])}")
        if labels.size != len(data) or not len(data) or len(data) % self._shape[0]:
            raise ShapeError(
                f"{self.where}: {len(data)} rows of data and {labels.size} labels; there must be as many of "
                f"both, a multiple of the batch size {self._shape[0]}"
            )
        if self.param.HasField("transform_param"):
            log.warning("%s does not transform its arrays; transform_param has no effect", self.where)
        self._arrays = (data, labels.reshape(-1))
        self._position = 0

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if not self.backend.holds_values:
            self._copy(np.zeros(self._shape, np.float32), np.zeros(self._shape[:1], np.float32), top)
            return
        if self._arrays is None:
            raise RunError(
                f"{self.where} has no data; call its reset_arrays before a pass, in pycaffe the net's set_input_arrays"
            )
        rows = slice(self._position, self._position + self._shape[0])
        self._copy(self._arrays[0][rows], self._arrays[1][rows], top)
        self._position = rows.stop % len(self._arrays[0])

    def _copy(self, data: NDArray[np.float32], labels: NDArray[np.float32], top: Blobs) -> None:
        top[0].reshape(self._shape)
        top[1].reshape((self._shape[0], 1, 1, 1))
        self.backend.from_host(data, top[0].data)
        self.backend.from_host(labels.reshape(top[1].shape), top[1].data)

    @classmethod
    def depends_on_earlier_passes(cls, param: caffe_pb2.LayerParameter, context: LayerContext) -> bool:
        """In TEST: only the program knows the position. In a training it gives each process its own arrays."""
        return context.phase == caffe_pb2.TEST

    def capture_blocker(self) -> str | None:
        return "it copies its arrays from the host in every pass"

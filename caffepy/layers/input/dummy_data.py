"""DummyData."""

from __future__ import annotations

import zlib
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.types import RandomStream
from caffepy.blob import check_shape
from caffepy.fillers import fill
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.proto import caffe_pb2

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

"""MemoryData: batches from arrays of the calling program."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from caffepy.errors import RunError, ShapeError
from caffepy.layers.core.base import Blobs, Layer, LayerContext, register_layer
from caffepy.proto import caffe_pb2

log = logging.getLogger(__name__)


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

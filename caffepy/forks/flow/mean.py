"""Mean."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.backend import Each, Scalar, expression
from caffepy.data.mean import read_mean
from caffepy.errors import DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.formulas import scaled
from caffepy.layers.layer import Blobs, Layer, register_layer


@expression
def with_mean(x: Each, mean: Each, factor: Scalar) -> Each:
    return factor * x + mean


@register_layer("Mean")
class MeanLayer(Layer):
    """y = output_scale * (input_scale * x + mean_scale * mean), or minus the mean with `operation` SUBTRACT.

    Each bottom (N, C, H, W) has its top. The mean is that of each pixel, from the .binaryproto `file`, or `value` of
    each channel; both are used in turn if the bottom has more channels. dx = output_scale * input_scale * dy. Source:
    FlowNet 2's `mean_layer.cpp`.

    Raises:
        ConfigError: neither or both of file and value are given.
        ShapeError: the bottom does not fit the mean.
        DataError: the file cannot be read.
    """

    bottoms = (1, None)
    tops = (1, None)
    equal_bottoms_and_tops = True
    recordable = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.mean_param
        if param.HasField("file") == bool(param.value):
            raise self.error("mean_param needs either file or value")
        self._means: dict[int, Blob] = {}
        if param.HasField("file"):
            try:
                self._mean: NDArray[np.float32] = read_mean(self.context.resolve(param.file))
            except DataError as error:
                raise DataError(f"{self.where}: {error}") from error
        else:
            self._mean = np.array(param.value, np.float32).reshape(-1, 1, 1)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        size = self._mean.shape[1:]
        for index, (x, y) in enumerate(zip(bottom, top, strict=True)):
            shape = x.shape
            if len(shape) != 4 or shape[1] % len(self._mean) or (size != (1, 1) and size != shape[2:]):
                raise self.shape_error("the bottom does not fit the mean's channels, height and width", x)
            y.reshape(shape)
            if index not in self._means or self._means[index].shape != shape:
                self._means[index] = Blob(self.backend, shape, f"{self.name} mean {index}")
                if self.backend.holds_values:
                    repeated = np.tile(self._mean, (shape[1] // len(self._mean), 1, 1)) * np.float32(self._factor())
                    values = np.ascontiguousarray(np.broadcast_to(repeated, shape))
                    self.backend.from_host(values, self._means[index].data)

    def _factor(self) -> float:
        """Return the factor of the mean."""
        param = self.param.mean_param
        sign = -1 if param.operation == caffe_pb2.MeanParameter.SUBTRACT else 1
        return float(sign * param.mean_scale * param.output_scale)

    def terms(self, index: int) -> Any:
        """Return what is added to bottom `index`, in its shape."""
        return self._means[index].host_data()

    def slope(self) -> float:
        """Return the factor of the bottoms."""
        return self.param.mean_param.input_scale * self.param.mean_param.output_scale

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        for index, (x, y) in enumerate(zip(bottom, top, strict=True)):
            self.backend.apply(with_mean, (x.data, self._means[index].data, self.slope()), (y.data,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        for x, y, wanted in zip(bottom, top, propagate_down, strict=True):
            if wanted:
                self.backend.apply(scaled, (y.diff, self.slope()), (x.diff,))

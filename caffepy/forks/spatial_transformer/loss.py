"""STLoss and LocLoss: losses of SpatialTransformer's parameters."""

from __future__ import annotations

import math

from caffepy.backend import Array, Each, Scalar, expression
from caffepy.forks.spatial_transformer.transformer import output_grid
from caffepy.layers.layer import Blobs, register_layer
from caffepy.layers.loss import LossLayer


@expression
def excess(x: Each, limit: Scalar, factor: Scalar) -> Each:
    beyond = max(x - limit, 0.0) + max(-x - limit, 0.0)
    return 0.5 * factor * beyond * beyond


@expression
def excess_slope(x: Each, limit: Scalar, factor: Scalar) -> Each:
    return factor * (max(x - limit, 0.0) - max(-x - limit, 0.0))


class ExcessLossLayer(LossLayer):
    """A loss of one bottom: the mean of (|v| - limit)^2 / 2 over the values v beyond a limit."""

    bottoms = (1, 1)
    no_gradient_bottoms = frozenset()

    def check_first_axis(self, bottom: Blobs) -> None:
        """Check that the bottom has samples.

        Raises:
            ShapeError: it has none.
        """
        if bottom[0].count == 0:
            raise self.shape_error("the bottom must not be empty", bottom[0])


@register_layer("LocLoss")
class LocLossLayer(ExcessLossLayer):
    """loss = the mean over all elements of max(|x| - threshold, 0)^2 / 2.

    Source: `loc_loss_layer.cu` of SpatialTransformerLayer.

    Raises:
        ConfigError: the threshold is not above 0.
        ShapeError: the bottom is empty.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        self._limit = self.param.loc_loss_param.threshold
        if not self._limit > 0:
            raise self.error(f"loc_loss_param.threshold is {self._limit:g}; it must be above 0")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self.check_first_axis(bottom)
        top[0].reshape(())

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        inputs = (bottom[0].data, self._limit, 1 / bottom[0].count)
        self.backend.reduce(excess, inputs, (top[0].data,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            inputs = (bottom[0].data, self._limit, self.weight() / bottom[0].count)
            self.backend.apply(excess_slope, inputs, (bottom[0].diff,))
            self.apply_top_gradient(top, bottom[0].diff)


@register_layer("STLoss")
class STLossLayer(ExcessLossLayer):
    """loss = the mean over samples and pixels of (max(|r| - 1, 0)^2 + max(|c| - 1, 0)^2) / 2.

    (r, c) = theta (i', j', 1). It pulls the pixels of a transformed image of `output_H` x `output_W` pixels into the
    image; see SpatialTransformer. Shape: theta (N, 6). Source: `st_loss_layer.cu` of SpatialTransformerLayer.

    Raises:
        ConfigError: the size is below 1.
        ShapeError: the bottom does not have six elements for each sample.
    """

    _grid: Array | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self.param.st_loss_param
        if min(param.output_H, param.output_W) < 1:
            raise self.error("st_loss_param needs output_H and output_W, at least 1")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self.check_first_axis(bottom)
        param, samples = self.param.st_loss_param, bottom[0].shape[0] if bottom[0].shape else 0
        if bottom[0].count != 6 * samples:
            raise self.shape_error("the bottom must have six elements for each sample", bottom[0])
        top[0].reshape(())
        pixels = param.output_H * param.output_W
        self.check_memory(8 * samples * pixels, "the transformed positions")
        if self._grid is None:
            self._grid = self.backend.zeros((3, pixels))
            if self.backend.holds_values:
                self.backend.from_host(output_grid(param.output_H, param.output_W), self._grid)
        self._theta = self.scratch("theta", (2 * samples, 3))
        self._lines = self.scratch("lines", (2 * samples, pixels))

    def _factor(self) -> float:
        return 2 / math.prod(self._lines.shape)

    def _transform(self, bottom: Blobs) -> Array:
        assert self._grid is not None
        lines = self._lines.array
        self.backend.gemm(self.backend.reshaped(bottom[0].data, self._theta.shape), self._grid, lines)
        return lines

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.backend.reduce(excess, (self._transform(bottom), 1.0, self._factor()), (top[0].data,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        assert self._grid is not None
        lines, diff = self._transform(bottom), bottom[0].diff
        self.backend.apply(excess_slope, (lines, 1.0, self.weight() * self._factor()), (lines,))
        self.backend.gemm(lines, self._grid, self._theta.array, False, True)
        self.backend.copy(self._theta.array.reshape(diff.shape), diff)
        self.apply_top_gradient(top, diff)

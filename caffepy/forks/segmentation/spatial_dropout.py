"""SpatialDropout: dropout of whole channels, of ENet and of nets for poses."""

from __future__ import annotations

from caffepy.backend import Array
from caffepy.backend.formulas import product_with_channel
from caffepy.layers.activation import DropoutLayer
from caffepy.layers.layer import Blobs, register_layer


@register_layer("SpatialDropout")
class SpatialDropoutLayer(DropoutLayer):
    """Dropout of whole channels (Tompson et al. 2015; `spatial_dropout_layer.cpp` of several forks).

    x is (N, C, …). In TRAIN the channel y[n, c] = x[n, c] / (1 - dropout_ratio) with probability 1 - dropout_ratio,
    else 0. In TEST y = x. The settings are those of Dropout, in `dropout_param`.

    Raises:
        ConfigError: dropout_ratio is outside [0, 1).
        ShapeError: the bottom has fewer than two axes.
    """

    supports_half = False

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        if len(bottom[0].shape) < 2:
            raise self.shape_error("the bottom needs at least two axes, (N, C, …)", bottom[0])
        self._factors = self.scratch("factors", bottom[0].shape[:2])

    def _drop(self, source: Array, destination: Array) -> None:
        if not self._training:
            super()._drop(source, destination)
            return
        factors = self._factors.array
        self.backend.fill(factors, 1)
        super()._drop(factors, factors)
        self.backend.apply(product_with_channel, (source, factors), (destination,), axis=0)

"""Axpy: a factor for each channel and a residual sum, as in SENet."""

from __future__ import annotations

from caffepy.backend import Array, Channel, Each, expression
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.core.formulas import product, product_with_channel


@expression
def scaled_sum(x: Each, b: Each, a: Channel) -> Each:
    return a * x + b


@register_layer("Axpy")
class AxpyLayer(Layer):
    """y = a * x + b with one factor for each channel of each image (Hu et al. 2018; NVIDIA's `axpy_layer.cpp`).

    Shapes: a (N, C) or (N, C, 1, 1), x and b (N, C, …). da = sum of x * dy over positions, dx = a * dy, db = dy.

    Raises:
        ConfigError: the top is the first or the second bottom.
        ShapeError: the bottoms' shapes do not match.
    """

    supports_half = True
    recordable = True
    bottoms = (3, 3)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        if top[0] is bottom[0]:
            raise self.error(f"cannot work in place on its first bottom, '{bottom[0].title}'")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        a, x, b = bottom
        if len(x.shape) < 2 or a.shape[:2] != x.shape[:2] or a.count != x.shape[0] * x.shape[1]:
            raise self.shape_error("the first bottom must have one factor for each channel of the second", a, x)
        if x.shape != b.shape:
            raise self.shape_error("the second and the third bottom must have one shape", x, b)
        if top[0] is x:
            raise self.error(f"cannot work in place on its second bottom, '{x.name}', which its gradient needs")
        top[0].reshape(x.shape)

    def _factors(self, a: Array) -> Array:
        """Return the factors as (N, C) in float32."""
        rows = self.backend.flat(a).reshape(a.shape[:2])
        if self.dtype == "float32":
            return rows
        factors = self.scratch("factors", a.shape[:2]).array
        self.backend.copy(rows, factors)
        return factors

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        a, x, b = (blob.data for blob in bottom)
        self.backend.apply(scaled_sum, (x, b, self._factors(a)), (top[0].data,), 0)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        a, x, b = bottom
        if propagate_down[0]:
            sums = self.scratch("sums", a.shape[:2]).array
            self.backend.reduce(product, (x.data, top[0].diff), (sums,), 0)
            self.backend.copy(sums, self.backend.flat(a.diff).reshape(a.shape[:2]))
        if propagate_down[1]:
            self.backend.apply(product_with_channel, (top[0].diff, self._factors(a.data)), (x.diff,), 0)
        if propagate_down[2] and b is not top[0]:
            self.backend.copy(top[0].diff, b.diff)

"""SPP: spatial pyramid pooling."""

from __future__ import annotations

import math

from caffepy.backend import Array
from caffepy.blob import Blob
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.core.layout_adapter import LayoutAdapter
from caffepy.layers.vision.pooling import PoolingLayer
from caffepy.proto import caffe_pb2

_Methods = caffe_pb2.SPPParameter.PoolMethod


@register_layer("SPP")
class SPPLayer(Layer):
    """Pooling of each channel over 1, 4, 16, … windows, concatenated (He et al. 2014; Caffe's `spp_layer.cpp`).

    x is (N, C, H, W). Level l of `pyramid_height` has 2^l x 2^l windows of ceil(H / 2^l) x ceil(W / 2^l) pixels, with
    the padding that they need. y is (N, C * (4^pyramid_height - 1) / 3), level after level, or (N, C, 1, 1) for one
    level.

    Raises:
        ConfigError: pyramid_height is 0.
        ShapeError: the bottom does not have four axes of at least one pixel.
    """

    _shape: tuple[int, ...] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        if self.param.spp_param.pyramid_height < 1:
            raise self.error("spp_param.pyramid_height must be at least 1")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape, levels = bottom[0].shape, self.param.spp_param.pyramid_height
        if len(shape) != 4 or min(shape[2:]) < 1:
            raise self.shape_error("the bottom must have four axes, (N, C, H, W), of at least one pixel", bottom[0])
        if shape != self._shape:
            self._shape = shape
            self._levels = [self._make_level(bottom, number) for number in range(levels)]
            self._pooled = [Blob(self.backend, (), f"{self.name}'s level {number}") for number in range(levels)]
            # Levels after the first write their gradient here; it is added to the bottom's.
            self._gradient = Blob(self.backend, shape, bottom[0].name)
        for level, blob in zip(self._levels, self._pooled, strict=True):
            level.reshape(bottom, [blob])
        if levels == 1:
            top[0].reshape(self._pooled[0].shape)
            return
        sizes = [blob.count // max(shape[0], 1) for blob in self._pooled]
        top[0].reshape((shape[0], sum(sizes)))
        self._rows = [
            LayoutAdapter(self.backend, b.shape, (shape[0], n)) for b, n in zip(self._pooled, sizes, strict=True)
        ]

    @property
    def levels(self) -> list[tuple[PoolingLayer, Blob]]:
        """The pooling layers with their tops."""
        return list(zip(self._levels, self._pooled, strict=True))

    def _make_level(self, bottom: Blobs, number: int) -> PoolingLayer:
        param = caffe_pb2.LayerParameter(name=f"{self.name}/{number}", type="Pooling")
        pooling = param.pooling_param
        method = _Methods.Name(self.param.spp_param.pool)
        pooling.pool = caffe_pb2.PoolingParameter.PoolMethod.Value(method)  # type: ignore[assignment]
        for name, size in zip("hw", bottom[0].shape[2:], strict=True):
            kernel = math.ceil(size / 2**number)
            setattr(pooling, f"kernel_{name}", kernel)
            setattr(pooling, f"stride_{name}", kernel)
            setattr(pooling, f"pad_{name}", (kernel * 2**number - size + 1) // 2)
        level = PoolingLayer(param, self.context)
        level.setup(bottom, [Blob(self.backend)])
        return level

    def _parts(self, whole: Array) -> list[Array]:
        """Return the part of the top of each level."""
        parts, begin = [], 0
        for blob in self._pooled:
            size = blob.count // max(blob.shape[0], 1)
            parts.append(whole[:, begin : begin + size])
            begin += size
        return parts

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if len(self._levels) == 1:
            self._levels[0].forward(bottom, top)
            return
        for level, blob, rows, part in zip(
            self._levels, self._pooled, self._rows, self._parts(top[0].data), strict=True
        ):
            level.forward(bottom, [blob])
            self.backend.copy(rows.load(blob.data), part)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        if len(self._levels) == 1:
            self._levels[0].backward(top, propagate_down, bottom)
            return
        for number, part in enumerate(self._parts(top[0].diff)):
            blob, rows = self._pooled[number], self._rows[number]
            self.backend.copy(part, rows.target(blob.diff))
            rows.store(blob.diff)
            target = bottom[0] if number == 0 else self._gradient
            self._levels[number].backward([blob], propagate_down, [target])
            if number:
                self.backend.add(target.diff, bottom[0].diff)

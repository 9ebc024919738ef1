"""ChannelScale: all channels of a pixel times the second bottom's value there."""

from __future__ import annotations

from collections.abc import Sequence
from math import fabs

from caffepy.backend import Array, Each, Scalar, expression
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.formulas import product, product_with_channel, scaled
from caffepy.layers.layer import Blobs, Layer, register_layer
from caffepy.layers.layout_adapter import LayoutAdapter, flatten_pixels

KEPT = 0.99
"""Share of the old average in the new one."""


@expression
def absolute(x: Each, factor: Scalar) -> Each:
    return fabs(x) * factor


@expression
def next_average(average: Each, mean: Each, least: Scalar, most: Scalar) -> Each:
    return max(min(mean if average < 0 else KEPT * average + (1 - KEPT) * mean, most), least)


@register_layer("ChannelScale")
class ChannelScaleLayer(Layer):
    """y = x * s: all channels of a pixel have one factor (`channel_scale_layer.cu` of caffe-windows).

    Shapes: x and y (N, C), (N, C, H) or (N, C, H, W); s has N * H * W elements. dx = s * dy, or dy without
    `do_backward_feature`; ds = sum over the channels of x * dy, or 0 without `do_backward_scale`. y = x without
    `do_forward`.

    With `global_scale`, y = x * a: parameter 0 of shape (1,), initially -1. In TRAIN a becomes the mean of |s|, in
    later passes 0.99 a + 0.01 mean, kept between min_global_scale and max_global_scale. A second top (1,) holds it. As
    in the fork, dx and ds do not change.

    Raises:
        ConfigError: lr_mult of the parameter is not 0.
        ShapeError: the first bottom has fewer than two or more than four axes, or s another count.
    """

    bottoms = (2, 2)
    tops = (1, 2)
    no_gradient_tops = frozenset({1})

    _shape: tuple[int, ...] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        self._global = self.param.channel_scale_param.global_scale
        self._training = self.context.phase == caffe_pb2.TRAIN
        if not self._global:
            return
        self.add_parameter((1,), caffe_pb2.FillerParameter(type="constant", value=-1))
        specs = self.param.param
        if not specs:
            specs.add(lr_mult=0, decay_mult=0)
        if specs[0].lr_mult != 0:
            raise self.error("param 0 holds an average, which is not learned; give it lr_mult: 0")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if not 2 <= len(shape) <= 4:
            raise self.shape_error("the first bottom must have two to four axes, (N, C, H, W)", bottom[0])
        image = shape + (1,) * (4 - len(shape))
        rows = shape[0] * image[2] * image[3]
        if bottom[1].count != rows:
            raise self.shape_error(f"the second bottom must have {rows} elements, one a pixel", bottom[0], bottom[1])
        top[0].reshape(shape)
        if len(top) > 1:
            top[1].reshape((1,))
        if shape != self._shape:
            self._shape = shape
            self._x, self._y, self._dy, self._dx = (LayoutAdapter(self.backend, shape, image) for _ in range(4))
        self._s, self._ds = (LayoutAdapter(self.backend, bottom[1].shape, (rows,)) for _ in range(2))
        self._mean = self.scratch("mean", (1,))

    def running_statistics(self) -> Sequence[int]:
        return (0,) if self._global and self._training else ()

    def local_statistics(self) -> Sequence[int]:
        return self.running_statistics()

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, param = self.backend, self.param.channel_scale_param
        s = self._s.load(bottom[1].data)
        if self._global:
            self._average(s)
            if len(top) > 1:
                backend.copy(self.blobs[0].data, top[1].data)
        if not param.do_forward:
            backend.copy(bottom[0].data, top[0].data)
        elif self._global:
            backend.apply(scaled, (bottom[0].data, backend.view(self.blobs[0].data, ())), (top[0].data,))
        else:
            self._multiply(self._x.load(bottom[0].data), s, self._y.target(top[0].data))
            self._y.store(top[0].data)

    def _average(self, s: Array) -> None:
        """Update the average of |s| in TRAIN."""
        backend, param = self.backend, self.param.channel_scale_param
        if not self._training or not param.do_forward:
            return
        average = self.blobs[0].data
        backend.reduce(absolute, (s, 1 / max(s.size, 1)), (backend.view(self._mean.array, ()),))
        inputs = (average, self._mean.array, param.min_global_scale, param.max_global_scale)
        backend.apply(next_average, inputs, (average,))

    def _multiply(self, source: Array, s: Array, destination: Array) -> None:
        backend = self.backend
        rows = flatten_pixels(backend, source), flatten_pixels(backend, destination)
        backend.apply(product_with_channel, (rows[0], s), (rows[1],), 0)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        backend, param = self.backend, self.param.channel_scale_param
        dy = self._dy.load(top[0].diff)
        if propagate_down[1]:
            ds = self._ds.target(bottom[1].diff)
            if param.do_backward_scale:
                rows = (flatten_pixels(backend, array) for array in (self._x.load(bottom[0].data), dy))
                backend.reduce(product, tuple(rows), (ds,), 0)
            else:
                backend.fill(ds, 0)
            self._ds.store(bottom[1].diff)
        if not propagate_down[0]:
            return
        if param.do_backward_feature:
            self._multiply(dy, self._s.load(bottom[1].data), self._dx.target(bottom[0].diff))
            self._dx.store(bottom[0].diff)
        else:
            backend.copy(top[0].diff, bottom[0].diff)

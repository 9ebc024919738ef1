"""ChannelScale, one factor for all channels of a pixel, and Local, a convolution with other weights at each position.

The factor of ChannelScale is the second bottom's value at the pixel.
"""

from __future__ import annotations

from collections.abc import Sequence

from caffepy.backend import Array, Each, Geometry, Scalar, expression
from caffepy.backend.formulas import (
    identity,
    product,
    product_with_channel,
    scaled,
    scaled_magnitude,
    total_with_channel,
)
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.convolution import window_map
from caffepy.layers.layer import Blobs, Layer, LayoutAdapter, flatten_pixels, register_layer

KEPT = 0.99
"""Share of the old average in the new one."""


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
        backend.reduce(scaled_magnitude, (s, 1 / max(s.size, 1)), (backend.view(self._mean.array, ()),))
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


@register_layer("Local")
class LocalLayer(Layer):
    """y[n, m, p] = sum over k of weights[m, k, p] * window[n, k, p] + bias[m, p].

    Shapes: x (N, C, H, W), y (N, num_output, (H + 2 pad - kernel_size) / stride + 1, ...), weights (num_output, 1,
    C * kernel_size^2, P) for P positions, bias (1, 1, num_output, P) unless `bias_term` is false. Elements outside the
    image are 0 (`local_layer.cpp` of caffeBVLCplus; LeCun 1989).

    Raises:
        ConfigError: num_output or kernel_size is missing, or stride is 0.
        ShapeError: the bottom is no image, is smaller than the window, or has another size than the weights.
    """

    learns = True

    _shape: tuple[int, ...] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.param.local_param
        for name in ("num_output", "kernel_size", "stride"):
            if getattr(param, name) < 1:
                raise self.error(f"local_param.{name} must be at least 1")
        self._image = self._check_image(bottom)
        channels, positions = self._image[0], self._positions[0] * self._positions[1]
        size = channels * param.kernel_size**2
        self.check_memory(4 * param.num_output * size * positions, "its weights")
        self.add_parameter((param.num_output, 1, size, positions), param.weight_filler)
        if param.bias_term:
            self.add_parameter((1, 1, param.num_output, positions), param.bias_filler)

    def _check_image(self, bottom: Blobs) -> tuple[int, ...]:
        param, shape = self.param.local_param, bottom[0].shape
        if len(shape) != 4 or min(shape[2:]) < param.kernel_size:
            raise self.shape_error(f"the bottom must be (N, C, H, W), H and W from {param.kernel_size} on", bottom[0])
        self._positions = [(side + 2 * param.pad - param.kernel_size) // param.stride + 1 for side in shape[2:]]
        return shape[1:]

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, shape, backend = self.param.local_param, bottom[0].shape, self.backend
        if self._check_image(bottom) != self._image:
            raise self.shape_error("the weights belong to images of another size", bottom[0], self.blobs[0])
        outputs, _, size, positions = self.blobs[0].shape
        samples, channels = shape[:2]
        top[0].reshape((samples, outputs, *self._positions))
        if shape != self._shape:
            self._shape = shape
            sides = ((param.kernel_size,) * 2, (param.stride,) * 2, (param.pad,) * 2, (1, 1))
            pixels = (samples, channels, shape[2] * shape[3])
            self._x, self._dx = (LayoutAdapter(backend, shape, pixels) for _ in range(2))
            columns = (samples, outputs, positions)
            self._y, self._dy = (LayoutAdapter(backend, top[0].shape, columns) for _ in range(2))
            self._map = window_map(backend, Geometry(*sides), shape[2:], tuple(self._positions))
        shapes = {
            "windows": (samples, channels, param.kernel_size**2 * positions),
            "columns": (positions, samples, size),
        }
        shapes |= {"weights": (positions, outputs, size), "products": (positions, samples, outputs)}
        self._buffers = {name: self.scratch(name, wanted) for name, wanted in shapes.items()}

    @property
    def _count(self) -> int:
        """Positions."""
        return self.blobs[0].shape[3]

    def _buffer(self, name: str) -> Array:
        return self._buffers[name].array

    def _load_windows(self, x: Array) -> Array:
        """Return the windows of each position, (P, N, K)."""
        windows, columns = self._buffer("windows"), self._buffer("columns")
        self._map.forward(x, windows)
        positions, samples, size = columns.shape
        self.backend.copy(windows.reshape(samples, size, positions).transpose(2, 0, 1), columns)
        return columns

    def _load_weights(self) -> Array:
        """Return the weights of each position, (P, num_output, K)."""
        weights = self._buffer("weights")
        self.backend.copy(self._own_order(self.blobs[0].data), weights)
        return weights

    def _own_order(self, parameter: Array) -> Array:
        """Return a view of the weights or their gradient as (P, num_output, K)."""
        outputs, _, size, positions = self.blobs[0].shape
        return self.backend.flat(parameter).reshape(outputs, size, positions).transpose(2, 0, 1)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, products = self.backend, self._buffer("products")
        columns, weights = self._load_windows(self._x.load(bottom[0].data)), self._load_weights()
        for position in range(self._count):
            backend.gemm(columns[position], weights[position], products[position], transpose_b=True)
        y = self._y.target(top[0].data)
        backend.copy(products.transpose(1, 2, 0), y)
        if self.param.local_param.bias_term:
            rows = backend.flat(y).reshape(y.shape[0], -1)
            backend.apply(total_with_channel, (rows, backend.flat(self.blobs[1].data)), (rows,))
        self._y.store(top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        backend, products = self.backend, self._buffer("products")
        dy = self._dy.load(top[0].diff)
        if self.param.local_param.bias_term and self.propagate_to_params[1]:
            rows = backend.flat(dy).reshape(dy.shape[0], -1)
            backend.reduce(identity, (rows,), (backend.flat(self.blobs[1].diff),), 1, self.accumulate(1))
        backend.copy(dy.transpose(2, 0, 1), products)
        if self.propagate_to_params[0]:
            self._propagate_to_weights(products, self._load_windows(self._x.load(bottom[0].data)))
        if propagate_down[0]:
            columns, windows = self._buffer("columns"), self._buffer("windows")
            weights = self._load_weights()
            for position in range(self._count):
                backend.gemm(products[position], weights[position], columns[position])
            positions, samples, size = columns.shape
            backend.copy(columns.transpose(1, 2, 0), windows.reshape(samples, size, positions))
            self._map.backward(windows, self._dx.target(bottom[0].diff))
            self._dx.store(bottom[0].diff)

    def _propagate_to_weights(self, products: Array, columns: Array) -> None:
        backend, gradients = self.backend, self._buffer("weights")
        for position in range(self._count):
            backend.gemm(products[position], columns[position], gradients[position], transpose_a=True)
        move = backend.add if self.accumulate(0) else backend.copy
        move(gradients, self._own_order(self.blobs[0].diff))

"""Convolution, Deconvolution and Im2col, and their common base (Caffe's `base_conv_layer.cpp`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from caffepy.backend import Array, Backend, Convolution, Geometry
from caffepy.backend.formulas import identity, total_with_channel
from caffepy.backend.types import NormalisedBottom, NormalisedForward, NormalisedGradients
from caffepy.formats.blobs import MAX_ELEMENTS, format_shape
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.layer import Blobs, Layer, LayoutAdapter, ZeroPadded, register_layer
from caffepy.layers.spatial_map import SpatialMap

Shape = tuple[int, ...]

OF_OTHER_TYPES = {
    **dict.fromkeys(("kernel_shape", "stride_shape", "pad_shape"), "NdConvolution"),
    "type": "ConvLSTM",
}
"""Settings of ConvolutionParameter that only types of forks read."""

LARGEST_KERNEL = 2**14
"""Limit of the kernel's size along an axis: the time to plan a convolution grows with it."""
LARGEST_WINDOWS = 2**36
"""Limit of the elements of an image's windows, which are never all in memory: a short prototxt may ask for hours."""


class EmptyConvolution:
    """A `Convolution` for a batch of 0 images: it only sets the weights' gradient to 0."""

    gives_sums = False
    forward_normalised = None
    backward_normalised = None

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def forward(
        self, x: Array, weights: Array, bias: Array | None, y: Array, relu: bool = False, sums: Array | None = None
    ) -> None:
        """Does nothing: y is empty."""

    def backward_data(self, dy: Array, weights: Array, dx: Array) -> None:
        """Does nothing: dx is empty."""

    def backward_weights(self, x: Array, dy: Array, dweights: Array, accumulate: bool) -> None:
        """dweights = 0, unless `accumulate`."""
        if not accumulate:
            self._backend.fill(dweights, 0.0)


class Operand:
    """Presents a blob's arrays in the shape of a convolution plan: (N, C, spatial...), with zeros at the end of axes.

    Args:
        backend: of the arrays.
        shape: of the blob.
        planned: (N, C, spatial...), of the same count.
        padded: `planned` with the zeros.
        dtype: of the elements.
    """

    def __init__(self, backend: Backend, shape: Shape, planned: Shape, padded: Shape, dtype: str) -> None:
        self.is_same = shape == padded
        """Whether the plan takes the blob's arrays unchanged."""
        self._adapter = LayoutAdapter(backend, shape, planned, dtype)
        self._padded = ZeroPadded(backend, planned, padded, dtype)

    def load(self, array: Array) -> Array:
        """Return the array in the shape of the plan. A later `load` overwrites a copy."""
        return array if self.is_same else self._padded.load(self._adapter.load(array))

    def target(self, array: Array) -> Array:
        return array if self.is_same else self._padded.target(self._adapter.target(array))

    def store(self, array: Array) -> None:
        """Copy `target(array)` to `array`. Does nothing if they share memory."""
        if not self.is_same:
            self._padded.store(self._adapter.target(array))
            self._adapter.store(array)


def beyond_padding(geometry: Geometry, image: Shape, windows: Shape) -> Shape:
    """Return how far the last window of each spatial axis reaches beyond the padding.

    Caffe gives a kernel larger than the padded image one window where the stride is large enough; it reads zeros there.
    """
    g = geometry
    sizes = zip(image, windows, g.kernel, g.stride, g.pad, g.dilation, strict=True)
    return tuple(max((n - 1) * by + d * (k - 1) + 1 - size - 2 * pad, 0) for size, n, k, by, pad, d in sizes)


class BaseConvolutionLayer(Layer):
    """Reads the prototxt, makes the parameters and plans the convolution.

    Shapes: (batch axes..., C, spatial axes...) with the channels at `axis` and any number of spatial axes, also none.
    All bottoms have one shape and share the parameters: weights (out, in / group, kernel...), bias (num_output,) unless
    bias_term is false. DeepLab's `hole`, `hole_h` and `hole_w` are other names of `dilation`. `engine`,
    `force_nd_im2col` and NVIDIA's cuDNN settings change no result and are ignored.

    Raises:
        ConfigError: a setting is missing, 0, contradictory or beyond its limit.
        ShapeError: the channels do not divide into groups, or kernel, stride and padding do not fit the bottom.
    """

    supports_half = True
    learns = True

    bottoms = (1, None)
    tops = (1, None)
    equal_bottoms_and_tops = True

    axis: int
    """Index of the channels' axis."""
    _plan: Convolution
    _plan_shape: Shape | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.settings
        for name in filter(param.HasField, OF_OTHER_TYPES):
            raise self.error(f"{name} is a setting of {OF_OTHER_TYPES[name]}; remove it, or change the type")
        shape = bottom[0].shape
        self.axis = bottom[0].axis(param.axis, self.where)
        self._geometry = self._read_geometry(len(shape) - self.axis - 1)
        self._check_channels(bottom)
        self.add_parameter(self._weights_shape(shape[self.axis]), param.weight_filler)
        if param.bias_term:
            self.add_parameter((param.num_output,), param.bias_filler)

    @property
    def settings(self) -> caffe_pb2.ConvolutionParameter:
        """Those of the prototxt."""
        return self.param.convolution_param

    @property
    def geometry(self) -> Geometry:
        """Kernel, stride, pad and dilation for each spatial axis, and the number of groups."""
        return self._geometry

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape, axes = bottom[0].shape, len(self._geometry.kernel)
        if len(shape) != self.axis + 1 + axes or shape[self.axis] != self._channels:
            raise self.shape_error(
                f"the weights need {self._channels} channels at axis {self.axis} and {axes} spatial axes",
                bottom[0],
                self.blobs[0],
            )
        for other in bottom[1:]:
            if other.shape != shape:
                raise self.shape_error("all bottoms must have one shape", bottom[0], other)
        sizes = self._spatial(bottom)
        for blob in top:
            blob.reshape((*shape[: self.axis], self.settings.num_output, *sizes))
        if self._plan_shape != shape:
            self._plan_for(shape, top[0].shape)
            self._plan_shape = shape

    def _plan_for(self, bottom: Shape, top: Shape) -> None:
        x, y = self._planned(bottom), self._planned(top)
        padded = (*x[:2], *map(self._needed_size, x[2:], range(len(x))))
        self._check_size(x, y)
        self._plan = self._make_plan(padded, y) if x[0] else EmptyConvolution(self.backend)
        self._x, self._dx = (Operand(self.backend, bottom, x, padded, self.dtype) for _ in range(2))
        self._y = Operand(self.backend, top, y, y, self.dtype)

    def _check_size(self, bottom: Shape, top: Shape) -> None:
        """Check the size of the padded image and the work of one image."""
        g = self._planned_geometry
        image, windows = self._directed(bottom, top)
        padded = (image[1], *(size + 2 * pad for size, pad in zip(image[2:], g.pad, strict=True)))
        columns = (image[1] // g.group, *g.kernel, *windows[2:])
        limits = (("padded image", padded, MAX_ELEMENTS), ("windows of an image", columns, LARGEST_WINDOWS))
        for what, shape, limit in limits:
            if math.prod(shape) > limit:
                raise self.shape_error(
                    f"kernel {g.kernel}, pad {g.pad} and stride {g.stride} make the {what} {format_shape(shape)}; at "
                    f"most {limit} elements are possible, so use a smaller kernel or pad, or a larger stride"
                )

    def _directed(self, bottom: Shape, top: Shape) -> tuple[Shape, Shape]:
        """Return the shapes of image and windows of the planned convolution: Deconvolution swaps bottom and top."""
        return bottom, top

    def _planned(self, shape: Shape) -> Shape:
        """Return the plan's (N, C, spatial...): batch axes joined, and 1 x 1 pixel if there are no spatial axes."""
        return (math.prod(shape[: self.axis]), shape[self.axis], *(shape[self.axis + 1 :] or (1, 1)))

    @property
    def _planned_geometry(self) -> Geometry:
        g = self._geometry
        return g if g.kernel else replace(g, kernel=(1, 1), stride=(1, 1), pad=(0, 0), dilation=(1, 1))

    @property
    def _filter_shape(self) -> Shape:
        """The weights' shape in the plan."""
        shape = self.blobs[0].shape
        return shape if len(shape) > 2 else (*shape, 1, 1)

    def _filters(self, weights: Array) -> Array:
        """Return the weights, or their gradient, in the shape of the plan."""
        if len(weights.shape) > 2:
            return weights
        return self.backend.view(self.backend.flat(weights), self._filter_shape)

    # -- overridden by Convolution and Deconvolution -------------------------------------------------

    def _weights_shape(self, channels: int) -> Shape:
        raise NotImplementedError

    def _output_size(self, size: int, axis: int) -> int:
        raise NotImplementedError

    def _needed_size(self, size: int, axis: int) -> int:
        """Return the image's size along a spatial axis with the zeros that the windows read beyond the padding."""
        return size

    def _make_plan(self, bottom: Shape, top: Shape) -> Convolution:
        raise NotImplementedError

    # -- shared --------------------------------------------------------------------------------------

    def _spatial(self, bottom: Blobs) -> Shape:
        sizes = tuple(self._output_size(size, i) for i, size in enumerate(bottom[0].shape[self.axis + 1 :]))
        if min(sizes, default=1) < 1:
            g = self._geometry
            raise self.shape_error(
                f"kernel {g.kernel} with stride {g.stride}, pad {g.pad} and dilation {g.dilation} leaves a spatial "
                f"output of {sizes}; use a smaller kernel or more padding",
                bottom[0],
            )
        return sizes

    def _check_channels(self, bottom: Blobs) -> None:
        param = self.settings
        self._channels = bottom[0].shape[self.axis]
        if param.num_output < 1:
            raise self.error("convolution_param needs num_output")
        if self._channels < 1:
            raise self.shape_error("the bottom has no channels", bottom[0])
        if param.group < 1 or self._channels % param.group or param.num_output % param.group:
            raise self.shape_error(
                f"group {param.group} must divide both the {self._channels} input channels and num_output "
                f"{param.num_output}",
                bottom[0],
            )

    def _read_geometry(self, axes: int) -> Geometry:
        param = self.settings
        geometry = Geometry(
            kernel=self._per_axis("kernel", param.kernel_size, "kernel_size", axes, None),
            stride=self._per_axis("stride", param.stride, "stride", axes, 1),
            pad=self._per_axis("pad", param.pad, "pad", axes, 0),
            dilation=self._dilation(axes),
            group=param.group,
        )
        for what in ("kernel", "stride", "dilation"):
            if min(getattr(geometry, what), default=1) < 1:
                raise self.error(f"{what} is {getattr(geometry, what)}; no entry may be 0")
        if max(geometry.kernel, default=1) > LARGEST_KERNEL:
            raise self.error(f"kernel is {geometry.kernel}; at most {LARGEST_KERNEL} along an axis are possible")
        return geometry

    def _per_axis(
        self, stem: str, values: Sequence[int], field: str, axes: int, default: int | None
    ) -> tuple[int, ...]:
        """Return a setting for each spatial axis, from `<stem>_h` and `<stem>_w` or from the repeated `field`."""
        param = self.settings
        if not (param.HasField(f"{stem}_h") or param.HasField(f"{stem}_w")):
            return self._one_per_axis(values, field, axes, default)
        if axes != 2:
            raise self.error(f"{stem}_h and {stem}_w are for two spatial axes, but here are {axes}; use {field}")
        if values:
            raise self.error(f"give either {field} or {stem}_h and {stem}_w, not both")
        return (getattr(param, f"{stem}_h"), getattr(param, f"{stem}_w"))

    def _dilation(self, axes: int) -> tuple[int, ...]:
        """Return `dilation`, or what DeepLab's `hole`, `hole_h` and `hole_w` say."""
        param = self.param.convolution_param
        holes = [name for name in ("hole", "hole_h", "hole_w") if param.HasField(name)]
        if holes and param.dilation:
            raise self.error(f"give either dilation or DeepLab's {holes[0]}, not both")
        if not holes:
            return self._one_per_axis(param.dilation, "dilation", axes, 1)
        if param.HasField("hole_h") != param.HasField("hole_w") or (len(holes) > 1 and param.HasField("hole")):
            raise self.error("give either hole, or both hole_h and hole_w")
        if axes != 2:
            raise self.error(f"{holes[0]} is for two spatial axes; the bottom has {axes}")
        return (param.hole, param.hole) if param.HasField("hole") else (param.hole_h, param.hole_w)

    def _one_per_axis(self, values: Sequence[int], field: str, axes: int, default: int | None) -> tuple[int, ...]:
        """Expand a repeated field: given once, once for each spatial axis, or not at all if it has a default."""
        if not values and default is not None:
            return (default,) * axes
        if len(values) == 1:
            return (values[0],) * axes
        if len(values) != axes:
            raise self.error(f"{field} is given {len(values)} times, but must be once, or once for each of {axes} axes")
        return tuple(values)

    def _bias_gradient(self, blob_diffs: list[object]) -> None:
        """Sum the tops' diffs over all axes but the channels'."""
        if self.settings.bias_term and self.propagate_to_params[1]:
            for diff in blob_diffs:
                dy = self._y.load(diff)
                self.backend.reduce(identity, (dy,), (self.blobs[1].diff,), accumulate=self.accumulate(1))


@register_layer("Convolution")
class ConvolutionLayer(BaseConvolutionLayer):
    """y = cross-correlation of x and the weights, + bias (Caffe's `conv_layer.cpp`).

    Shapes: x (N, C, H, W), weights (num_output, C / group, kernel_h, kernel_w), bias (num_output,),
    y (N, num_output, H', W'); with other numbers of axes accordingly. The output size along an axis is
    (size + 2 pad - (dilation (kernel - 1) + 1)) / stride + 1. The quotient is rounded towards 0 as in C++: a kernel
    that exceeds the padded image by less than the stride has one window, with zeros beyond the image.
    """

    recordable = True

    def _weights_shape(self, channels: int) -> Shape:
        param = self.settings
        return (param.num_output, channels // param.group, *self._geometry.kernel)

    def _span(self, size: int, axis: int) -> int:
        """Return the padded size less the window's; negative if the window exceeds the padded image."""
        g = self._geometry
        return size + 2 * g.pad[axis] - (g.dilation[axis] * (g.kernel[axis] - 1) + 1)

    def _output_size(self, size: int, axis: int) -> int:
        span, stride = self._span(size, axis), self._geometry.stride[axis]
        return (span // stride if span >= 0 else -(-span // stride)) + 1

    def _needed_size(self, size: int, axis: int) -> int:
        return size + max(0, -self._span(size, axis)) if self._geometry.kernel else size

    def _make_plan(self, bottom: Shape, top: Shape) -> Convolution:
        return self.backend.plan_convolution(bottom, self._filter_shape, self._planned_geometry, self.dtype)

    @property
    def plan(self) -> Convolution:
        """The plan for the current shapes."""
        return self._plan

    @property
    def bias(self) -> Array | None:
        """The bias, or None."""
        return self.blobs[1].data if self.settings.bias_term else None

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        for x, y in zip(bottom, top, strict=True):
            self.compute(x, y)

    def compute(self, x: Blob, y: Blob, relu: bool = False, sums: Array | None = None) -> None:
        """Compute the top's data with an optional fused ReLU, and the channel sums of `Convolution.forward`."""
        weights, out = self._filters(self.weights()), self._y.target(y.data)
        self._plan.forward(self._x.load(x.data), weights, self.bias, out, relu=relu, sums=sums)
        self._y.store(y.data)

    def convolve(
        self, x: Blob, y: Blob, weights: Array | None, bias: Array | None, residual: Array | None, relu: bool
    ) -> None:
        """Compute the top's data with folded weights and bias, residual sum and ReLU (weights None: the layer's)."""
        filters = self._filters(self.weights() if weights is None else weights)
        image, out = self._x.load(x.data), self._y.target(y.data)
        if residual is None:
            self._plan.forward(image, filters, bias, out, relu=relu)
        else:
            self.backend.convolve_and_add(self._plan, image, filters, bias, residual, out, relu)
        self._y.store(y.data)

    def keep_weights(self, weights: Array, given: Array | None = None) -> bool:
        """Let the plan cache transformed `weights`, which must not change; `convolve` receives `given` in their place.

        Args:
            weights: the weights to transform.
            given: the array that `convolve` will receive; None: `weights`.

        Returns:
            Whether the plan caches them. A bottom of another shape makes a new plan without the cache.
        """
        if self._plan_shape is None:
            return False
        stand_in = None if given is None else self._filters(given)
        return self.backend.keep_weights(self._plan, self._filters(weights), stand_in)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        self._bias_gradient([y.diff for y in top])
        for x, y, down in zip(bottom, top, propagate_down, strict=True):
            self.propagate(x, y.diff, down)

    @property
    def gradients(self) -> NormalisedGradients | None:
        """The plan's fused computation of the gradients of weights and bottom, or None."""
        return self._plan.backward_normalised if self._x.is_same and self.propagate_to_params[0] else None

    def compute_normalised(
        self, forward: NormalisedForward, bottom: NormalisedBottom, y: Blob, sums: Array | None
    ) -> None:
        """Compute the top's data and channel sums by `forward`, which normalises the bottom as it reads it."""
        forward(bottom, self._filters(self.weights()), self._y.target(y.data), sums)
        self._y.store(y.data)

    def propagate_normalised(
        self, gradients: NormalisedGradients, bottom: NormalisedBottom, dy: Array, dx: Array
    ) -> None:
        """Compute the gradients of the weights, of the bottom and of the bottom's normalisation by `gradients`."""
        filters, dweights = self._filters(self.weights()), self._filters(self.blobs[0].diff)
        gradients(bottom, self._y.load(dy), filters, dx, dweights, self.accumulate(0))

    def propagate(self, x: Blob, dy: Array, down: bool) -> None:
        """Compute the gradients of the weights and, with `down`, of the bottom from the top's diff `dy`."""
        dy = self._y.load(dy)
        if self.propagate_to_params[0]:
            dweights = self._filters(self.blobs[0].diff)
            self._plan.backward_weights(self._x.load(x.data), dy, dweights, self.accumulate(0))
        if down:
            self._plan.backward_data(dy, self._filters(self.weights()), self._dx.target(x.diff))
            self._dx.store(x.diff)


@register_layer("Deconvolution")
class DeconvolutionLayer(BaseConvolutionLayer):
    """Transposed convolution: y is the data gradient of a convolution with output gradient x (`deconv_layer.cpp`).

    Shapes: x (N, C, H, W), weights (C, num_output / group, kernel_h, kernel_w), y (N, num_output, H', W'); with other
    numbers of axes accordingly. The output size along an axis is
    stride (size - 1) + dilation (kernel - 1) + 1 - 2 pad.
    """

    recordable = True

    def _weights_shape(self, channels: int) -> Shape:
        param = self.settings
        return (channels, param.num_output // param.group, *self._geometry.kernel)

    def _output_size(self, size: int, axis: int) -> int:
        g = self._geometry
        return g.stride[axis] * (size - 1) + g.dilation[axis] * (g.kernel[axis] - 1) + 1 - 2 * g.pad[axis]

    def _directed(self, bottom: Shape, top: Shape) -> tuple[Shape, Shape]:
        return top, bottom

    def _make_plan(self, bottom: Shape, top: Shape) -> Convolution:
        return self.backend.plan_convolution(top, self._filter_shape, self._planned_geometry, self.dtype)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        for x, y in zip(bottom, top, strict=True):
            out = self._y.target(y.data)
            self._plan.backward_data(self._x.load(x.data), self._filters(self.weights()), out)
            if self.settings.bias_term:
                self.backend.apply(total_with_channel, (out, self.blobs[1].data), (out,))
            self._y.store(y.data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        self._bias_gradient([y.diff for y in top])
        for x, y, needs_gradient in zip(bottom, top, propagate_down, strict=True):
            dy = self._y.load(y.diff)
            if self.propagate_to_params[0]:
                dweights = self._filters(self.blobs[0].diff)
                self._plan.backward_weights(dy, self._x.load(x.data), dweights, self.accumulate(0))
            if needs_gradient:
                self._plan.forward(dy, self._filters(self.weights()), None, self._dx.target(x.diff))
                self._dx.store(x.diff)


@register_layer("Im2col")
class Im2colLayer(BaseConvolutionLayer):
    """y[n, c * K + k, window] = element k of the window of channel c, 0 in the padding (Caffe's `im2col_layer.cpp`).

    Shapes: x (batch axes…, C, spatial…) with the channels at `axis`, y (batch axes…, C * K, windows…), where K is the
    number of elements of a window. It reads kernel, stride, pad and dilation of `convolution_param` for any number of
    spatial axes, and has no parameters.

    Raises:
        ShapeError: there are no spatial axes after `axis`, or their number changes.
    """

    supports_half = False
    learns = False
    bottoms = (1, 1)  # type: ignore[assignment]
    tops = (1, 1)  # type: ignore[assignment]

    _shape: Shape | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        self.axis = bottom[0].axis(self.param.convolution_param.axis, self.where)
        axes = len(bottom[0].shape) - self.axis - 1
        if axes < 1:
            raise self.shape_error(f"there must be spatial axes after axis {self.axis}", bottom[0])
        self._geometry = self._read_geometry(axes)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape, g, axis = bottom[0].shape, self._geometry, self.axis
        if len(shape) != axis + 1 + len(g.kernel):
            raise self.shape_error(f"the bottom must keep its {len(g.kernel)} spatial axes", bottom[0])
        sizes, elements = self._spatial(bottom), math.prod(g.kernel)
        top[0].reshape((*shape[:axis], shape[axis] * elements, *sizes))
        if shape != self._shape:
            self._shape = shape
            x = (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))
            y = (*x[:2], elements * math.prod(sizes))
            self._image, self._image_diff = (LayoutAdapter(self.backend, shape, x) for _ in range(2))
            self._columns, self._column_diffs = (LayoutAdapter(self.backend, top[0].shape, y) for _ in range(2))
            self._map = window_map(self.backend, g, shape[axis + 1 :], sizes)

    def _output_size(self, size: int, axis: int) -> int:
        g = self._geometry
        span = size + 2 * g.pad[axis] - (g.dilation[axis] * (g.kernel[axis] - 1) + 1)
        # Rounded towards 0 as in C++.
        return (span // g.stride[axis] if span >= 0 else -(-span // g.stride[axis])) + 1

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self._map.forward(self._image.load(bottom[0].data), self._columns.target(top[0].data))
        self._columns.store(top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self._map.backward(self._column_diffs.load(top[0].diff), self._image_diff.target(bottom[0].diff))
            self._image_diff.store(bottom[0].diff)


def window_map(backend: Backend, g: Geometry, image: Shape, windows: Shape) -> SpatialMap:
    """Return the map from the pixels of an image to (element of the window, window)."""
    indices = np.indices((*g.kernel, *windows)).reshape(2 * len(image), -1)
    pixel, inside = np.zeros(indices.shape[1], np.int64), np.ones(indices.shape[1], bool)
    for axis, size in enumerate(image):
        at = indices[axis] * g.dilation[axis] + indices[len(image) + axis] * g.stride[axis] - g.pad[axis]
        inside &= (at >= 0) & (at < size)
        pixel = pixel * size + at
    rows = np.flatnonzero(inside)
    return SpatialMap(backend, (len(pixel), math.prod(image)), rows, pixel[rows])

"""Pooling over windows of the spatial axes, and spatial pyramids of it (Caffe's `pooling_layer.cpp`, SPP)."""

from __future__ import annotations

import math

from caffepy.backend import Array, Each, Geometry, expression
from caffepy.backend.formulas import squared
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.layer import Blobs, Layer, LayoutAdapter, ScratchBuffer, register_layer
from caffepy.layers.window_pooling import WindowPooling

_Parameter = caffe_pb2.PoolingParameter

LARGEST_SETTING = 2**32 - 1
"""Limit of the settings of an axis: that of kernel_size, stride and pad."""


@expression
def weighted(squares: Each, total: Each) -> Each:
    return squares / total if total > 0 else 0.0


@expression
def weighted_slopes(squares: Each, total: Each, dy: Each) -> tuple[Each, Each]:
    slope = dy / total if total > 0 else 0.0
    return slope, (slope * squares / total if total > 0 else 0.0)


@expression
def weighted_gradient(x: Each, slope: Each, share: Each) -> Each:
    return 2 * x * slope - share


@register_layer("Pooling")
class PoolingLayer(Layer):
    """The maximum, the average or a random element of each window of x (Caffe's `pooling_layer.cpp`).

    x is (N, C, H, W), or (N, C, spatial…) as in forks that pool over any number of axes: BVLC's branch opencl, 3D-Caffe
    and video-caffe. The settings of its axes are kernel_size or kernel_h and kernel_w, or for each axis kernel_shape,
    or kernel_size several times; stride, pad likewise. An element of a window is `dilation` after the one before it.

    Output size along an axis: ceil((size + 2 pad - (dilation (kernel - 1) + 1)) / stride) + 1, or floor with
    `round_mode: FLOOR` or, in prototxts of forks, `ceil_mode: false`. With padding of any axis, a last window that
    would begin at or past size + pad is dropped. AVE divides by the number of the window's elements, with those in the
    padding up to size + pad. STOCHASTIC draws an element with a probability in proportion to its value in TRAIN; in
    TEST y = sum of x^2 / sum of x, 0 if the sum of x is not positive (Zeiler and Fergus 2013).

    An optional second top of MAX holds the index h * W + w of the maximum. That and STOCHASTIC need two axes without
    dilation.

    Raises:
        ConfigError: settings are missing, 0 or contradictory, or STOCHASTIC has padding.
        ShapeError: the bottom has no spatial axis, or a window holds no pixel.
    """

    supports_half = True
    recordable = True
    keeps_labels = True

    tops = (1, 2)
    float32_tops_from = 1
    _windows: WindowPooling
    _mask: ScratchBuffer
    _planned: tuple[object, ...] = ()

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.settings
        self._is_max = param.pool == _Parameter.MAX
        self._is_stochastic = param.pool == _Parameter.STOCHASTIC
        if len(top) > 1 and not self._is_max:
            raise self.error("only pool: MAX has a second top, the mask")
        self._check_settings()
        self._geometry = self._read_geometry(bottom)
        if self._is_stochastic and any(self._geometry.pad):
            raise self.error("pool: STOCHASTIC has no padding; remove pad, or use MAX or AVE")
        if (self._is_stochastic or len(top) > 1) and (len(self._geometry.pad) != 2 or max(self._geometry.dilation) > 1):
            what = "a second top, the mask," if self._is_max else "pool: STOCHASTIC"
            raise self.error(f"{what} needs a bottom (N, C, H, W) and no dilation")

    @property
    def settings(self) -> caffe_pb2.PoolingParameter:
        """Those of the prototxt."""
        return self.param.pooling_param

    def _check_settings(self) -> None:
        param = self.settings
        floor = param.round_mode == _Parameter.FLOOR
        if param.HasField("ceil_mode") and param.HasField("round_mode") and param.ceil_mode == floor:
            raise self.error("ceil_mode and round_mode contradict each other; keep one of them")
        self._ceil = param.ceil_mode and not floor
        one = param.HasField("kernel_size") + param.HasField("kernel_shape")
        both = param.HasField("kernel_h") and param.HasField("kernel_w")
        if param.global_pooling:
            if param.HasField("kernel_size") or param.HasField("kernel_h") or param.HasField("kernel_w"):
                raise self.error("global_pooling takes the whole image; remove the kernel's size")
        elif one + both != 1:
            raise self.error(
                "give the window as kernel_size, or as kernel_h and kernel_w, or for other numbers of axes as "
                "kernel_shape"
            )
        for name in ("stride", "pad"):
            some = param.HasField(f"{name}_h") or param.HasField(f"{name}_w")
            if some + param.HasField(name) + param.HasField(f"{name}_shape") > 1:
                raise self.error(f"give either {name} or {name}_h and {name}_w, or {name}_shape, not several of them")
            if some and not (param.HasField(f"{name}_h") and param.HasField(f"{name}_w")):
                raise self.error(f"{name}_h and {name}_w are needed together")

    def _per_axis(self, name: str, one: int, axes: int) -> tuple[int, ...]:
        """Return a setting of each spatial axis; `one`: that of all axes if it is not given for each."""
        param = self.settings
        if param.HasField(f"{name}_h"):
            if axes != 2:
                raise self.error(f"{name}_h and {name}_w are for two spatial axes, but here are {axes}")
            values = [getattr(param, f"{name}_h"), getattr(param, f"{name}_w")]
        else:
            values = list(getattr(param, f"{name}_shape").dim) or [one]
        return self._for_each(name, values, axes)

    def _for_each(self, name: str, values: list[int], axes: int) -> tuple[int, ...]:
        """Check the values of a setting, which are one or one for each axis, and return those of each axis."""
        if len(values) not in (1, axes):
            raise self.error(f"{name} is given for {len(values)} axes, but here are {axes} spatial axes")
        values = values * (axes // len(values))
        if min(values) < (name != "pad") or max(values) > LARGEST_SETTING:
            raise self.error(
                f"{name} is {tuple(values)}; no entry may be "
                f"{'below 0' if name == 'pad' else '0'} or above {LARGEST_SETTING}"
            )
        return tuple(values)

    def _read_geometry(self, bottom: Blobs) -> Geometry:
        shape, param = bottom[0].shape, self.settings
        axes = len(shape) - 2
        if axes < 1:
            raise self.shape_error("the bottom must have spatial axes: (N, C, H, W), or another number", bottom[0])
        stride, pad = self._per_axis("stride", param.stride, axes), self._per_axis("pad", param.pad, axes)
        dilation = self._for_each("dilation", list(param.dilation) or [1], axes)
        if param.global_pooling:
            kernel = shape[2:]
            if any(pad) or max(stride) > 1 or max(dilation) > 1:
                raise self.error("global_pooling goes with pad 0 and stride 1 only, and without dilation")
        else:
            kernel = self._per_axis("kernel", param.kernel_size, axes)
        reach = tuple(by * (size - 1) + 1 for size, by in zip(kernel, dilation, strict=True))
        if any(own and own >= size for own, size in zip(pad, reach, strict=True)):
            raise self.error(f"pad {pad} must be smaller than the kernel {reach}")
        return Geometry(kernel, stride, pad, dilation)

    @property
    def geometry(self) -> Geometry:
        """Kernel, stride, pad and dilation along the axes. With global_pooling the kernel has the image's size."""
        return self._geometry

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self._geometry = geometry = self._read_geometry(bottom)
        sizes = tuple(self._output_size(size, axis) for axis, size in enumerate(bottom[0].shape[2:]))
        self._check_windows(bottom, sizes)
        shape = (*bottom[0].shape[:2], *sizes)
        for blob in top:
            blob.reshape(shape)
        if self._is_stochastic:
            self._mask = self.scratch("mask", shape, "int32")
        elif self._planned != (bottom[0].shape, geometry):
            self._windows = WindowPooling(self, bottom[0].shape, shape, geometry, self._is_max, len(top) > 1)
            self._planned = (bottom[0].shape, geometry)

    def _check_windows(self, bottom: Blobs, sizes: tuple[int, ...]) -> None:
        """Check that each window holds a pixel. (For an empty one Caffe computes -FLT_MAX and writes out of bounds.)"""
        g = self._geometry
        if min(sizes) < 1:
            raise self.shape_error(f"kernel {g.kernel} does not fit into the image; use a smaller one", bottom[0])
        starts = [(n - 1) * stride - pad for n, stride, pad in zip(sizes, g.stride, g.pad, strict=True)]
        if any(start >= size for start, size in zip(starts, bottom[0].shape[2:], strict=True)):
            raise self.shape_error(
                f"the last window of kernel {g.kernel} and stride {g.stride} would begin outside the image; use "
                "round_mode: FLOOR or a stride no larger than the kernel",
                bottom[0],
            )

    def _output_size(self, size: int, axis: int) -> int:
        g = self._geometry
        stride, pad = g.stride[axis], g.pad[axis]
        span = size + 2 * pad - (g.dilation[axis] * (g.kernel[axis] - 1) + 1)
        pooled = (-(-span // stride) if self._ceil else span // stride) + 1
        # Padding of one axis makes Caffe drop such windows along all axes.
        return pooled - 1 if any(g.pad) and (pooled - 1) * stride >= size + pad else pooled

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self._is_stochastic:
            self._stochastic_forward(bottom, top)
            return
        self._windows.forward(bottom[0].data, top[0].data)
        if len(top) > 1:
            self.backend.copy(self._windows.mask, top[1].data)

    def _weighted_backward(self, top: Blobs, bottom: Blobs) -> None:
        """STOCHASTIC in TEST: dx = 2 x * sum over windows of dy / total - sum over windows of y * dy / total."""
        backend, g = self.backend, self._geometry
        squares, totals = (self.scratch(name, top[0].shape).array for name in ("squares", "totals"))
        by_total, by_square = (self.scratch(name, top[0].shape).array for name in ("dy", "y dy"))
        dx, part, x = (self.scratch(name, bottom[0].shape).array for name in ("dx", "part", "x"))
        backend.copy(bottom[0].data, x)
        backend.apply(weighted_slopes, (squares, totals, top[0].diff), (by_total, by_square))
        backend.pool_average_backward(by_total, dx, g)
        backend.pool_average_backward(by_square, part, g)
        backend.apply(weighted_gradient, (x, dx, part), (bottom[0].diff,))

    def _stochastic_forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, g, x, y = self.backend, self._geometry, bottom[0].data, top[0].data
        if self.dtype != "float32":
            x, y = (self.scratch(name, b.shape).array for name, b in (("x", bottom[0]), ("y", top[0])))
            backend.copy(bottom[0].data, x)
        if self.context.phase == caffe_pb2.TRAIN:
            chance = self.scratch("chance", top[0].shape).array
            backend.random_uniform(chance, self.random_stream(), self.counter())
            backend.pool_stochastic_forward(x, chance, y, self._mask.array, g)
        else:
            squares, totals = (self.scratch(name, top[0].shape).array for name in ("squares", "totals"))
            bottom_squares = self.scratch("squared", bottom[0].shape).array
            backend.apply(squared, (x,), (bottom_squares,))
            backend.pool_average_forward(bottom_squares, squares, g)
            backend.pool_average_forward(x, totals, g)
            backend.apply(weighted, (squares, totals), (y,))
        if y is not top[0].data:
            backend.copy(y, top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        """Pass the gradient to each window's maximum or random element, or evenly to the window's elements."""
        if not propagate_down[0]:
            return
        if self._is_stochastic and self.context.phase != caffe_pb2.TRAIN:
            self._weighted_backward(top, bottom)
        elif self._is_stochastic:
            self.backend.pool_max_backward(top[0].diff, self._mask.array, bottom[0].diff, self._geometry)
        else:
            self._windows.backward(top[0].diff, bottom[0].diff)


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

"""Pooling over windows of the two spatial axes, and spatial pyramids of it (Caffe's `pooling_layer.cpp`, SPP)."""

from __future__ import annotations

import math

from caffepy.backend import Array, Each, Geometry, expression
from caffepy.backend.formulas import squared
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.layer import Blobs, Layer, LayoutAdapter, ScratchBuffer, register_layer

_Parameter = caffe_pb2.PoolingParameter


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


SMALL_WINDOW = 255
"""Largest window whose positions fit in one byte of the mask."""


@register_layer("Pooling")
class PoolingLayer(Layer):
    """The maximum, the average or a random element of each window of x (N, C, H, W) (Caffe's `pooling_layer.cpp`).

    Output size: ceil((size + 2 pad - kernel) / stride) + 1, or floor with `round_mode: FLOOR` or, in prototxts of
    forks, `ceil_mode: false`. With padding of either axis, a last window that would begin at or past size + pad is
    dropped. AVE divides by the window's area, which includes padding up to size + pad. An optional second top of MAX
    holds the index h * W + w of the maximum. STOCHASTIC draws an element with a probability in proportion to its value
    in TRAIN; in TEST y = sum of x^2 / sum of x, 0 if the sum of x is not positive (Zeiler and Fergus 2013).

    Raises:
        ConfigError: settings are missing, 0 or contradictory, or STOCHASTIC has padding.
        ShapeError: the bottom does not have four axes, or a window holds no pixel.
    """

    supports_half = True
    recordable = True
    keeps_labels = True

    tops = (1, 2)
    float32_tops_from = 1
    _mask: ScratchBuffer

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.param.pooling_param
        self._is_max = param.pool == _Parameter.MAX
        self._is_stochastic = param.pool == _Parameter.STOCHASTIC
        if len(top) > 1 and not self._is_max:
            raise self.error("only pool: MAX has a second top, the mask")
        self._check_settings()
        self._stride = self._pair("stride", param.stride)
        self._pad = self._pair("pad", param.pad)
        if self._is_stochastic and self._pad != (0, 0):
            raise self.error("pool: STOCHASTIC has no padding; remove pad, or use MAX or AVE")

    def _check_settings(self) -> None:
        param = self.param.pooling_param
        floor = param.round_mode == _Parameter.FLOOR
        if param.HasField("ceil_mode") and param.HasField("round_mode") and param.ceil_mode == floor:
            raise self.error("ceil_mode and round_mode contradict each other; keep one of them")
        self._ceil = param.ceil_mode and not floor
        one, both = param.HasField("kernel_size"), param.HasField("kernel_h") and param.HasField("kernel_w")
        if param.global_pooling:
            if one or param.HasField("kernel_h") or param.HasField("kernel_w"):
                raise self.error("global_pooling takes the whole image; remove the kernel's size")
        elif one == both:
            raise self.error("give the window as kernel_size, or as kernel_h and kernel_w")
        for name in ("stride", "pad"):
            some = param.HasField(f"{name}_h") or param.HasField(f"{name}_w")
            if some and param.HasField(name):
                raise self.error(f"give either {name} or {name}_h and {name}_w, not both")
            if some and not (param.HasField(f"{name}_h") and param.HasField(f"{name}_w")):
                raise self.error(f"{name}_h and {name}_w are needed together")

    def _pair(self, name: str, both: int) -> tuple[int, int]:
        param = self.param.pooling_param
        if param.HasField(f"{name}_h"):
            both_axes = (getattr(param, f"{name}_h"), getattr(param, f"{name}_w"))
        else:
            both_axes = (both, both)
        if name != "pad" and min(both_axes) < 1:
            raise self.error(f"{name} is {both_axes}; no entry may be 0")
        return both_axes

    def _read_geometry(self, bottom: Blobs) -> Geometry:
        if len(bottom[0].shape) != 4:
            raise self.shape_error(
                "the bottom must have four axes, (N, C, H, W): as in both Caffes, pooling is over two spatial axes",
                bottom[0],
            )
        if self.param.pooling_param.global_pooling:
            kernel = (bottom[0].shape[2], bottom[0].shape[3])
            if self._pad != (0, 0) or self._stride != (1, 1):
                raise self.error("global_pooling goes with pad 0 and stride 1 only")
        else:
            kernel = self._pair("kernel", self.param.pooling_param.kernel_size)
        if any(pad and pad >= size for pad, size in zip(self._pad, kernel, strict=True)):
            raise self.error(f"pad {self._pad} must be smaller than the kernel {kernel}")
        return Geometry(kernel, self._stride, self._pad, (1, 1))

    @property
    def geometry(self) -> Geometry:
        """Kernel, stride and pad along both spatial axes. With global_pooling the kernel has the image's size."""
        return self._geometry

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self._geometry = geometry = self._read_geometry(bottom)
        sizes = tuple(
            self._output_size(bottom[0].shape[2 + i], geometry.kernel[i], geometry.stride[i], geometry.pad[i])
            for i in range(2)
        )
        self._check_windows(bottom, sizes)
        shape = (*bottom[0].shape[:2], *sizes)
        for blob in top:
            blob.reshape(shape)
        if self._is_max:
            small = len(top) == 1 and geometry.kernel[0] * geometry.kernel[1] <= SMALL_WINDOW
            self._mask = self.scratch("mask", shape, self.backend.mask_dtype if small else "int32")
        elif self._is_stochastic:
            self._mask = self.scratch("mask", shape, "int32")

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

    def _output_size(self, size: int, kernel: int, stride: int, pad: int) -> int:
        span = size + 2 * pad - kernel
        pooled = (-(-span // stride) if self._ceil else span // stride) + 1
        # Padding of one axis makes Caffe drop such windows along both axes.
        return pooled - 1 if any(self._pad) and (pooled - 1) * stride >= size + pad else pooled

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, y = bottom[0].data, top[0].data
        if self._is_stochastic:
            self._stochastic_forward(bottom, top)
            return
        if not self._is_max:
            self.backend.pool_average_forward(x, y, self._geometry)
            return
        self.backend.pool_max_forward(x, y, self._mask.array, self._geometry)
        if len(top) > 1:
            self.backend.copy(self._mask.array, top[1].data)

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
        elif self._is_max or self._is_stochastic:
            self.backend.pool_max_backward(top[0].diff, self._mask.array, bottom[0].diff, self._geometry)
        else:
            self.backend.pool_average_backward(top[0].diff, bottom[0].diff, self._geometry)


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

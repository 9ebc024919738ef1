"""Convolution3D, Deconvolution3D and Pooling3D of C3D: windows over the frames, rows and columns of clips."""

from __future__ import annotations

from functools import cached_property

from caffepy.backend import Geometry
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.convolution import BaseConvolutionLayer, ConvolutionLayer, DeconvolutionLayer
from caffepy.layers.layer import Blobs, Layer, register_layer

CLIP_AXES = 5
"""(N, C, frames, height, width)."""


class ClipConvolution(BaseConvolutionLayer):
    """A convolution of clips (N, C, L, H, W) whose kernel is kernel_depth x kernel_size x kernel_size.

    The settings stand in convolution3d_param (C3D 1.1) or in convolution_param (C3D 1.0).

    Raises:
        ConfigError: kernel_size or kernel_depth is missing, or is given for each axis.
    """

    bottoms = (1, 1)  # type: ignore[assignment]
    tops = (1, 1)  # type: ignore[assignment]

    @cached_property
    def settings(self) -> caffe_pb2.ConvolutionParameter:
        """Those of the prototxt, with kernel, stride and pad for each of three axes."""
        old, new = self.param.convolution_param, self.param.convolution3d_param
        param: caffe_pb2.ConvolutionParameter | caffe_pb2.Convolution3DParameter = old
        if self.param.HasField("convolution3d_param"):
            if self.param.HasField("convolution_param"):
                raise self.error("give either convolution3d_param or convolution_param, not both")
            param = new
        sizes = {
            name: _one(self, getattr(param, name), name, default)
            for name, default in (("kernel_size", 0), ("stride", 1), ("pad", 0))
        }
        if not sizes["kernel_size"] or not param.kernel_depth:
            raise self.error("needs kernel_size and kernel_depth")
        return caffe_pb2.ConvolutionParameter(
            num_output=param.num_output,
            bias_term=param.bias_term,
            weight_filler=param.weight_filler,
            bias_filler=param.bias_filler,
            kernel_size=[param.kernel_depth, sizes["kernel_size"], sizes["kernel_size"]],
            stride=[param.temporal_stride, sizes["stride"], sizes["stride"]],
            pad=[param.temporal_pad, sizes["pad"], sizes["pad"]],
        )

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        if len(bottom[0].shape) != CLIP_AXES:
            raise self.shape_error("the bottom must have five axes, (N, C, frames, height, width)", bottom[0])
        super().setup(bottom, top)


def _one(layer: Layer, value: object, name: str, default: int) -> int:
    """Return a setting that C3D 1.0 has once and Caffe repeats."""
    values = [value] if isinstance(value, int) else list(value)  # type: ignore[call-overload]
    if len(values) > 1:
        raise layer.error(f"{name} is given {len(values)} times; it is that of both rows and columns, so give one")
    return values[0] if values else default


@register_layer("Convolution3D")
class Convolution3DLayer(ClipConvolution, ConvolutionLayer):
    """A Convolution over frames, rows and columns of clips (C3D's `convolution3d_layer.cpp`; Tran et al. 2015).

    Shapes: x (N, C, L, H, W), weights (num_output, C, kernel_depth, kernel_size, kernel_size), bias (num_output,),
    y (N, num_output, L', H', W'). L' = (L + 2 temporal_pad - kernel_depth) / temporal_stride + 1; H' and W' follow from
    pad, kernel_size and stride likewise. The settings stand in convolution_param, as in C3D 1.0, or in
    convolution3d_param, as in C3D 1.1. C3D does not read `group`.

    Raises:
        ConfigError: a setting is missing, 0 or given for each axis.
        ShapeError: the bottom does not have five axes, or the kernel does not fit it.
    """


@register_layer("Deconvolution3D")
class Deconvolution3DLayer(ClipConvolution, DeconvolutionLayer):
    """A Deconvolution over frames, rows and columns of clips (C3D's `deconvolution3d_layer.cpp`).

    Shapes: x (N, C, L, H, W), weights (C, num_output, kernel_depth, kernel_size, kernel_size),
    y (N, num_output, L', H', W') with L' = temporal_stride (L - 1) + kernel_depth - 2 temporal_pad; H' and W' follow
    from pad, kernel_size and stride likewise. The settings are those of Convolution3D.

    Raises:
        ConfigError: a setting is missing, 0 or given for each axis.
        ShapeError: the bottom does not have five axes, or the kernel does not fit it.
    """


@register_layer("Pooling3D")
class Pooling3DLayer(Layer):
    """The maximum or the average of each window over frames, rows and columns of clips (C3D's `pool3d_layer.cpp`).

    Shapes: x (N, C, L, H, W), y (N, C, L', H', W') with L' = ceil((L - kernel_depth) / temporal_stride) + 1 and
    H' = ceil((H + 2 pad - kernel_size) / stride) + 1. With padding a last window that would begin at or past
    H + pad is dropped, as in Pooling. AVE divides by the window's size, which includes padding up to H + pad; `pad` is
    for AVE only. The settings stand in pooling_param, as in C3D 1.0, or in pooling3d_param, as in C3D 1.1.

    Where several elements of a window are its maximum, the first one gets the gradient; C3D gives it to each.

    Raises:
        ConfigError: a setting is missing, 0 or contradictory, or the method is STOCHASTIC, which C3D lacks as well.
        ShapeError: the bottom does not have five axes, or a window holds no element.
    """

    supports_half = True
    recordable = True
    keeps_labels = True

    is_max: bool
    """Whether the maximum is taken, not the average."""

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        if self.param.HasField("pooling3d_param") and self.param.HasField("pooling_param"):
            raise self.error("give either pooling3d_param or pooling_param, not both")
        old = not self.param.HasField("pooling3d_param")
        param = self.param.pooling_param if old else self.param.pooling3d_param
        if param.pool == caffe_pb2.PoolingParameter.STOCHASTIC:
            raise self.error("has no pool: STOCHASTIC, in C3D as well; use MAX or AVE")
        self.is_max = param.pool == caffe_pb2.PoolingParameter.MAX
        sizes = (param.kernel_depth, param.temporal_stride, param.kernel_size, param.stride)
        if min(sizes) < 1:
            raise self.error(
                "kernel_depth, temporal_stride, kernel_size and stride are "
                f"{', '.join(map(str, sizes))}; give each, at least 1"
            )
        if param.pad and (self.is_max or param.pad >= param.kernel_size):
            raise self.error(f"pad is {param.pad}; it must be smaller than the kernel, and 0 with pool: MAX")
        self._depth, self._depth_stride, size, stride = sizes
        self._windows = Geometry((size, size), (stride, stride), (param.pad, param.pad), (1, 1))

    @property
    def geometry(self) -> Geometry:
        """Kernel, stride and pad along the three axes."""
        g = self._windows
        return Geometry((self._depth, *g.kernel), (self._depth_stride, *g.stride), (0, *g.pad), (1, 1, 1))

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape, g = bottom[0].shape, self.geometry
        if len(shape) != CLIP_AXES:
            raise self.shape_error("the bottom must have five axes, (N, C, frames, height, width)", bottom[0])
        sizes = []
        for size, kernel, stride, pad in zip(shape[2:], g.kernel, g.stride, g.pad, strict=True):
            pooled = -(-(size + 2 * pad - kernel) // stride) + 1
            pooled -= bool(pad and (pooled - 1) * stride >= size + pad)
            if pooled < 1 or (pooled - 1) * stride - pad >= size:
                raise self.shape_error(
                    f"kernel {g.kernel} with stride {g.stride} does not fit into the clip", bottom[0]
                )
            sizes.append(pooled)
        top[0].reshape((*shape[:2], *sizes))
        self._frames = (shape[0] * shape[2], shape[1], *shape[3:])
        self._pooled_frames = (shape[0] * shape[2], shape[1], *sizes[1:])
        self._columns = (shape[0], shape[1], shape[2], sizes[1] * sizes[2])
        self._pooled_columns = (shape[0], shape[1], sizes[0], sizes[1] * sizes[2])
        if self.is_max:
            self._masks = [
                self.scratch(name, pooled, "int32")
                for name, pooled in (("frame mask", self._pooled_frames), ("mask", self._pooled_columns))
            ]

    # A window's maximum or average is that of its frames' maxima or averages: two poolings over two axes compute it.
    # Clips are channels last in memory, (N, L, H, W, C), so (N * L, C, H, W) and (N, C, L, H * W) are views of them.

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend = self.backend
        x, y = backend.flat(bottom[0].data), backend.flat(top[0].data)
        between = self.scratch("frames", self._pooled_frames, self.dtype).array
        first = (backend.view(x, self._frames), between)
        second = (backend.view(backend.flat(between), self._columns), backend.view(y, self._pooled_columns))
        along_frames = self._along_frames()
        if self.is_max:
            backend.pool_max_forward(*first, self._masks[0].array, self._windows)
            backend.pool_max_forward(*second, self._masks[1].array, along_frames)
        else:
            backend.pool_average_forward(*first, self._windows)
            backend.pool_average_forward(*second, along_frames)

    def _along_frames(self) -> Geometry:
        return Geometry((self._depth, 1), (self._depth_stride, 1), (0, 0), (1, 1))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        """Pass the gradient to each window's first maximum, or evenly to the window's elements."""
        if not propagate_down[0]:
            return
        backend = self.backend
        dx, dy = backend.flat(bottom[0].diff), backend.flat(top[0].diff)
        between = self.scratch("frames", self._pooled_frames, self.dtype).array
        second = backend.view(dy, self._pooled_columns), backend.view(backend.flat(between), self._columns)
        first = between, backend.view(dx, self._frames)
        along_frames = self._along_frames()
        if self.is_max:
            backend.pool_max_backward(second[0], self._masks[1].array, second[1], along_frames)
            backend.pool_max_backward(first[0], self._masks[0].array, first[1], self._windows)
        else:
            backend.pool_average_backward(*second, along_frames)
            backend.pool_average_backward(*first, self._windows)

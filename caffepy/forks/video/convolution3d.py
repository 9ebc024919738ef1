"""Convolution3D, Deconvolution3D and Pooling3D of C3D: windows over the frames, rows and columns of clips."""

from __future__ import annotations

from functools import cached_property

from caffepy.formats.proto import caffe_pb2
from caffepy.layers.convolution import BaseConvolutionLayer, ConvolutionLayer, DeconvolutionLayer
from caffepy.layers.layer import Blobs, Layer, register_layer
from caffepy.layers.pooling import PoolingLayer

_Pool = caffe_pb2.PoolingParameter

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
class Pooling3DLayer(PoolingLayer):
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

    tops = (1, 1)

    @cached_property
    def settings(self) -> caffe_pb2.PoolingParameter:
        """Those of the prototxt for each of three axes."""
        old, new = self.param.pooling_param, self.param.pooling3d_param
        param: caffe_pb2.PoolingParameter | caffe_pb2.Pooling3DParameter = old
        if self.param.HasField("pooling3d_param"):
            if self.param.HasField("pooling_param"):
                raise self.error("give either pooling3d_param or pooling_param, not both")
            param = new
        if param.pool == _Pool.STOCHASTIC:
            raise self.error("has no pool: STOCHASTIC, in C3D as well; use MAX or AVE")
        sizes = (param.kernel_depth, param.temporal_stride, param.kernel_size, param.stride)
        if min(sizes) < 1:
            raise self.error(
                "kernel_depth, temporal_stride, kernel_size and stride are "
                f"{', '.join(map(str, sizes))}; give each, at least 1"
            )
        is_max = param.pool == _Pool.MAX
        if param.pad and (is_max or param.pad >= param.kernel_size):
            raise self.error(f"pad is {param.pad}; it must be smaller than the kernel, and 0 with pool: MAX")
        depth, depth_stride, size, stride = sizes
        return caffe_pb2.PoolingParameter(
            pool=_Pool.MAX if is_max else _Pool.AVE,
            kernel_shape=caffe_pb2.BlobShape(dim=[depth, size, size]),
            stride_shape=caffe_pb2.BlobShape(dim=[depth_stride, stride, stride]),
            pad_shape=caffe_pb2.BlobShape(dim=[0, param.pad, param.pad]),
        )

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        if len(bottom[0].shape) != CLIP_AXES:
            raise self.shape_error("the bottom must have five axes, (N, C, frames, height, width)", bottom[0])
        super().setup(bottom, top)

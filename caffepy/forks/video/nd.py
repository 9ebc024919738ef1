"""NdConvolution and NdPooling of video-caffe, PoolingND of 3D-Caffe: windows over any number of axes."""

from __future__ import annotations

from functools import cached_property

from caffepy.formats.proto import caffe_pb2
from caffepy.layers.convolution import ConvolutionLayer
from caffepy.layers.layer import register_layer
from caffepy.layers.pooling import LARGEST_SETTING, PoolingLayer


@register_layer("NdConvolution")
class NdConvolutionLayer(ConvolutionLayer):
    """A Convolution whose kernel is given by `kernel_shape` (video-caffe's `cudnn_ndconv_layer.cpp`).

    Shapes: x (N, C, spatial…), weights (num_output, C / group, kernel_shape…), bias (num_output,), y (N, num_output,
    spatial'…) with (size + 2 pad - kernel) / stride + 1 along each axis. `stride_shape` is 1 and `pad_shape` 0 when not
    given; kernel_size, stride and pad are not read. An axis of y with one element stays; video-caffe drops it.

    Raises:
        ConfigError: kernel_shape is missing, or a setting is 0 or beyond its limit.
        ShapeError: the settings have another number of axes than the bottom, or the kernel does not fit it.
    """

    @cached_property
    def settings(self) -> caffe_pb2.ConvolutionParameter:
        """Those of the prototxt under the names of Convolution."""
        given = self.param.convolution_param
        if not given.kernel_shape.dim:
            raise self.error("needs kernel_shape, with a dim for each spatial axis")
        kernel, stride, pad = (list(shape.dim) for shape in (given.kernel_shape, given.stride_shape, given.pad_shape))
        for name, values in (("kernel_shape", kernel), ("stride_shape", stride), ("pad_shape", pad)):
            if min(values, default=0) < 0 or max(values, default=0) > LARGEST_SETTING:
                raise self.error(f"{name} is {tuple(values)}; no entry may be below 0 or above {LARGEST_SETTING}")
        return caffe_pb2.ConvolutionParameter(
            num_output=given.num_output,
            bias_term=given.bias_term,
            group=given.group,
            weight_filler=given.weight_filler,
            bias_filler=given.bias_filler,
            kernel_size=kernel,
            stride=stride,
            pad=pad,
        )


@register_layer("NdPooling")
class NdPoolingLayer(PoolingLayer):
    """A Pooling whose windows are given by `kernel_shape` (video-caffe's `cudnn_ndpooling_layer.cpp`).

    Shapes: x (N, C, spatial…), y (N, C, spatial'…) with ceil((size + 2 pad - kernel) / stride) + 1 along each axis, as
    in Pooling. `stride_shape` is 1 and `pad_shape` 0 when not given; kernel_size, stride, pad and round_mode are not
    read. With `global_pooling` the window is the whole image.

    Raises:
        ConfigError: kernel_shape is missing, a setting is 0 or contradictory, or pool is STOCHASTIC.
        ShapeError: the bottom has another number of axes than the settings, or a window holds no element.
    """

    tops = (1, 1)

    @cached_property
    def settings(self) -> caffe_pb2.PoolingParameter:
        """Those of the prototxt that the type reads."""
        given = self.param.pooling_param
        if not given.kernel_shape.dim:
            raise self.error("needs kernel_shape, with a dim for each spatial axis")
        if given.pool == caffe_pb2.PoolingParameter.STOCHASTIC:
            raise self.error("has no pool: STOCHASTIC, in video-caffe as well; use MAX or AVE")
        return caffe_pb2.PoolingParameter(
            pool=given.pool,
            kernel_shape=given.kernel_shape,
            stride_shape=given.stride_shape,
            pad_shape=given.pad_shape,
            global_pooling=given.global_pooling,
        )


@register_layer("PoolingND")
class PoolingNDLayer(PoolingLayer):
    """A Pooling whose settings stand in pooling_nd_param (3D-Caffe's `pooling_nd_layer.hpp`; DenseVoxNet).

    Shapes: x (N, C, spatial…), y (N, C, spatial'…) as in Pooling. kernel_size, stride and pad are given once, or once
    for each spatial axis.

    Raises:
        ConfigError: the window is missing, or a setting is 0 or contradictory.
        ShapeError: the bottom has another number of axes than the settings, or a window holds no element.
    """

    @cached_property
    def settings(self) -> caffe_pb2.PoolingParameter:
        """Those of the prototxt under the names of Pooling."""
        given = self.param.pooling_nd_param
        param = caffe_pb2.PoolingParameter(pool=given.pool, global_pooling=given.global_pooling)
        for name, values in (("kernel", given.kernel_size), ("stride", given.stride), ("pad", given.pad)):
            getattr(param, f"{name}_shape").dim.extend(values)
            if not values:
                param.ClearField(f"{name}_shape")
            for side in (f"{name}_h", f"{name}_w"):
                if given.HasField(side):
                    setattr(param, side, getattr(given, side))
        return param

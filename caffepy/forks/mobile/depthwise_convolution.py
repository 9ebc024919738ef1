"""DepthwiseConvolution and ConvolutionDepthwise: a convolution of each channel by itself."""

from __future__ import annotations

from caffepy.formats.proto import caffe_pb2
from caffepy.layers.convolution import ConvolutionLayer
from caffepy.layers.layer import Blobs, register_layer


@register_layer("DepthwiseConvolution")
class DepthwiseConvolutionLayer(ConvolutionLayer):
    """Convolution with `group` of the prototxt, under the name that MobileNet's forks of Caffe use."""


@register_layer("ConvolutionDepthwise")
class ConvolutionDepthwiseLayer(ConvolutionLayer):
    """Convolution with one group for each channel; the field `group` is ignored.

    Shapes: x and y (N, C, …), weights (C, 1, kernel…), bias (C,).

    Raises:
        ShapeError: num_output is not the number of channels.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.convolution_param
        channels = bottom[0].shape[bottom[0].axis(param.axis, self.where)]
        if param.num_output and param.num_output != channels:
            raise self.shape_error(
                f"num_output is {param.num_output}; a depthwise convolution has as many outputs as channels, "
                f"{channels}: leave it out or use Convolution with group",
                bottom[0],
            )
        depthwise = caffe_pb2.LayerParameter()
        depthwise.CopyFrom(self.param)
        depthwise.convolution_param.group = depthwise.convolution_param.num_output = channels
        self.param = depthwise
        super().setup(bottom, top)
